"""What a simulation looked like over time, round by round."""

from collections.abc import Callable

import numpy as np

from muri.simulator.checks import ConservationError, wanted
from muri.simulator.meter import LEAST_REMAINING_S, Samples
from muri.simulator.model import Cluster, GroupSpan, Sample
from muri.simulator.synergy_reference.jobs import ROUND_S, Rows
from muri.simulator.synergy_reference.ledger import Ledger
from muri.simulator.synergy_reference.mechanisms import Round

_PROGRESS_EVERY = 200
"""Rounds from one report of progress to the next."""

_ROUNDING = 1e-6


class Film:
    """Looks at every round before it runs.

    Args:
        ledger: The jobs.
        cluster: The nodes.
        until: How many of the jobs must end.
        progress: Called with the share of these that have ended.
        with_spans: Whether to note who ran when.
    """

    def __init__(
        self,
        ledger: Ledger,
        cluster: Cluster,
        until: int,
        progress: Callable[[float], None] | None,
        *,
        with_spans: bool,
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._until = until
        self._progress = progress
        self._busy = np.array([job.profile.stage_s for job in ledger.table.jobs]) / ledger.table.iteration_s[:, None]
        self._busy *= ledger.table.gpus[:, None] / cluster.gpu_count
        self._samples = Samples()
        self._open: dict[int, tuple[float, int]] | None = {} if with_spans else None  # since when, on which node
        self._spans: list[GroupSpan] = []
        self._checks = wanted()
        self._looks = 0

    def look(self, now_s: float, queue: Rows, found: Round) -> None:
        """Note a round."""
        if self._checks:
            self._check(now_s, queue, found)
        if self._open is not None:
            self._look_at_spans(self._open, now_s, found)
        self._samples.add(self._sample(now_s, queue, found))
        self._looks += 1
        if self._progress is not None and self._looks % _PROGRESS_EVERY == 0:
            self._progress(float(np.isfinite(self._ledger.end_s[: self._until]).mean()))

    def samples(self) -> tuple[Sample, ...]:
        """The samples, thinned; to be asked for at the end."""
        if self._progress is not None:
            self._progress(1.0)
        return self._samples.thinned()

    def spans(self) -> tuple[GroupSpan, ...]:
        """The jobs' stays, each on the first node that it had; to be asked for at the end."""
        for row, since in (self._open or {}).items():
            self._spans.append(self._span(row, *since))
        self._open = None
        return tuple(sorted(self._spans, key=lambda span: (span.start_s, span.members)))

    def _sample(self, now_s: float, queue: Rows, found: Round) -> Sample:
        ledger, table = self._ledger, self._ledger.table
        waits = np.ones(len(table.jobs), dtype=np.bool_)
        waits[found.rows] = False
        off = queue[waits[queue]]
        remaining_s = np.maximum(ledger.left[off] * table.iteration_s[off], LEAST_REMAINING_S)
        waited_s = now_s + ROUND_S / 2 - ledger.seen_s[off]
        busy = np.minimum(found.speeds @ self._busy[found.rows], 1.0).tolist()
        return Sample(
            start_s=now_s,
            length_s=ROUND_S,
            pending=len(off),
            blocking_index=float((waited_s / remaining_s).mean()) if len(off) else 0.0,
            gpus_held=int(table.gpus[found.rows].sum()),
            utilization=(busy[0], busy[1], busy[2], busy[3]),
        )

    def _look_at_spans(self, before: dict[int, tuple[float, int]], now_s: float, found: Round) -> None:
        firsts = dict(zip(found.rows.tolist(), found.first_nodes.tolist(), strict=True))
        for row in before.keys() - firsts.keys():
            self._spans.append(self._span(row, *before[row]))
        self._open = {row: before.get(row, (now_s, node)) for row, node in firsts.items()}

    def _span(self, row: int, since_s: float, node: int) -> GroupSpan:
        job = self._ledger.table.jobs[row]
        return GroupSpan(since_s, float(self._ledger.seen_s[row]), (job.job_id,), node, job.gpu_count)

    def _check(self, now_s: float, queue: Rows, found: Round) -> None:
        """Check what holds whatever the mechanism.

        Raises:
            ConservationError: Says what is wrong.
        """
        held = int(self._ledger.table.gpus[found.rows].sum())
        if held > self._cluster.gpu_count:
            raise ConservationError(f"at {now_s} s: {held} of {self._cluster.gpu_count} GPUs are held")
        if len(set(found.rows.tolist())) != len(found.rows) or not np.isin(found.rows, queue).all():
            raise ConservationError(f"at {now_s} s: a job runs twice, or has ended or not arrived")
        nodes = found.nodes
        if nodes is None:
            return
        if sum(nodes.gpus) != self._cluster.gpu_count - held:
            raise ConservationError(f"at {now_s} s: {held} GPUs are held and {sum(nodes.gpus)} free")
        if min(*nodes.gpus, *nodes.cpus, *nodes.mem_gib) < -_ROUNDING:
            raise ConservationError(f"at {now_s} s: a node has given out more than it has")
