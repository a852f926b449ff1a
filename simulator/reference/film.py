"""What a simulation looked like over time: samples, and who shared GPUs with whom."""

import math
from collections.abc import Callable

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE
from muri.simulator.checks import ConservationError, wanted
from muri.simulator.meter import LEAST_REMAINING_S, Samples
from muri.simulator.model import Cluster, GroupSpan, Sample
from muri.simulator.reference.ledger import Ledger

_PROGRESS_EVERY = 100
"""Events from one report of progress to the next."""


class Film:
    """Looks at the ledger before every event.

    Args:
        ledger: The jobs.
        cluster: The nodes.
        progress: Called with the share of jobs that have ended.
        with_spans: Whether to note who shared GPUs.
    """

    def __init__(
        self,
        ledger: Ledger,
        cluster: Cluster,
        progress: Callable[[float], None] | None,
        *,
        with_spans: bool,
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._progress = progress
        self._stage_s = np.array([job.profile.stage_s for job in ledger.table.jobs])
        self._samples = Samples()
        self._open: dict[tuple[tuple[int, ...], int], float] | None = {} if with_spans else None
        self._spans: list[GroupSpan] = []
        self._checks = wanted()
        self._looks = 0

    def look(self, next_s: float) -> None:
        """Note what holds until the next event."""
        ledger = self._ledger
        if self._checks:
            self._check()
        if self._open is not None:
            self._look_at_groups(self._open)
        if next_s <= ledger.now_s:
            return
        self._samples.add(self._sample(next_s))
        self._looks += 1
        if self._progress is not None and self._looks % _PROGRESS_EVERY == 0:
            self._progress(float(np.isfinite(ledger.end_s).mean()))

    def samples(self) -> tuple[Sample, ...]:
        """The samples, thinned; to be asked for at the end."""
        if self._progress is not None:
            self._progress(1.0)
        return self._samples.thinned()

    def spans(self) -> tuple[GroupSpan, ...]:
        """All groups and single jobs; to be asked for at the end."""
        for (members, node), since_s in (self._open or {}).items():
            self._spans.append(self._span(members, node, since_s))
        self._open = None
        return tuple(sorted(self._spans, key=lambda span: (span.start_s, span.members)))

    def _sample(self, next_s: float) -> Sample:
        ledger, table = self._ledger, self._ledger.table
        on = ledger.on()
        off = ledger.queue[~ledger.running[ledger.queue]]
        remaining_s = np.maximum(ledger.left[off] * table.iteration_s[off], LEAST_REMAINING_S)
        waited_s = ledger.waited_s[off] + (next_s - ledger.now_s) / 2
        share = table.gpus[on] / (ledger.period_s[on] * self._cluster.gpu_count)
        busy = np.minimum((self._stage_s[on] * share[:, None]).sum(axis=0), 1.0).tolist()
        return Sample(
            start_s=ledger.now_s,
            length_s=next_s - ledger.now_s,
            pending=len(off),
            blocking_index=float((waited_s / remaining_s).mean()) if len(off) else 0.0,
            gpus_held=self._ledger.gpus_held,
            utilization=(busy[0], busy[1], busy[2], busy[3]),
        )

    def _look_at_groups(self, before: dict[tuple[tuple[int, ...], int], float]) -> None:
        ledger = self._ledger
        units = {(ledger.group.get(job, (job,)), int(ledger.node[job])) for job in ledger.on().tolist()}
        for unit in before.keys() - units:
            self._spans.append(self._span(*unit, before[unit]))
        self._open = {unit: before.get(unit, ledger.now_s) for unit in units}

    def _span(self, members: tuple[int, ...], node: int, since_s: float) -> GroupSpan:
        jobs = [self._ledger.table.jobs[row] for row in members]
        return GroupSpan(since_s, self._ledger.now_s, tuple(job.job_id for job in jobs), node, jobs[0].gpu_count)

    def _check(self) -> None:
        """Check what holds whatever the policy.

        Raises:
            ConservationError: Says what is wrong.
        """
        ledger, table = self._ledger, self._ledger.table
        held = self._ledger.gpus_held
        if not 0 <= held <= self._cluster.gpu_count:
            raise ConservationError(f"at {ledger.now_s} s: {held} of {self._cluster.gpu_count} GPUs are held")
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
