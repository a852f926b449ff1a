"""Simulate a trace with the semantics of the Muri paper's public simulator."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE
from muri.simulator.checks import check_records
from muri.simulator.model import Cluster, JobRecord, Settings, SimulationError, SimulationResult, Trace
from muri.simulator.reference.antman import AntMan
from muri.simulator.reference.clock import run_clock
from muri.simulator.reference.events import Discipline
from muri.simulator.reference.film import Film
from muri.simulator.reference.jct import MuriJct
from muri.simulator.reference.jobs import job_table
from muri.simulator.reference.ledger import Ledger
from muri.simulator.reference.muri import Muri, MuriOptions
from muri.simulator.reference.shortest import Shortest
from muri.simulator.reference.tiresias import Tiresias
from muri.simulator.refusals import check_cluster, check_noise, check_sizes

_MURI: Final[Mapping[str, Mapping[str, Any]]] = {
    "muri-s": {"durations_known": True},
    "muri-l": {"durations_known": False},
    "muri-s-worst-ordering": {"durations_known": True, "ordering": "worst"},
    "muri-l-worst-ordering": {"durations_known": False, "ordering": "worst"},
    "muri-s-no-blossom": {"durations_known": True, "blossom": False},
    "muri-l-no-blossom": {"durations_known": False, "blossom": False},
}

_EXCLUSIVE: Final[Mapping[str, Callable[[Ledger, Cluster], Discipline]]] = {
    "srtf": lambda ledger, cluster: Shortest(ledger, cluster, by_service=False),
    "srsf": lambda ledger, cluster: Shortest(ledger, cluster, by_service=True),
    "tiresias": Tiresias,
    "antman": AntMan,
}

_JCT: Final = "muri-jct"

REFERENCE_POLICIES: Final = (*_EXCLUSIVE, *_MURI, _JCT)
"""The policies that the public simulator has, the paper's variants of them, and muri-jct for comparison."""


def simulate_reference(
    trace: Trace,
    policy: str,
    cluster: Cluster,
    settings: Settings,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
    *,
    with_spans: bool = False,
) -> SimulationResult:
    """Simulate a trace until its last job ends.

    The clock has no interval: there is a plan at every arrival and completion, and each of them costs every running job
    its restart overhead. Which GPUs a job gets makes no difference to its speed; CPUs, host and GPU memory are not
    looked at.

    Args:
        trace: The jobs.
        policy: One of `REFERENCE_POLICIES`.
        cluster: Where they run.
        settings: Of these, only `profile_noise`, `durations_known` (muri-jct) and `seed` count.
        options: `max_group_size` for policies that share GPUs.
        progress: Called now and then with the share of the jobs that have ended, 0 to 1.
        with_spans: Whether the result tells who shared GPUs with whom and when.

    Raises:
        SimulationError: The policy, an option or a setting is one that this model doesn't know, or the trace cannot run
            on the cluster.
    """
    _check(trace, policy, cluster, settings, options or {})
    begin_s = perf_counter()
    ledger = Ledger.of(job_table(trace, settings.profile_noise, settings.seed))
    discipline = _discipline(policy, ledger, cluster, settings, options or {})
    film = Film(ledger, cluster, progress, with_spans=with_spans)
    decision_s = run_clock(ledger, discipline, film.look)
    records = _records(ledger)
    check_records(trace.jobs, records)
    return SimulationResult(
        policy=policy,
        trace=trace.name,
        settings=settings,
        cluster=cluster,
        records=records,
        samples=film.samples(),
        spans=film.spans(),
        decision_s=tuple(decision_s),
        wall_s=perf_counter() - begin_s,
    )


def _check(trace: Trace, policy: str, cluster: Cluster, settings: Settings, options: Mapping[str, Any]) -> None:
    check_reference(policy, options)
    _check_settings(settings)
    check_noise(settings)
    check_cluster(cluster)
    check_sizes(trace, cluster)


def check_reference(policy: str, options: Mapping[str, Any]) -> None:
    """Refuse a policy or option that this model doesn't know.

    Raises:
        SimulationError: Lists the valid ones.
    """
    if policy not in REFERENCE_POLICIES:
        valid = ", ".join(REFERENCE_POLICIES)
        raise SimulationError(f"the reference model has no policy {policy!r}; valid are: {valid}")
    valid_options = () if policy in _EXCLUSIVE else ("max_group_size",)
    for name, value in options.items():
        if name not in valid_options:
            listed = ", ".join(valid_options) or "none"
            raise SimulationError(f"under the reference model {policy} has no option {name!r}; valid are: {listed}")
        if not isinstance(value, int) or not 1 <= value <= MAX_GROUP_SIZE:
            raise SimulationError(f"max_group_size is {value!r}; it must be 1 to {MAX_GROUP_SIZE}")


def _check_settings(settings: Settings) -> None:
    for name in ("interval_s", "profiling_s", "outages"):
        if getattr(settings, name):
            raise SimulationError(f"the reference model has no {name}; leave it out, or use the default model")


def _discipline(
    policy: str, ledger: Ledger, cluster: Cluster, settings: Settings, options: Mapping[str, Any]
) -> Discipline:
    if policy in _EXCLUSIVE:
        return _EXCLUSIVE[policy](ledger, cluster)
    if policy == _JCT:
        size = options.get("max_group_size", MAX_GROUP_SIZE)
        return MuriJct(ledger, cluster, durations_known=settings.durations_known, max_group_size=size)
    return Muri(ledger, cluster, MuriOptions(**_MURI[policy], **options))


def _records(ledger: Ledger) -> tuple[JobRecord, ...]:
    records = [
        JobRecord(
            job=job,
            # An arrival may be counted with an earlier one at nearly its time.
            start_s=max(float(ledger.start_s[row]), job.submit_s),
            end_s=float(ledger.end_s[row]),
            run_s=float(ledger.received_s[row]),
            restarts=int(ledger.starts[row] - 1 + ledger.regroups[row]),
            shared_s=float(np.minimum(ledger.shared_s[row], ledger.received_s[row])),
        )
        for row, job in enumerate(ledger.table.jobs)
    ]
    return tuple(sorted(records, key=lambda record: record.job.job_id))
