"""Simulate a trace with the semantics of Muri's public simulator."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE
from muri.simulator.engine.checks import (
    ConservationError,
    check_cluster,
    check_noise,
    check_records,
    check_sizes,
    wanted,
)
from muri.simulator.engine.world import LEAST_REMAINING_S
from muri.simulator.model import (
    Cluster,
    GroupSpan,
    JobRecord,
    Sample,
    Settings,
    Simulation,
    SimulationError,
    SimulationResult,
)
from muri_lab.film import Film
from muri_lab.muri_reference.baselines import AntMan, Shortest, Tiresias
from muri_lab.muri_reference.clock import Discipline, run_clock
from muri_lab.muri_reference.muri import Muri, MuriJct, MuriOptions
from muri_lab.muri_reference.state import Ledger, job_table

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
_SIZE: Final = "max_group_size"
_SWITCHES: Final = ("unpack_slow_groups", "service_queues")

_Stay = tuple[tuple[int, ...], int]  # Rows of the jobs that share GPUs, and their first node

REFERENCE_POLICIES: Final = (*_EXCLUSIVE, *_MURI, _JCT)
"""The policies that the public simulator has, the paper's variants of them, and muri-jct for comparison."""


def simulate_reference(task: Simulation) -> SimulationResult:
    """Simulate a trace until its last job ends.

    There is a plan at every arrival and completion, and each of them costs every running job its restart overhead.
    Placement does not change speeds; CPUs, host and GPU memory are ignored. Of the settings, only `profile_noise`,
    `durations_known` (muri-jct) and `seed` count.
    """
    settings = task.settings
    _check_settings(settings)
    check_noise(settings)
    check_cluster(task.cluster)
    check_sizes(task.trace, task.cluster)
    # muri-jct lists the groups of all kinds of jobs, so that jobs of one profile have to stay one kind.
    table = job_table(task.trace, settings.profile_noise, settings.seed, once_a_profile=task.policy == _JCT)
    ledger = Ledger.of(table)
    film = _Film(task, ledger)
    decision_s = run_clock(ledger, _discipline(task, ledger), film.look)
    records = _records(ledger)
    check_records(task.trace.jobs, records)
    return task.result(records, film.samples(), film.spans(), decision_s)


def check_reference(policy: str, options: Mapping[str, Any]) -> None:
    """Refuse a policy or option that this model does not know."""
    if policy not in REFERENCE_POLICIES:
        valid = ", ".join(REFERENCE_POLICIES)
        raise SimulationError(f"the reference model has no policy {policy!r}; valid are: {valid}")
    valid_options = _options_of(policy)
    for name, value in options.items():
        if name not in valid_options:
            listed = ", ".join(valid_options) or "none"
            raise SimulationError(f"under the reference model {policy} has no option {name!r}; valid are: {listed}")
        if name in _SWITCHES and not isinstance(value, bool):
            raise SimulationError(f"{name} is {value!r}; it must be true or false")
        if name == _SIZE and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_GROUP_SIZE
        ):
            raise SimulationError(f"{name} is {value!r}; it must be 1 to {MAX_GROUP_SIZE}")


def _options_of(policy: str) -> tuple[str, ...]:
    if policy in _EXCLUSIVE:
        return ()
    return (_SIZE,) if policy == _JCT else (_SIZE, *_SWITCHES)


def _check_settings(settings: Settings) -> None:
    for name in ("interval_s", "profiling_s", "outages"):
        if getattr(settings, name):
            raise SimulationError(f"the reference model has no {name}; leave it out, or use the default model")


def _discipline(task: Simulation, ledger: Ledger) -> Discipline:
    policy, cluster, options = task.policy, task.cluster, task.options
    if policy in _EXCLUSIVE:
        return _EXCLUSIVE[policy](ledger, cluster)
    if policy == _JCT:
        size = options.get(_SIZE, MAX_GROUP_SIZE)
        return MuriJct(ledger, cluster, durations_known=task.settings.durations_known, max_group_size=size)
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


class _Film(Film[_Stay]):
    """Looks at the ledger before every event."""

    def __init__(self, task: Simulation, ledger: Ledger) -> None:
        super().__init__(task, report_every=100)
        self._ledger = ledger
        self._stage_s = np.array([job.profile.stage_s for job in ledger.table.jobs])
        self._checked = wanted()

    def look(self, next_s: float) -> None:
        """Note what holds until the next event."""
        ledger = self._ledger
        if self._checked:
            self._check()
        if self.with_spans:
            units = ((ledger.group.get(job, (job,)), int(ledger.node[job])) for job in ledger.on().tolist())
            self.note_stays({unit: self._stay(*unit) for unit in units})
        if next_s > ledger.now_s:
            self.note(self._sample(next_s))

    def _sample(self, next_s: float) -> Sample:
        ledger, table = self._ledger, self._ledger.table
        on = ledger.on()
        off = ledger.queue[~ledger.running[ledger.queue]]
        remaining_s = np.maximum(ledger.left[off] * table.iteration_s[off], LEAST_REMAINING_S)
        waited_s = ledger.waited_s[off] + (next_s - ledger.now_s) / 2
        share = table.gpus[on] / (ledger.period_s[on] * self.task.cluster.gpu_count)
        busy = np.minimum((self._stage_s[on] * share[:, None]).sum(axis=0), 1.0).tolist()
        return Sample(
            start_s=ledger.now_s,
            length_s=next_s - ledger.now_s,
            pending=len(off),
            blocking_index=float((waited_s / remaining_s).mean()) if len(off) else 0.0,
            gpus_held=self._ledger.gpus_held,
            utilization=(busy[0], busy[1], busy[2], busy[3]),
        )

    def _stay(self, members: tuple[int, ...], node: int) -> GroupSpan:
        jobs = [self._ledger.table.jobs[row] for row in members]
        return GroupSpan(self._ledger.now_s, math.inf, tuple(job.job_id for job in jobs), node, jobs[0].gpu_count)

    def _end_s(self, key: _Stay) -> float:
        return self._ledger.now_s

    def _done(self) -> float:
        return float(np.isfinite(self._ledger.end_s).mean())

    def _check(self) -> None:
        """Check what holds whatever the policy."""
        ledger, table = self._ledger, self._ledger.table
        held, gpu_count = ledger.gpus_held, self.task.cluster.gpu_count
        if not 0 <= held <= gpu_count:
            raise ConservationError(f"at {ledger.now_s} s: {held} of {gpu_count} GPUs are held")
        if any(len(group) > MAX_GROUP_SIZE for group in ledger.group.values()):
            raise ConservationError(f"at {ledger.now_s} s: more than {MAX_GROUP_SIZE} jobs share GPUs")
        on = np.flatnonzero(ledger.running)
        ended = np.isfinite(ledger.end_s[on])
        early = table.submit_s[on] > ledger.now_s * (1 + 1e-9)
        missing = ~np.isin(on, ledger.queue)
        if (ended | early | missing).any() or (ledger.left[on] < -1e-6).any():
            raise ConservationError(f"at {ledger.now_s} s: a job runs that has ended or not arrived")
        if len(ledger.queue) != len(set(ledger.queue.tolist())):
            raise ConservationError(f"at {ledger.now_s} s: a job is in the queue twice")
        if math.isnan(ledger.now_s):
            raise ConservationError("the clock has stopped")
