"""Horus: jobs share GPUs where predicted memory and utilization make it cheap; jobs of a kind wait together."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from muri.policies.cycle.packed import mem_gib_of
from muri.policies.cycle.reasons import plural
from muri.policies.cycle.validation import check_request
from muri.policies.horus.cost import CostModel, utilization_of
from muri.policies.horus.cycle import ByCost, PackingCycle
from muri.policies.priority import fifo, with_promises
from muri.policies.schedulers.base import TO_THE_END, FixedOrder
from muri.policies.types import Plan, PlanJob, PlanRequest, Reason, waited_s

_STEPS: Final = 50
"""Most steps of k-means; the four features settle long before."""

Points = NDArray[np.float64]
"""Points as rows."""


@dataclass(frozen=True, slots=True)
class JobQueue:
    """Waiting jobs of one kind.

    Attributes:
        jobs: First come, first served.
        weight: Its claim to a round's picks.
    """

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
        """k, in how many queues jobs wait."""
        return 1

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packed=True)
        rules = self.rules
        request = with_promises(request, rules.min_speed)
        cost = CostModel(rules.horus_memory_weight, rules.horus_slowdown_weight)
        cycle = PackingCycle(request, rules, ByCost(cost, rules.min_speedup))
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
        notes = _queue_reasons(queues)
        for position, job in enumerate(order[per_round:], per_round):
            cycle.wait(job, _not_picked(position, per_round), *notes.get(job.job_id, ()))


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
        """k, in how many queues jobs wait."""
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
    """The jobs that a round tries to place, in turns by weight: weighted fair queueing.

    The n-th job of a queue is served at virtual time n / weight, so a queue of twice the weight is asked twice
    as often. Ties go to the earlier job.

    Args:
        queues: What waits.
        count: How many jobs, β.
    """
    turns = [_turn(queue, number, 0) for number, queue in enumerate(queues) if queue.jobs]
    heapify(turns)
    picked: list[PlanJob] = []
    while turns and len(picked) < count:
        *_, number, position = turns[0]
        queue = queues[number]
        picked.append(queue.jobs[position])
        if position + 1 < len(queue.jobs):
            heapreplace(turns, _turn(queue, number, position + 1))
        else:
            turns[0] = turns[-1]
            turns.pop()
            heapify(turns)
    return tuple(picked)


def cluster(points: Sequence[tuple[float, ...]], count: int) -> list[int]:
    """The kind of each point, 0 for the kind with the smallest center; equal points are of one kind.

    k-means with the L1 distance, from centres that are far apart: the smallest point first, then always the one
    farthest from all centres so far. Nothing is random, and the order of the points makes no difference.

    Source: Horus (TPDS 2021), section 4.2.2, which names k-means and L1 and leaves scale and first centres open.

    Args:
        points: Points with equally many coordinates, each scaled here to 0…1.
        count: Number of kinds, k; there are never more than different points.
    """
    if not points:
        return []
    distinct, where, repeats = np.unique(np.array(points, dtype=float), axis=0, return_inverse=True, return_counts=True)
    spread = np.ptp(distinct, axis=0)
    scaled = (distinct - distinct.min(axis=0)) / np.where(spread > 0, spread, 1.0)
    centres, kinds = _settled(scaled, repeats, _far_apart(scaled, min(count, len(scaled))))
    rank = np.empty(len(centres), dtype=int)
    rank[np.lexsort(centres.T[::-1])] = np.arange(len(centres))
    return [int(kind) for kind in rank[kinds][where.reshape(-1)]]


def typical(queue: JobQueue) -> tuple[float, float, float, float]:
    """What the jobs of a queue are like: the medians of tasks, utilization, GPUs and GiB of GPU memory."""
    tasks, utilization, gpus, mem_gib = zip(*(_features(job) for job in queue.jobs), strict=True)
    median = statistics.median
    return median(tasks), median(utilization), median(gpus), median(mem_gib)


def _features(job: PlanJob) -> tuple[float, float, float, float]:
    """What k-means goes by; a job has one task on each node that it must have."""
    return float(job.node_count), utilization_of(job), float(job.gpu_count), mem_gib_of(job)


def _weight(jobs: Sequence[PlanJob], now_s: float, round_s: float) -> float:
    """max(len, median wait × len); the paper gives no unit of the wait, here it is counted in rounds."""
    wait_s = statistics.median(max(0.0, waited_s(job, now_s)) for job in jobs)
    return len(jobs) * max(1.0, wait_s / round_s if round_s > 0 else 1.0)


def _turn(queue: JobQueue, number: int, position: int) -> tuple[float, float, int, int, int]:
    job = queue.jobs[position]
    return ((position + 1) / queue.weight, job.submit_s, job.job_id, number, position)


def _settled(points: Points, repeats: NDArray[np.int64], centres: Points) -> tuple[Points, NDArray[np.int64]]:
    """Centres and the nearest one of each point, once these no longer change; a center that loses all points goes."""
    kinds = _nearest(points, centres)
    for _ in range(_STEPS):
        used = np.unique(kinds)
        centres = np.array([np.average(points[kinds == kind], axis=0, weights=repeats[kinds == kind]) for kind in used])
        before, kinds = np.searchsorted(used, kinds), _nearest(points, centres)
        if np.array_equal(kinds, before):
            break
    used, kinds = np.unique(kinds, return_inverse=True)
    return centres[used], kinds


def _nearest(points: Points, centres: Points) -> NDArray[np.int64]:
    return np.asarray(cdist(points, centres, "cityblock").argmin(axis=1), dtype=np.int64)


def _far_apart(points: Points, count: int) -> Points:
    chosen = [0]
    while len(chosen) < count:
        chosen.append(int(cdist(points, points[chosen], "cityblock").min(axis=1).argmax()))
    return points[chosen]


def _queue_reasons(queues: tuple[JobQueue, ...]) -> dict[int, tuple[Reason, ...]]:
    """What a job that waits is told of its queue, by job id; nothing where there is one queue."""
    if len(queues) < 2:
        return {}
    found: dict[int, tuple[Reason, ...]] = {}
    for number, queue in enumerate(queues, 1):
        reason = _queue_reason(queue, number, len(queues))
        found |= {job.job_id: (reason,) for job in queue.jobs}
    return found


def _not_picked(ahead: int, per_round: int) -> Reason:
    """Why a round didn't look at a job."""
    return Reason("{} of the queues come before it, and a round looks at {}", (plural(ahead, "job"), per_round))


def _queue_reason(queue: JobQueue, number: int, count: int) -> Reason:
    """Which queue a job waits in."""
    tasks, use, gpus, mem_gib = typical(queue)
    return Reason(
        "it waits in queue {} of {} ({}; typically {:g} GPUs on {:g} nodes, {:.0f} % use, {:.1f} GiB), weight {:.1f}",
        (number, count, plural(len(queue.jobs), "job"), gpus, tasks, 100 * use, mem_gib, queue.weight),
    )
