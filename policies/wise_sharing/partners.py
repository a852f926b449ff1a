"""Which jobs a job may share GPUs with: those that are alone on some, and what sharing with each would come to."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from muri.policies.cycle.packed import Gpus, Holding
from muri.policies.speed.model import Floats, Indices
from muri.policies.types import PlanJob
from muri.policies.wise_sharing.completion import mean_after, mean_now
from muri.policies.wise_sharing.pair_speeds import PairSpeeds
from muri.policies.wise_sharing.sub_batch import SubBatch, alone_s, sub_batches


class Partner(NamedTuple):
    """A running job, and what comes of joining it.

    Attributes:
        holding: The running job.
        gpus: GPUs that it is alone on.
        running_s: What it still needs as it runs now.
        sub_batch: How the joining job would run.
        now_s: Mean of both completion times if it joins now; not a number where a duration is unknown.
        after_s: The same if it runs after the other, with its undivided batch.
        running_slowdown: ξ of the running job.
        joining_slowdown: ξ of the joining job.
    """

    holding: Holding
    gpus: Gpus
    running_s: float
    sub_batch: SubBatch
    now_s: float
    after_s: float
    running_slowdown: float
    joining_slowdown: float

    @property
    def pays(self) -> bool:
        """Whether both are done sooner on average if they share now (Theorem 1)."""
        return self.now_s < self.after_s

    def beside_others(self, job: PlanJob, sub_batch: SubBatch, joining_slowdown: float) -> "Partner":
        """The same pair when the joining job is slowed down by others as well."""
        if np.isnan(self.now_s):
            return self._replace(sub_batch=sub_batch, joining_slowdown=joining_slowdown)
        joining_s = alone_s(job, sub_batch.accumulate_steps)
        now_s = mean_now(self.running_s, joining_s, self.running_slowdown, joining_slowdown)
        return self._replace(sub_batch=sub_batch, now_s=float(now_s), joining_slowdown=joining_slowdown)


class Offers(NamedTuple):
    """Whom a job may join.

    Attributes:
        partners: Jobs to share with, the best first.
        refused: The best of those with whom sharing doesn't pay.
    """

    partners: tuple[Partner, ...] = ()
    refused: Partner | None = None


class Partners:
    """Jobs of one user and partition that are alone on GPUs, as arrays: a long queue is compared with them.

    Args:
        pairs: Slow-downs of pairs of models.
    """

    def __init__(self, pairs: PairSpeeds) -> None:
        self._pairs = pairs
        self._jobs: dict[int, _Job] = {}
        self._open: _Open | None = None

    def offer(self, holding: Holding) -> None:
        """Let others join a job where it is alone, if it is anywhere; one whose model nobody knows is left out."""
        self._open = None
        gpus, model = holding.own_gpus, self._pairs.number(holding.job)
        if not gpus or model is None:
            self._jobs.pop(holding.job.job_id, None)
            return
        slowdown = 1 / self._pairs.beside_others(holding)
        left_gib = min(gpu.left_gib for gpu in gpus)
        self._jobs[holding.job.job_id] = _Job(holding, gpus, slowdown * _left_s(holding), slowdown, left_gib, model)

    def that_pay(self, job: PlanJob) -> Offers:
        """Those that are worth joining now, by mean completion time; of known durations only."""
        fits = self._fits(job) if job.remaining_s is not None else None
        if fits is None:
            return Offers()
        now_s, after_s = fits.now_s, fits.after_s
        pay = np.flatnonzero(now_s < after_s).tolist()
        pay.sort(key=lambda row: (now_s[row], row))
        gains = np.where(np.isfinite(now_s), after_s - now_s, -np.inf)
        best = int(gains.argmax())
        refused = fits.partner(best) if not pay and np.isfinite(gains[best]) else None
        return Offers(tuple(fits.partner(row) for row in pay), refused)

    def that_fit(self, job: PlanJob) -> Offers:
        """Those whose GPUs have the memory, by their first GPU, whatever sharing comes to."""
        fits = self._fits(job)
        if fits is None:
            return Offers()
        partners = (fits.partner(row) for row in np.flatnonzero(fits.way >= 0).tolist())
        return Offers(tuple(sorted(partners, key=lambda partner: partner.gpus[0].place)))

    def _fits(self, job: PlanJob) -> "_Fits | None":
        number = self._pairs.number(job)
        if number is None or not self._jobs:
            return None
        if self._open is None:
            self._open = _Open.of([self._jobs[job_id] for job_id in sorted(self._jobs)])
        return _fit(job, self._open, self._pairs.slowdowns[:, number], self._pairs.slowdowns[number])


class _Job(NamedTuple):
    """A job that can be joined, and the GPUs that it is alone on.

    With what it still needs as it runs now, how much others slow it down already, the least memory left, and its model.
    """

    holding: Holding
    gpus: Gpus
    running_s: float
    slowdown: float
    left_gib: float
    model: int


class _Open(NamedTuple):
    """Such jobs by job id, and their figures as arrays."""

    jobs: Sequence[_Job]
    running_s: Floats
    slowdown: Floats
    left_gib: Floats
    model: Indices

    @staticmethod
    def of(jobs: Sequence[_Job]) -> "_Open":
        running_s, slowdown, left_gib = np.array([job[2:5] for job in jobs]).T
        return _Open(jobs, running_s, slowdown, left_gib, np.array([job.model for job in jobs], dtype=np.intp))


class _Fits(NamedTuple):
    """A job beside each open one: the way of computing its batch (-1: none fits), and what comes of sharing."""

    jobs: Sequence[_Job]
    ways: Sequence[SubBatch]
    way: Indices
    now_s: Floats
    after_s: Floats
    running_slowdown: Floats
    joining_slowdown: Floats

    def partner(self, row: int) -> Partner:
        return Partner(
            *self.jobs[row][:3],
            self.ways[self.way[row]],
            float(self.now_s[row]),
            float(self.after_s[row]),
            float(self.running_slowdown[row]),
            float(self.joining_slowdown[row]),
        )


def _fit(job: PlanJob, jobs: _Open, running_slowdown: Floats, joining_slowdown: Floats) -> _Fits:
    """The best way beside each: the soonest mean completion, or while durations are unknown the fewest steps."""
    running = np.maximum(running_slowdown[jobs.model] / jobs.slowdown, 1.0)  # the slowest of its GPUs counts
    joining = joining_slowdown[jobs.model]
    way, best_s = np.full(len(running), -1, dtype=np.intp), np.full(len(running), np.nan)
    remaining_s = np.full(len(running), np.nan if job.remaining_s is None else job.remaining_s)
    ways = sub_batches(job)
    for index, sub_batch in enumerate(ways):
        now_s = mean_now(jobs.running_s, remaining_s / sub_batch.speed, running, joining)
        fits = (jobs.left_gib >= sub_batch.mem_gib) & ~np.isnan(running)
        better = fits & ((way < 0) | (now_s < best_s))
        way[better], best_s[better] = index, now_s[better]
    return _Fits(jobs.jobs, ways, way, best_s, mean_after(jobs.running_s, remaining_s), running, joining)


def _left_s(holding: Holding) -> float:
    return np.nan if holding.job.remaining_s is None else alone_s(holding.job, holding.accumulate_steps)
