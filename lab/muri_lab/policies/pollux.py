"""Pollux: elastic jobs, as many GPUs for each as their goodput pays for."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final

from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import SlurmQueue
from muri.policies.cycle.queue import is_movable, pools
from muri.policies.cycle.reasons import plural
from muri.policies.cycle.validation import check_request
from muri.policies.options import PolicyOptions
from muri.policies.schedulers import EXCLUSIVE, QueuePolicy
from muri.policies.siblings.packed import Holding, PackedGpus
from muri.policies.traits import BatchModel, goodput, model_of, relative_goodput
from muri.policies.types import Plan, PlanJob, PlanRequest, PriorityKey, Reason, Sharer, Solo, Waiting, waited_s

STARVED: Final = 1e-3  # Speed-up of a job without GPUs: so small that every job gets some before any job gets more
MOST_TIMES_ASKED: Final = 8
"""A job gets at most so many times the GPUs that it asked for: the model extrapolates no further."""

_FULL_WEIGHT_GPU_S: Final = 4 * 3600.0
_DECAY: Final = 0.5  # Jobs that have received more count for less: Pollux's defaults (section 4.2.2)

_RIGID: Final = Reason(
    "it gets the GPUs that it asked for or none: it has no checkpoint or no profile, or must span nodes"
)


class Pollux(QueuePolicy):
    """As many GPUs for each job as its goodput pays for.

    GPUs are exclusive and go to jobs so that the power mean of their speed-ups over a fair share is greatest. Jobs
    without a checkpoint or a profile get their requested number. Slurm cannot resize a running job, so it is simulated
    only.

    Source: Pollux (Qiao et al., OSDI 2021); docs/lab.md lists the simplifications.
    """

    name = "pollux"
    order = "service received"
    fixed = EXCLUSIVE
    supports_packing = True
    elastic = True

    def key(self, request: PlanRequest) -> PriorityKey:
        """Jobs that received little service first; the order matters only while GPUs are fewer than jobs."""
        return lambda job: (-weight(job),)

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packed=True, elastic=True)
        cycle = PolluxCycle(request, self.rules)
        cycle.decide()
        return cycle.result(self.name)


@dataclass(frozen=True, slots=True)
class Applicant:
    """A job that GPUs can be given to."""

    weight: float  # What its speed-up counts for, > 0
    speedup: Mapping[int, float]  # GPU count → speed relative to a fair share, less the cost of a restart
    held: int = 0  # GPUs that it has now; 0 for a waiting job

    def cost(self, gpu_count: int) -> float:
        """Return its cost to fitness with so many GPUs: weight over speed-up."""
        return self.weight / max(self.speedup.get(gpu_count, STARVED), STARVED)


def fitness(applicants: Sequence[Applicant], counts: Sequence[int]) -> float:
    """Return the weighted power mean of the speed-ups with power p = −1, Pollux's default (section 4.2.1, eq. 14)."""
    weights = sum(applicant.weight for applicant in applicants)
    costs = sum(applicant.cost(count) for applicant, count in zip(applicants, counts, strict=True))
    return weights / costs if costs else 0.0


def allocate(applicants: Sequence[Applicant], gpu_count: int) -> tuple[int, ...]:
    """Return each job's GPU count, 0 for one that waits.

    The better of giving out all GPUs afresh and only the free ones counts. Pollux uses a genetic algorithm; with the
    power −1 giving each next GPU to the job that it helps most has the same result, and is deterministic and fast.
    """
    held = [applicant.held for applicant in applicants]
    stay = _hand_out(applicants, held, gpu_count - sum(held))
    afresh = _hand_out(applicants, [0] * len(applicants), gpu_count)
    return afresh if fitness(applicants, afresh) > fitness(applicants, stay) else stay


def _hand_out(applicants: Sequence[Applicant], counts: Sequence[int], free: int) -> tuple[int, ...]:
    """First the fewest GPUs that each job can run on, then GPU by GPU to the job that gains most."""
    given = list(counts)
    for index, applicant in enumerate(applicants):
        least = min(applicant.speedup, default=0)
        if not given[index] and least <= free:
            given[index] = least
            free -= least
    jumps = [jump for index, count in enumerate(given) if count and (jump := _jump(applicants, index, count, free))]
    heapify(jumps)
    while jumps:
        _, index, target = heappop(jumps)
        more = target - given[index]
        if more <= free:
            free -= more
            given[index] = target
        following = _jump(applicants, index, given[index], free)
        if following is not None:
            heappush(jumps, following)
    return tuple(given)


def _jump(applicants: Sequence[Applicant], index: int, count: int, free: int) -> tuple[float, int, int] | None:
    """The step up, among those that free GPUs allow, that gains most for each GPU; smallest first in a heap."""
    applicant = applicants[index]
    now = applicant.cost(count)
    steps = [
        ((applicant.cost(target) - now) / (target - count), index, target)
        for target in applicant.speedup
        if count < target <= count + free
    ]
    best = min(steps, default=None)
    return best if best is not None and best[0] < 0 else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job whose GPUs are up for decision."""

    job: PlanJob  # The job
    held: int  # GPUs that it has now; 0 for a waiting job
    counts: tuple[int, ...]  # Numbers of GPUs that it may have, ascending
    urgency: tuple[float, ...]  # The smaller, the more urgent


def is_elastic(job: PlanJob) -> bool:
    """Return whether a job may get another number of GPUs than requested: it has a model and checkpoints."""
    return model_of(job.batch, job.profile) is not None and job.preemptible and job.node_count == 1


def weight(job: PlanJob) -> float:
    """Return the weight of its speed-up: 1 until 4 GPU-hours, then less and less (Pollux, section 4.2.2, eq. 16)."""
    return min(1.0, math.pow(_FULL_WEIGHT_GPU_S / max(job.attained_gpu_s, 1.0), _DECAY))


def candidates_of(request: PlanRequest, packed: PackedGpus, rules: PolicyOptions) -> list[Candidate]:
    """The jobs of a request that GPUs can be given to or taken from, the most urgent first."""
    sizes = {name: _sizes(packed, name) for name in {name for node in request.nodes for name in node.partitions}}
    found = [_candidate(job, 0, request, sizes, rules) for job in request.jobs]
    for unit in request.running:
        if is_movable(unit, request, rules):
            held = sum(share.gpu_count for share in unit.gpus)
            found += [_candidate(job, held, request, sizes, rules) for job in unit.members]
    return sorted(found, key=lambda candidate: candidate.urgency)


def applicant_of(candidate: Candidate, request: PlanRequest, fair: int) -> Applicant:
    """How fast a job would get on."""
    job, held = candidate.job, candidate.held
    left = after_restart(job, request.interval_s) if held or job.attained_gpu_s > 0 else 1.0
    speedups = zip(
        candidate.counts,
        _speedups(model_of(job.batch, job.profile), job.gpu_count, candidate.counts, fair),
        strict=True,
    )
    return Applicant(
        weight(job), {count: speedup if count == held else speedup * left for count, speedup in speedups}, held
    )


def speed_of(job: PlanJob, gpu_count: int) -> float:
    """Goodput relative to that on the GPUs asked for; 1 for a job that gets just these."""
    model = model_of(job.batch, job.profile)
    return 1.0 if model is None or gpu_count == job.gpu_count else relative_goodput(model, job.gpu_count, gpu_count)


def after_restart(job: PlanJob, interval_s: float) -> float:
    """Share of the time until the next plan that a restart leaves."""
    if job.restart_s <= 0:
        return 1.0
    return max(STARVED, 1.0 - job.restart_s / interval_s) if interval_s > 0 else STARVED


def _candidate(
    job: PlanJob, held: int, request: PlanRequest, sizes: dict[str, tuple[int, int]], rules: PolicyOptions
) -> Candidate:
    most, node = sizes.get(job.partition, (0, 0))
    counts = _counts(job.gpu_count, most, node, held) if is_elastic(job) else (job.gpu_count,)
    # Aged jobs go first where there is no queue behind the plan; a running one has no wait to speak of.
    aged = not held and request.larger_than_a_node != "slurm" and waited_s(job, request.now_s) > rules.max_wait_s
    restarts = not held and job.attained_gpu_s > 0
    worth = weight(job) * (after_restart(job, request.interval_s) if restarts else 1.0)
    return Candidate(job, held, counts, (float(not aged), -worth, job.submit_s, float(job.job_id)))


def _sizes(packed: PackedGpus, partition: str) -> tuple[int, int]:
    """GPUs of a partition, and of its largest node, as far as they are the policy's to give out."""
    gpus = packed.of_partition(partition)
    on_node: dict[str, int] = {}
    for gpu in gpus:
        on_node[gpu.node] = on_node.get(gpu.node, 0) + 1
    return len(gpus), packed.free.largest_node(partition) or max(on_node.values(), default=0)


@lru_cache(maxsize=4096)
def _counts(asked: int, most: int, node: int, held: int) -> tuple[int, ...]:
    """Return powers of two within a node, whole nodes beyond, and the requested and the present count."""
    counts = {asked, held or asked}
    size = 1
    while size <= min(most, MOST_TIMES_ASKED * asked):
        counts.add(size)
        size = min(2 * size, node) if size < node else 2 * size
    return tuple(sorted(counts))


@lru_cache(maxsize=65_536)
def _speedups(model: BatchModel | None, asked: int, counts: tuple[int, ...], fair: int) -> tuple[float, ...]:
    """Return goodput relative to a fair share's (Pollux, section 4.2, eq. 13), or GPUs in proportion if unknown."""
    if model is None:
        return tuple(count / fair for count in counts)
    base = goodput(model, asked, fair)
    return tuple(goodput(model, asked, count) / base for count in counts)


def _sized_reason(job: PlanJob, gpu_count: int, speed: float) -> Reason:
    """Why so many GPUs."""
    if gpu_count == job.gpu_count:
        return Reason("{}, as it asked for: any more help other jobs more", (plural(gpu_count, "GPU"),))
    if gpu_count > job.gpu_count:
        return Reason(
            "{} instead of the {} that it asked for: no other job gains more, predicted goodput {:.2f} times as high",
            (plural(gpu_count, "GPU"), job.gpu_count, speed),
        )
    return Reason(
        "{} instead of the {} that it asked for, since the others help other jobs more: predicted goodput {:.2f} "
        "times that of all",
        (plural(gpu_count, "GPU"), job.gpu_count, speed),
    )


def _resized_reason(held: int, gpu_count: int) -> Reason:
    """Why a running job restarts."""
    return Reason(
        "restarted on {} instead of {}: that pays for the restart before the next plan",
        (plural(gpu_count, "GPU"), held),
    )


def _no_gpu_left(partition: str, ahead: int) -> Reason:
    """Why a job of any size waits."""
    return Reason(
        "no GPU of partition {} is left for it: {} ahead of it, by service received and submit time",
        (partition, plural(ahead, "waiting job")),
    )


Sized = tuple[Candidate, int]  # A job and how many GPUs it should get


class PolluxCycle:
    """The decisions so far."""

    def __init__(self, request: PlanRequest, options: PolicyOptions) -> None:
        self._request = request
        self._packed = PackedGpus(request)
        self._before = dict(self._packed.holdings)
        self._released: list[Solo] = []
        self._waiting: list[Candidate] = []
        self._slurm = SlurmQueue(
            request, self._packed.free, options.max_wait_s, self._released, set_aside=lambda job: None
        )
        self._candidates = [
            candidate
            for candidate in candidates_of(request, self._packed, options)
            if candidate.held or not self._slurm.takes_larger(candidate.job)
        ]

    def decide(self) -> None:
        """Give out the GPUs of every set of partitions that shares no node with the others."""
        for pool in pools(self._request):
            chosen = [candidate for candidate in self._candidates if candidate.job.partition in pool]
            self._place(self._sized(pool, chosen))

    def result(self, name: str) -> Plan:
        """The plan."""
        holdings = [self._packed.holdings[job_id] for job_id in sorted(self._packed.holdings)]
        return Plan(
            name,
            solo=tuple(self._released),
            sharers=tuple(self._sharer(holding) for holding in holdings),
            waiting=tuple(self._explain_waiting()),
        )

    def _sized(self, pool: frozenset[str], candidates: Sequence[Candidate]) -> list[Sized]:
        """Return each job's number of GPUs."""
        places = {gpu.place for partition in pool for gpu in self._packed.of_partition(partition)}
        movable = {candidate.job.job_id for candidate in candidates}
        fixed = (holding for job_id, holding in self._before.items() if job_id not in movable)
        gpu_count = len(places - {gpu.place for holding in fixed for gpu in holding.gpus})
        fair = max(1, gpu_count // max(1, len(candidates)))
        applicants = [applicant_of(candidate, self._request, fair) for candidate in candidates]
        return list(zip(candidates, allocate(applicants, gpu_count), strict=True))

    def _place(self, sized: Iterable[Sized]) -> None:
        """Place jobs: unchanged ones stay; of the others, the largest choose first, and try fewer GPUs if none fit."""
        moving = [(candidate, count) for candidate, count in sized if count != candidate.held or not count]
        for candidate, _ in moving:
            if candidate.held:
                self._packed.take(candidate.job.job_id)
        moving.sort(key=lambda item: (-item[1], item[0].urgency))
        fewer = (
            (candidate, [size for size in reversed(candidate.counts) if size <= count]) for candidate, count in moving
        )
        left = [candidate for candidate, sizes in fewer if not self._put(candidate, sizes)]
        left.sort(key=lambda candidate: candidate.urgency)
        self._waiting += [candidate for candidate in left if not self._put(candidate, candidate.counts)]

    def _put(self, candidate: Candidate, sizes: Iterable[int]) -> bool:
        """Put a job on GPUs of the first size that is free, on those that it held if it comes to the same number."""
        job, before = candidate.job, self._before.get(candidate.job.job_id)
        for size in sizes:
            if before is not None and size == candidate.held and self._packed.free.are_free(before.shares):
                self._packed.put(job, before.gpus)
                return True
            if self._packed.put_on_free(job, gpu_count=size, gpu_mem_gib=job.gpu_mem_gib) is not None:
                return True
        return False

    def _sharer(self, holding: Holding) -> Sharer:
        job, gpu_count = holding.job, len(holding.gpus)
        before = self._before.get(job.job_id)
        speed = speed_of(job, gpu_count)
        kept = before is not None and before.gpus == holding.gpus
        notes = [reasons.kept(gpu_count, holding.shares)] if kept else []
        if before is not None and not kept:
            held = len(before.gpus)
            notes.append(reasons.MOVED if held == gpu_count else _resized_reason(held, gpu_count))
        notes.append(_sized_reason(job, gpu_count, speed) if is_elastic(job) else _RIGID)
        return Sharer(job.job_id, holding.shares, speed, reasons=tuple(notes), kept=kept)

    def _explain_waiting(self) -> Iterator[Waiting]:
        rigid = reasons.WaitingReasons(self._packed.free, whole_nodes=not self._slurm.is_there)
        for candidate in sorted(self._waiting, key=lambda candidate: candidate.urgency):
            job = candidate.job
            notes: list[Reason] = [reasons.preempted(job)] if candidate.held else []
            notes.append(_no_gpu_left(job.partition, rigid.ahead(job)) if is_elastic(job) else rigid.of(job))
            yield Waiting(job.job_id, tuple(notes), preempted=bool(candidate.held))
            rigid.count(job)
