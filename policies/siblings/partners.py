"""SJF-BSBF: the jobs that a job may share GPUs with, the result of sharing with each, and the GPUs that it gets."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, isnan, prod
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from muri.policies.siblings.packed import Gpus, Holding, PackedGpu, mem_gib_of
from muri.policies.speed import Floats, Indices, pair_speeds
from muri.policies.traits import InterferenceTable
from muri.policies.types import PlanJob

Seconds = TypeVar("Seconds", float, NDArray[np.float64])  # One time, or one for each of several pairs


_ROUNDING: Final = 1e-9


def mean_now(running_s: Seconds, joining_s: Seconds, running_slowdown: Seconds, joining_slowdown: Seconds) -> Seconds:
    """Mean of both completion times if they share from now on.

    A slow-down is ξ ≥ 1: how many times as long a job takes while it shares, the reciprocal of its pair speed.

    Source: SJF-BSBF, "wise resource sharing", Theorem 1. A job B joins a running job A at some time between now and A's
    end. While B would end first, every second that it waits is a second lost; once A would end first, the mean of both
    completion times is linear in the waiting time. So the best time is now, or after A.
    """
    shared_s = np.minimum(running_slowdown * running_s, joining_slowdown * joining_s)
    lost = 2 - 1 / running_slowdown - 1 / joining_slowdown
    mean_s: Seconds = (running_s + joining_s + shared_s * lost) / 2
    return mean_s


def mean_after(running_s: Seconds, joining_s: Seconds) -> Seconds:
    """Mean of both completion times if the second waits for the first."""
    return running_s + joining_s / 2


class SubBatch(NamedTuple):
    """One way of computing a job's iterations.

    Attributes:
        accumulate_steps: Steps of each iteration.
        mem_gib: Memory that it needs on each GPU; 0 while unknown, which fits anywhere.
        speed: Speed alone, 1 = with the undivided batch.
    """

    accumulate_steps: int
    mem_gib: float
    speed: float


def sub_batches(job: PlanJob) -> tuple[SubBatch, ...]:
    """The ways that a job can be run, by halving its batch: the undivided one first.

    Source: SJF-BSBF, its search for a sub-batch. The steps stay within the script's limit, and a step keeps a sample.
    """
    batch = job.batch
    found = [SubBatch(1, mem_gib_of(job), 1.0)]
    steps = 2
    while batch is not None and steps <= min(batch.max_accumulate_steps, batch.batch_size):
        found.append(SubBatch(steps, mem_gib_of(job, steps), batch.speed(steps)))
        steps *= 2
    return tuple(found)


def alone_s(job: PlanJob, accumulate_steps: int) -> float:
    """Seconds that a job of known duration still needs alone, in this number of steps."""
    assert job.remaining_s is not None
    return job.remaining_s / _speed_alone(job, accumulate_steps)


def _speed_alone(job: PlanJob, accumulate_steps: int) -> float:
    return 1.0 if accumulate_steps == 1 or job.batch is None else job.batch.speed(accumulate_steps)


def _slowest(job: PlanJob, alone: float) -> float:
    """Upper limit of a job's slow-down in a group, from its speed without others."""
    return alone / job.min_speed * (1 + _ROUNDING) if job.min_speed else inf


def model_of(job: PlanJob) -> str:
    """Name of a job's model; empty while it has no profile."""
    return "" if job.profile is None else job.profile.key.name


class PairSpeeds:
    """Pair speeds of the jobs' models, from a table of measured and estimated ones (None knows no pair)."""

    def __init__(self, table: InterferenceTable | None, jobs: Iterable[PlanJob]) -> None:
        self._table = table
        known = frozenset() if table is None else table.models
        self._number = {model: index for index, model in enumerate(sorted({model_of(job) for job in jobs} & known))}

    def number(self, job: PlanJob) -> int | None:
        """Index of a job's model in `slowdowns`; None for one that the table doesn't have."""
        return self._number.get(model_of(job))

    @cached_property
    def slowdowns(self) -> Floats:
        """Array (models, models): ξ of the first with the second; NaN where unknown."""
        return np.empty((0, 0)) if self._table is None else 1 / pair_speeds(self._table, self._number)

    def speed(self, job: PlanJob, other: PlanJob) -> float:
        """Speed of a job with another, 1 = as fast as alone; an equal share of the time where unknown."""
        first, second = self.number(job), self.number(other)
        found = np.nan if first is None or second is None else self.slowdowns[first, second]
        return 0.5 if isnan(found) else float(1 / found)

    def of(self, holding: Holding) -> float:
        """Speed of a job where it is, 1 = as fast as alone and with its undivided batch."""
        return _speed_alone(holding.job, holding.accumulate_steps) * self.beside_others(holding)

    def most_slowdown(self, holding: Holding) -> float:
        """Upper limit of a job's slow-down, relative to alone in as many steps."""
        return _slowest(holding.job, _speed_alone(holding.job, holding.accumulate_steps))

    def beside_others(self, holding: Holding) -> float:
        """Speed of a job among those that it shares GPUs with, 1 = as fast as alone in as many steps.

        On each GPU it is the product of the pair speeds with all others there; the slowest GPU counts.
        """
        job = holding.job
        shared = [gpu.tenants for gpu in holding.gpus if len(gpu.tenants) > 1]
        return min(
            (prod(self.speed(job, other) for other in tenants.values() if other is not job) for tenants in shared),
            default=1.0,
        )


class Partner(NamedTuple):
    """A running job, and the result of joining it.

    Attributes:
        holding: The running job.
        gpus: GPUs that it is alone on.
        running_s: Its remaining seconds as it runs now.
        sub_batch: How the joining job would run.
        now_s: Mean of both completion times if it joins now; NaN where a duration is unknown.
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
        now_s = self.now_s
        if not isnan(now_s):
            joining_s = alone_s(job, sub_batch.accumulate_steps)
            now_s = float(mean_now(self.running_s, joining_s, self.running_slowdown, joining_slowdown))
        return self._replace(sub_batch=sub_batch, now_s=now_s, joining_slowdown=joining_slowdown)


class Offers(NamedTuple):
    """Jobs to share with, the best first, and the best of those with which sharing doesn't pay."""

    partners: tuple[Partner, ...] = ()
    refused: Partner | None = None


class Partners:
    """Jobs of one user and partition that are alone on GPUs, as arrays: a long queue is compared with them."""

    def __init__(self, pairs: PairSpeeds) -> None:
        self._pairs = pairs
        self._jobs: dict[int, _Job] = {}
        self._open: tuple[list[_Job], Floats, Indices] | None = None  # By job id: the jobs, their figures, their models

    def offer(self, holding: Holding) -> None:
        """Let others join a job on GPUs that it has alone; one of an unknown model is left out."""
        self._open = None
        gpus, model = holding.own_gpus, self._pairs.number(holding.job)
        if not gpus or model is None:
            self._jobs.pop(holding.job.job_id, None)
            return
        slowdown = 1 / self._pairs.beside_others(holding)
        left_gib = min(gpu.left_gib for gpu in gpus)
        known = holding.job.remaining_s is not None
        left_s = slowdown * (alone_s(holding.job, holding.accumulate_steps) if known else np.nan)
        most = self._pairs.most_slowdown(holding)
        self._jobs[holding.job.job_id] = _Job(holding, gpus, left_s, slowdown, left_gib, most, model)

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
        """Those whose GPUs have the memory, by their first GPU, whether or not sharing pays."""
        fits = self._fits(job)
        if fits is None:
            return Offers()
        partners = (fits.partner(row) for row in np.flatnonzero(fits.way >= 0).tolist())
        return Offers(tuple(sorted(partners, key=lambda partner: partner.gpus[0].place)))

    def _fits(self, job: PlanJob) -> "_Fits | None":
        """The best way with each: the soonest mean completion, or while durations are unknown the fewest steps."""
        number = self._pairs.number(job)
        if number is None or not self._jobs:
            return None
        if self._open is None:
            jobs = [self._jobs[job_id] for job_id in sorted(self._jobs)]
            figures = np.array([job[2:6] for job in jobs]).T
            self._open = jobs, figures, np.array([job.model for job in jobs], dtype=np.intp)
        jobs, (running_s, slowdown, left_gib, most_slowdown), model = self._open
        # The slowest of a running job's GPUs counts.
        running = np.maximum(self._pairs.slowdowns[model, number] / slowdown, 1.0)
        joining = self._pairs.slowdowns[number, model]
        way, best_s = np.full(len(jobs), -1, dtype=np.intp), np.full(len(jobs), np.nan)
        remaining_s = np.full(len(jobs), np.nan if job.remaining_s is None else job.remaining_s)
        ways = sub_batches(job)
        keeps = running * slowdown <= most_slowdown
        for index, sub_batch in enumerate(ways):
            now_s = mean_now(running_s, remaining_s / sub_batch.speed, running, joining)
            fits = (left_gib >= sub_batch.mem_gib) & ~np.isnan(running)
            fits &= keeps & (joining <= _slowest(job, sub_batch.speed))
            better = fits & ((way < 0) | (now_s < best_s))
            way[better], best_s[better] = index, now_s[better]
        return _Fits(jobs, ways, way, best_s, mean_after(running_s, remaining_s), running, joining)


class Choice(NamedTuple):
    """GPUs for a job, the jobs that it joins there, and how it runs: in the most steps that any of them needs."""

    gpus: Gpus
    partners: tuple[Partner, ...]
    sub_batch: SubBatch


def choose_gpus(
    job: PlanJob, sizes: Sequence[int], partners: Sequence[Partner], by_node: Mapping[str, Gpus]
) -> Choice | None:
    """The GPUs of the best partners, then free ones, on the nodes whose partners are the best; None if too few.

    The slowest GPU sets the pace of a job, so a free one with it would be half wasted: it stays free. `sizes` are GPUs
    on each node; a job may be joined on some of its GPUs only.

    Source: SJF-BSBF, Algorithm 1, lines 14-17, and section V-B2.
    """
    usable = _usable(partners, by_node)
    chosen: list[_Ranked] = []
    for size in sizes:
        found = [_node_key(node, ranked, size) for node, ranked in usable.items() if len(ranked) >= size]
        if not found:
            return None
        chosen += usable.pop(min(found)[-1])[:size]
    return _choice(job, chosen, partners)


def choose_whole_set(job: PlanJob, sizes: Sequence[int], partners: Iterable[Partner]) -> Choice | None:
    """Exactly the GPUs of the best partner that has as many on as many nodes."""
    for partner in partners:
        whole = partner.gpus == partner.holding.gpus
        if whole and sorted(share.gpu_count for share in partner.holding.shares) == sorted(sizes):
            return _choice(job, [_Ranked(0, gpu) for gpu in partner.gpus], [partner])
    return None


def choice_that_pays(
    job: PlanJob, sizes: Sequence[int], partners: Sequence[Partner], by_node: Mapping[str, Gpus]
) -> Choice | None:
    """As `choose_gpus`, but each pair is tested again with the slow-down by all partners.

    The slowest of its GPUs sets the pace, so ξ of the joining job is that with its worst partner. Where a pair fails
    this test, the worst partner is left out and the choice is made again.
    """
    left = list(partners)
    while left:
        choice = choose_gpus(job, sizes, left, by_node)
        if choice is None or all(partner.pays for partner in choice.partners):
            return choice
        joined = {partner.holding.job.job_id for partner in choice.partners}
        used = (index for index, partner in enumerate(left) if partner.holding.job.job_id in joined)
        del left[max(used, key=lambda index: (left[index].joining_slowdown, index))]
    return None


def sizes_of(job: PlanJob, largest_node: int | None, node_count: int) -> tuple[int, ...] | None:
    """GPUs on each of a job's nodes (a job larger than any node fills nodes); None where nodes are too few."""
    if job.node_count > 1:
        size, full, rest = job.gpu_count // job.node_count, job.node_count, 0
    elif not largest_node or job.gpu_count <= largest_node:
        size, full, rest = job.gpu_count, 1, 0
    else:
        size, (full, rest) = largest_node, divmod(job.gpu_count, largest_node)
    if full + bool(rest) > node_count:
        return None
    return (size,) * full + ((rest,) if rest else ())


class _Job(NamedTuple):
    """A job that can be joined, the GPUs that it is alone on, and its figures."""

    holding: Holding
    gpus: Gpus
    running_s: float
    slowdown: float
    left_gib: float
    most_slowdown: float
    model: int


class _Fits(NamedTuple):
    """A job with each open one: the way of computing its batch (-1: none fits), and the result of sharing."""

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


class _Ranked(NamedTuple):
    """A GPU, and the rank of the partner that is on it; a free one ranks behind all partners."""

    rank: int
    gpu: PackedGpu


def _usable(partners: Sequence[Partner], by_node: Mapping[str, Gpus]) -> dict[str, list[_Ranked]]:
    """The GPUs of each node that can be taken: those of partners by rank, then free ones with enough memory."""
    usable = {node: list[_Ranked]() for node in by_node}
    for rank, partner in enumerate(partners):
        for gpu in partner.gpus:
            usable[gpu.node].append(_Ranked(rank, gpu))
    least_gib = min((partner.sub_batch.mem_gib for partner in partners), default=0.0)
    for node, gpus in by_node.items():
        free = (gpu for gpu in gpus if not gpu.tenants and gpu.left_gib >= least_gib)
        usable[node] += [_Ranked(len(partners), gpu) for gpu in free]
    return usable


def _node_key(node: str, ranked: Sequence[_Ranked], size: int) -> tuple[int, int, int, str]:
    """The smaller the better: its worst GPU, then fewer partners, then fewer GPUs that are left over."""
    ranks = {item.rank for item in ranked[:size]}
    return max(ranks), len(ranks), len(ranked) - size, node


def _choice(job: PlanJob, chosen: Iterable[_Ranked], partners: Sequence[Partner]) -> Choice:
    """A choice, its partners in their order, each among the others."""
    items = tuple(chosen)
    joined = [partners[rank] for rank in sorted({item.rank for item in items if item.gpu.tenants})]
    sub_batch = max((partner.sub_batch for partner in joined), default=SubBatch(1, 0.0, 1.0))
    slowdown = max((partner.joining_slowdown for partner in joined), default=1.0)
    if len(joined) > 1:
        joined = [partner.beside_others(job, sub_batch, slowdown) for partner in joined]
    gpus = tuple(sorted((item.gpu for item in items), key=lambda gpu: gpu.place))
    return Choice(gpus, tuple(joined), sub_batch)
