"""Simulate a trace with the semantics of Synergy's public simulator."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final

from muri.policies.allocation.names import ALIASES, SYNERGY_NAMES, SynergyName, parse_name
from muri.simulator.checks import check_records
from muri.simulator.model import Cluster, JobRecord, Settings, SimulationError, SimulationResult, Trace, TraceJob
from muri.simulator.refusals import check_cluster, check_sizes
from muri.simulator.synergy_reference.film import Film
from muri.simulator.synergy_reference.jobs import job_table
from muri.simulator.synergy_reference.ledger import Ledger
from muri.simulator.synergy_reference.mechanisms import MECHANISMS
from muri.simulator.synergy_reference.rounds import run_rounds

SYNERGY_REFERENCE_POLICIES: Final = tuple(
    name for name in (*SYNERGY_NAMES, *ALIASES) if (parsed := parse_name(name)) and parsed.mechanism in MECHANISMS
)
"""The public simulator's policies that are simulated here; `opt` is not among them."""


def simulate_synergy(
    trace: Trace,
    policy: str,
    cluster: Cluster,
    settings: Settings,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
    *,
    with_spans: bool = False,
) -> SimulationResult:
    """Simulate a trace.

    There is a plan every 300 s, in which every job gets its place anew at no cost. Jobs end at the end of a round.

    Args:
        trace: The jobs, all of Synergy's models.
        policy: One of `SYNERGY_REFERENCE_POLICIES`.
        cluster: Where they run; its CPUs and host memory must be known.
        settings: Only `until` counts; this model has no noise and no seed.
        options: There are none.
        progress: Called now and then with the share of the jobs that have ended, 0 to 1.
        with_spans: Whether the result tells who ran when.

    Raises:
        SimulationError: The policy, an option or a setting is one that this model doesn't know, or the trace cannot run
            on the cluster.
    """
    name = _check(trace, policy, cluster, settings, options or {})
    begin_s = perf_counter()
    ledger = Ledger(job_table(trace, cluster, by_demand=name.mechanism != "proportional"))
    count = min(settings.until or len(trace.jobs), len(trace.jobs))
    film = Film(ledger, cluster, count, progress, with_spans=with_spans)
    decision_s = run_rounds(ledger, name, cluster, film.look, count)
    records, unfinished = ledger.records(), ledger.unfinished()
    _check_ended(trace, records, unfinished)
    return SimulationResult(
        policy=policy,
        trace=trace.name,
        settings=settings,
        cluster=cluster,
        records=records,
        samples=film.samples(),
        spans=film.spans(),
        unfinished=unfinished,
        decision_s=tuple(decision_s),
        wall_s=perf_counter() - begin_s,
    )


def _check(trace: Trace, policy: str, cluster: Cluster, settings: Settings, options: Mapping[str, Any]) -> SynergyName:
    name = check_synergy(policy, options)
    _check_settings(settings)
    _check_room(cluster)
    check_sizes(trace, cluster)
    return name


def _check_ended(trace: Trace, records: Sequence[JobRecord], unfinished: Iterable[TraceJob]) -> None:
    """There is one record for every job that the simulation saw to its end."""
    left = {job.job_id for job in unfinished}
    check_records([job for job in trace.jobs if job.job_id not in left], records)


def check_synergy(policy: str, options: Mapping[str, Any]) -> SynergyName:
    """Refuse a policy or option that this model doesn't know.

    Raises:
        SimulationError: Lists the valid ones.
    """
    name = parse_name(policy)
    valid = ", ".join(SYNERGY_REFERENCE_POLICIES)
    if name is None:
        raise SimulationError(f"the reference model has no policy {policy!r}; of Synergy's it has: {valid}")
    if name.mechanism not in MECHANISMS:
        raise SimulationError(
            f"the reference model has no {policy}: an integer program for each of thousands of rounds would take too "
            f"long, and no results of it are published; simulate it under the default model, or take one of: {valid}"
        )
    if options:
        raise SimulationError(f"under the reference model {policy} has no option {next(iter(options))!r}; it has none")
    return name


def _check_settings(settings: Settings) -> None:
    for name in ("interval_s", "profiling_s", "profile_noise", "outages"):
        if getattr(settings, name):
            raise SimulationError(f"the reference model of Synergy has no {name}; leave it out")


def _check_room(cluster: Cluster) -> None:
    check_cluster(cluster)
    for what, amount, option in (
        ("CPUs", cluster.cpus_per_node, "--cpus-per-node"),
        ("host memory", cluster.mem_gib_per_node, "--mem-gb-per-node"),
    ):
        if not amount > 0:
            raise SimulationError(
                f"the cluster's {what} are unlimited, but Synergy shares them out; say {option}, such as "
                "--cpus-per-node 24 --mem-gb-per-node 500"
            )
