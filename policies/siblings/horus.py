"""Horus: jobs share GPUs where predicted memory and utilization make it cheap; jobs of a kind wait together."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import SlurmQueue
from muri.policies.cycle.free_gpus import Shares
from muri.policies.cycle.queue import pools
from muri.policies.cycle.reasons import blanks, plural
from muri.policies.cycle.validation import check_request
from muri.policies.options import PolicyOptions
from muri.policies.schedulers import TO_THE_END, FixedOrder, fifo
from muri.policies.siblings.horus_cost import Kind, Load, Places, knows_utilization, utilization_of
from muri.policies.siblings.packed import Holding, PackedGpus, mem_gib_of, with_promises
from muri.policies.types import Plan, PlanJob, PlanRequest, Reason, Sharer, Solo, Waiting, waited_s
from muri.profiler.records import ESTIMATES
from muri.profiler.slowdown import Slowdown

_AGED_FIRST: Final = Reason("a job that has waited longer than max_wait_s goes first and has no place yet")
_STOPPED_ONCE: Final = Reason("it ran before and is back in the queue, so it waits for GPUs of its own")
_ALONE: Final = Reason("no other job is on its GPUs")


class Rule(Protocol):
    """A rule for choosing among GPUs that have the memory."""

    def price(self, before: Load, after: Load, capacity_gib: float, slowdown: Slowdown) -> float | None:
        """Price of a GPU from its load without and with a job, its memory (inf: unknown) and f; None: not allowed."""

    def why(self, price: float, load: Load, capacity_gib: float, slowdown: Slowdown) -> Reason:
        """Why a place was taken, with the load of its fullest GPU."""

    def why_no_partner(self, mem_gib: float) -> Reason:
        """Why a job that may share, and needs this memory, finds no GPU to join."""


@dataclass(frozen=True, slots=True)
class ByCost:
    """Horus's cost: ω1·(used memory + M_j)/capacity + ω2·f(cumulative utilization) (Horus, TPDS 2021).

    f of a job alone is 1: an idle GPU is always cheaper than the same one in use. Not in the paper, whose only limit is
    memory: a GPU's jobs must get `min_speedup` times as much done with a newcomer as without it. Otherwise jobs pile up
    on a full GPU until all of them together are slower than one after the other.
    """

    memory_weight: float
    slowdown_weight: float
    min_speedup: float

    def price(self, before: Load, after: Load, capacity_gib: float, slowdown: Slowdown) -> float | None:
        """See `Rule`; memory of unknown (infinite) capacity costs nothing."""
        speed = after.speed(slowdown)
        if before.count and after.count * speed < self.min_speedup * before.count * before.speed(slowdown):
            return None
        return self.memory_weight * (after.used_gib / capacity_gib) + self.slowdown_weight / speed

    def why(self, price: float, load: Load, capacity_gib: float, slowdown: Slowdown) -> Reason:
        """See `Rule`."""
        return Reason(
            "the cheapest place: cost {:.2f} with {}, and {:.0f} % use (f = {:.2f})",
            (price, needed_memory(load, capacity_gib), 100 * load.utilization, 1 / load.speed(slowdown)),
        )

    def why_no_partner(self, mem_gib: float) -> Reason:
        """See `Rule`."""
        return Reason(
            "beside jobs that may share with it, no GPU has {:.1f} GiB left and gets more done with it than without",
            (mem_gib,),
        )


class PackingCycle:
    """The decisions so far on a checked request. Running jobs stay, unless `stop` takes them off."""

    def __init__(self, request: PlanRequest, options: PolicyOptions, rule: Rule) -> None:
        self.packed = PackedGpus(request)
        self._request = request
        self._rule = rule
        self._most = min(options.max_group_size, request.max_group_size)
        self._places = Places(self.packed, request, rule.price, self._most)
        self._why: dict[int, Reason] = {}
        self._released: list[Solo] = []
        self._slurm = SlurmQueue(request, self.packed.free, options.max_wait_s, self._released, self.packed.set_aside)
        self._waiting: list[tuple[PlanJob, tuple[Reason, ...], bool]] = []
        self._closed: set[str] = set()
        self._refused: set[Kind] = set()

    def sort_out(self, jobs: Iterable[PlanJob]) -> tuple[list[PlanJob], list[PlanJob]]:
        """Give Slurm its own jobs, hold unknown ones, and separate the aged from the others.

        Returns:
            The jobs that go ahead because they waited too long, and the others that GPUs can be given to.
        """
        aged, ready = [], []
        for job in sorted(jobs, key=lambda job: (job.submit_s, job.job_id)):
            if self._slurm.takes_larger(job):
                continue
            if not self._slurm.is_there and self._slurm.is_overdue(job):
                aged.append(job)
            elif self._most > 1 and job.may_share and not knows_utilization(job):
                self.wait(job, reasons.NEEDS_PROFILE)
            else:
                ready.append(job)
        return aged, ready

    def seat_aged(self, jobs: Iterable[PlanJob]) -> None:
        """Place jobs that have waited too long; until one of them has a place, no other job of its nodes starts."""
        pool_of = {partition: pool for pool in pools(self._request) for partition in pool}
        for job in jobs:
            if not self.seat(job):
                self._closed |= pool_of[job.partition]

    def seat(self, job: PlanJob, *, idle_only: bool = False) -> bool:
        """Put a waiting job on the GPUs that cost it least (idle ones only, if so asked); without any, let it wait."""
        if job.partition in self._closed:
            self.wait(job, _AGED_FIRST)
            return False
        kind = self._places.kind(job, idle_only=idle_only)
        if kind in self._refused or not self._put(job, idle_only=idle_only):
            self._refused.add(kind)  # no job leaves within a plan, so the next of its kind need not look
            self.wait(job, *self._no_sharing(job, idle_only=idle_only), no_gpus=True)
            return False
        return True

    def _put(self, job: PlanJob, *, idle_only: bool) -> bool:
        place = self._places.best(job, idle_only=idle_only)
        if place is None:
            return False
        self._places.changed(self.packed.put(job, place.gpus))
        fullest = max(place.gpus, key=lambda gpu: (self._places.load(gpu).utilization, gpu.mem_gib))
        load = self._places.load(fullest)
        self._why[job.job_id] = self._rule.why(place.price, load, fullest.capacity_gib, self._places.slowdown(job))
        return True

    def wait(self, job: PlanJob, *notes: Reason, no_gpus: bool = False) -> None:
        """Keep a job held, or give it to Slurm's own queue if it has waited too long."""
        if not self._slurm.takes_overdue(job):
            self._waiting.append((job, notes, no_gpus))

    def stop(self, job_id: int, reason: Reason) -> Waiting:
        """Take a running job off its GPUs."""
        self._places.changed(self.packed.take(job_id))
        return Waiting(job_id, (reason,), preempted=True)

    def speed(self, holding: Holding) -> float:
        """Predicted speed of a job: that on its slowest GPU."""
        slowdown = self._places.slowdown(holding.job)
        return min(self._places.load(gpu).speed(slowdown) for gpu in holding.gpus)

    def result(self, name: str, stopped: tuple[Waiting, ...] = ()) -> Plan:
        """The plan."""
        sharers = tuple(self._sharer(holding) for holding in self.packed.holdings.values())
        waiting = (*stopped, *self._explained())
        return Plan(name, solo=tuple(self._released), waiting=waiting, sharers=sharers)

    def _sharer(self, holding: Holding) -> Sharer:
        job, speed = holding.job, self.speed(holding)
        company = _company(holding.partners, speed)
        if holding.kept:
            notes = (reasons.kept(len(holding.gpus), holding.shares), company)
        else:
            chosen = (self._why[job.job_id],) if job.job_id in self._why else ()
            notes = (_placed(holding.shares), *chosen, company, *_prediction(job))
        return Sharer(job.job_id, holding.shares, speed, holding.accumulate_steps, notes, holding.kept)

    def _explained(self) -> Iterator[Waiting]:
        no_gpus = reasons.WaitingReasons(self.packed.free, whole_nodes=not self._slurm.is_there)
        for job, notes, needs_gpus in self._waiting:
            first = (no_gpus.of(job),) if needs_gpus else ()
            yield Waiting(job.job_id, (*first, *notes))
            no_gpus.count(job)

    def _no_sharing(self, job: PlanJob, *, idle_only: bool) -> tuple[Reason, ...]:
        if self._most < 2:
            return ()
        if not job.may_share:
            return (reasons.must_run_alone(job),)
        if not knows_utilization(job):
            return (reasons.NEEDS_PROFILE_TO_SHARE,)
        return (_STOPPED_ONCE,) if idle_only else (self._rule.why_no_partner(mem_gib_of(job)),)


def needed_memory(load: Load, capacity_gib: float) -> str:
    """The memory that a GPU's jobs need, for a reason."""
    of = "" if isinf(capacity_gib) else f" of {capacity_gib:.1f}"
    return f"{load.used_gib:.1f}{of} GiB needed"


def _company(partners: Sequence[PlanJob], speed: float) -> Reason:
    """The other jobs on a job's GPUs, and its speed there."""
    if not partners:
        return _ALONE
    ids = tuple(job.job_id for job in partners)
    return Reason(f"it shares GPUs with {blanks(len(ids))} at an expected {{:.2f}} of its speed alone", (*ids, speed))


# Basis of an estimated profile, by its source.
_KNOWN_FROM: Final = {
    "scaled": "runs with another number of GPUs",
    "predicted": "its model's graph",
    "average": "this site's other models",
    "guess": "nothing but a guess",
}


def _prediction(job: PlanJob) -> tuple[Reason, ...]:
    """The source of a job's utilization, where it was not measured."""
    if job.profile is None or job.profile.source not in ESTIMATES:
        return ()
    values = 100 * utilization_of(job), job.gpu_mem_gib, _KNOWN_FROM[job.profile.source]
    return (Reason("its model was never measured here: {:.0f} % use and {:.1f} GiB are predicted from {}", values),)


def _placed(gpus: Shares) -> Reason:
    """Where a job goes."""
    names = tuple(f"{', '.join(str(gpu_id) for gpu_id in share.gpu_ids)} of {share.node}" for share in gpus)
    word = "GPU" if sum(share.gpu_count for share in gpus) == 1 else "GPUs"
    return Reason(f"it gets {word} {blanks(len(names))}", names)


_STEPS: Final = 50  # Most steps of k-means; the four features settle long before
Points = NDArray[np.float64]  # Points as rows


@dataclass(frozen=True, slots=True)
class JobQueue:
    """Waiting jobs of one kind, first come, first served, and their claim to a round's picks."""

    jobs: tuple[PlanJob, ...]
    weight: float


class Horus(FixedOrder):
    """Jobs join GPUs where predicted memory and use cost least, first come, first served.

    A round looks at the first β jobs. Each gets the GPUs with the least ω1·(used memory + its own)/capacity +
    ω2·f(cumulative utilization) that have the memory for it, idle or not, f being the slow-down fitted per GPU type.
    Nothing is stopped. A job whose model has neither a profile nor a prediction waits for one.

    Source: Horus (Yeung et al., TPDS 2021). Added here: no job joins a GPU whose jobs would get less done with it
    than without (`min_speedup`); a GPU's limit of jobs is `max_group_size`.
    """

    name = "horus"
    order = "submit time"
    fixed = TO_THE_END
    ranking = fifo
    supports_packing = True
    retries_out_of_memory = True

    @property
    def queue_count(self) -> int:
        """k, the number of queues in which jobs wait."""
        return 1

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packed=True)
        rules = self.rules
        request = with_promises(request, rules.min_speed)
        rule = ByCost(rules.horus_memory_weight, rules.horus_slowdown_weight, rules.min_speedup)
        cycle = PackingCycle(request, rules, rule)
        aged, ready = cycle.sort_out(request.jobs)
        cycle.seat_aged(aged)
        of_partition: dict[str, list[PlanJob]] = {}
        for job in ready:
            of_partition.setdefault(job.partition, []).append(job)
        for _, jobs in sorted(of_partition.items()):
            self._round(cycle, queues_of(jobs, self.queue_count, request.now_s, request.interval_s))
        return cycle.result(self.name)

    def _round(self, cycle: PackingCycle, queues: tuple[JobQueue, ...]) -> None:
        """Place the jobs that weighted fair queueing picks; the others wait."""
        per_round = self.rules.horus_jobs_per_round
        order = pick(queues, sum(len(queue.jobs) for queue in queues))
        for job in order[:per_round]:
            cycle.seat(job)
        notes: dict[int, Reason] = {}
        for number, queue in enumerate(queues if len(queues) > 1 else (), 1):
            notes |= dict.fromkeys([job.job_id for job in queue.jobs], _queue_reason(queue, number, len(queues)))
        for position, job in enumerate(order[per_round:], per_round):
            values = plural(position, "job"), per_round
            not_picked = Reason("{} of the queues come before it, and a round looks at {}", values)
            cycle.wait(job, not_picked, *([notes[job.job_id]] if notes else []))


class HorusFair(Horus):
    """Horus with k queues of like jobs (`horus_queues`), found by k-means, that take turns by length and wait.

    Jobs are alike by tasks, predicted utilization, GPUs and memory. A round's β picks go to the queues by weighted
    fair queueing, a queue's weight being max(length, median wait in rounds × length).

    Source: Horus (Yeung et al., TPDS 2021), Horus-F.
    """

    name = "horus-f"
    order = "queues by weight, submit time"

    @property
    def queue_count(self) -> int:
        """k, the number of queues in which jobs wait."""
        return self.rules.horus_queues


def queues_of(jobs: Sequence[PlanJob], count: int, now_s: float, round_s: float) -> tuple[JobQueue, ...]:
    """Sort jobs into queues of a kind, whatever order they come in.

    Source: Horus (TPDS 2021), algorithm 1: k-means over tasks, predicted utilization, GPUs and memory.

    Args:
        jobs: Waiting jobs.
        count: Number of queues, k; there are fewer where fewer kinds wait.
        now_s: Time, seconds since the epoch.
        round_s: Seconds between two rounds, the unit in which waiting is counted.
    """
    lines = sorted(jobs, key=lambda job: (job.submit_s, job.job_id))
    kinds = cluster([_features(job) for job in lines], count)
    of_kind: dict[int, list[PlanJob]] = {}
    for job, kind in zip(lines, kinds, strict=True):
        of_kind.setdefault(kind, []).append(job)
    return tuple(JobQueue(tuple(members), _weight(members, now_s, round_s)) for _, members in sorted(of_kind.items()))


def pick(queues: Sequence[JobQueue], count: int) -> tuple[PlanJob, ...]:
    """The `count` (β) jobs that a round tries to place, in turns by weight: weighted fair queueing.

    The n-th job of a queue is served at virtual time n / weight, so a queue of twice the weight gets twice as many
    turns. Ties go to the earlier job.
    """
    turns = [
        ((position + 1) / queue.weight, job.submit_s, job.job_id, number, position)
        for number, queue in enumerate(queues)
        for position, job in enumerate(queue.jobs)
    ]
    return tuple(queues[number].jobs[position] for *_, number, position in sorted(turns)[:count])


def cluster(points: Sequence[tuple[float, ...]], count: int) -> list[int]:
    """The kind of each point, 0 for the kind with the smallest center; equal points are of one kind.

    k-means with the L1 distance, from centers that are far apart: the smallest point first, then always the one
    farthest from all centers so far. Nothing is random, and the order of the points makes no difference.

    Source: Horus (TPDS 2021), section 4.2.2, which names k-means and L1 and leaves scale and first centers open.

    Args:
        points: Points with equally many coordinates, each scaled here to 0…1.
        count: Number of kinds, k; there are never more than different points.
    """
    if not points:
        return []
    distinct, where, repeats = np.unique(np.array(points, dtype=float), axis=0, return_inverse=True, return_counts=True)
    spread = np.ptp(distinct, axis=0)
    scaled = (distinct - distinct.min(axis=0)) / np.where(spread > 0, spread, 1.0)
    centers, kinds = _settled(scaled, repeats, _far_apart(scaled, min(count, len(scaled))))
    rank = np.empty(len(centers), dtype=int)
    rank[np.lexsort(centers.T[::-1])] = np.arange(len(centers))
    return [int(kind) for kind in rank[kinds][where.reshape(-1)]]


def _features(job: PlanJob) -> tuple[float, float, float, float]:
    """The figures for k-means; a job has one task on each node that it must have."""
    return float(job.node_count), utilization_of(job), float(job.gpu_count), mem_gib_of(job)


def _weight(jobs: Sequence[PlanJob], now_s: float, round_s: float) -> float:
    """max(len, median wait × len); the paper gives no unit of the wait, here it is counted in rounds."""
    wait_s = statistics.median(max(0.0, waited_s(job, now_s)) for job in jobs)
    return len(jobs) * max(1.0, wait_s / round_s if round_s > 0 else 1.0)


def _settled(points: Points, repeats: NDArray[np.int64], centers: Points) -> tuple[Points, NDArray[np.int64]]:
    """Centers and the nearest one of each point, once these no longer change; a center that loses all points goes."""
    kinds = _nearest(points, centers)
    for _ in range(_STEPS):
        used = np.unique(kinds)
        centers = np.array([np.average(points[kinds == kind], axis=0, weights=repeats[kinds == kind]) for kind in used])
        before, kinds = np.searchsorted(used, kinds), _nearest(points, centers)
        if np.array_equal(kinds, before):
            break
    used, kinds = np.unique(kinds, return_inverse=True)
    return centers[used], kinds


def _nearest(points: Points, centers: Points) -> NDArray[np.int64]:
    return np.asarray(cdist(points, centers, "cityblock").argmin(axis=1), dtype=np.int64)


def _far_apart(points: Points, count: int) -> Points:
    chosen = [0]
    while len(chosen) < count:
        chosen.append(int(cdist(points, points[chosen], "cityblock").min(axis=1).argmax()))
    return points[chosen]


def _queue_reason(queue: JobQueue, number: int, count: int) -> Reason:
    """Which queue a job waits in, with the medians of its jobs."""
    tasks, use, gpus, mem_gib = map(statistics.median, zip(*map(_features, queue.jobs), strict=True))
    return Reason(
        "it waits in queue {} of {} ({}; typically {:g} GPUs on {:g} nodes, {:.0f} % use, {:.1f} GiB), weight {:.1f}",
        (number, count, plural(len(queue.jobs), "job"), gpus, tasks, 100 * use, mem_gib, queue.weight),
    )
