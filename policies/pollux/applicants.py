"""What the jobs of a request could do with which numbers of GPUs."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from muri.policies.cycle.packed import PackedGpus
from muri.policies.cycle.queue import is_movable, waited_s
from muri.policies.options import PolicyOptions
from muri.policies.pollux.allocate import STARVED, Applicant
from muri.policies.pollux.goodput import goodput, model_of, relative_goodput
from muri.policies.traits import BatchModel
from muri.policies.types import PlanJob, PlanRequest

MOST_TIMES_ASKED: Final = 8
"""A job gets at most so many times the GPUs that it asked for: the model extrapolates no further."""

_FULL_WEIGHT_GPU_S: Final = 4 * 3600.0
_DECAY: Final = 0.5
"""Jobs that have received more count for less: Pollux's defaults (section 4.2.2)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job whose GPUs are up for decision.

    Attributes:
        job: The job.
        held: GPUs that it has now; 0 for a waiting job.
        counts: Numbers of GPUs that it may have, ascending.
        urgency: The smaller, the more urgent.
    """

    job: PlanJob
    held: int
    counts: tuple[int, ...]
    urgency: tuple[float, ...]


def is_elastic(job: PlanJob) -> bool:
    """Whether it may get another number of GPUs than it asked for.

    That takes a model of its iterations, and checkpoints: a job that can never be resized gets what it asked for.
    """
    return model_of(job.batch, job.profile) is not None and job.preemptible and job.node_count == 1


def weight(job: PlanJob) -> float:
    """What its speed-up counts for: 1 until it has had 4 GPU-hours, then less and less.

    Source: Pollux, section 4.2.2, eq. 16.
    """
    return min(1.0, math.pow(_FULL_WEIGHT_GPU_S / max(job.attained_gpu_s, 1.0), _DECAY))


def candidates_of(request: PlanRequest, packed: PackedGpus, rules: PolicyOptions) -> list[Candidate]:
    """The jobs of a request that GPUs can be given to or taken from, the most urgent first.

    Args:
        request: Jobs, what runs, and time.
        packed: Its GPUs, with what runs on them.
        rules: Whether what runs may be stopped, and the aging bound.
    """
    sizes = {name: _sizes(packed, name) for name in {name for node in request.nodes for name in node.partitions}}
    found = [_candidate(job, 0, request, sizes, rules) for job in request.jobs]
    for unit in request.running:
        if is_movable(unit, request, rules):
            held = sum(share.gpu_count for share in unit.gpus)
            found += [_candidate(job, held, request, sizes, rules) for job in unit.members]
    return sorted(found, key=lambda candidate: candidate.urgency)


def applicant_of(candidate: Candidate, request: PlanRequest, fair: int) -> Applicant:
    """How fast a job would get on.

    Args:
        candidate: The job.
        request: For the time until the next plan, before which a restart has to pay.
        fair: GPUs of a fair share.
    """
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
    """Powers of two within a node, whole nodes beyond: sizes that leave no odd rests; and what it asked for and has."""
    counts = {asked, held or asked}
    size = 1
    while size <= min(most, MOST_TIMES_ASKED * asked):
        counts.add(size)
        size = min(2 * size, node) if size < node else 2 * size
    return tuple(sorted(counts))


@lru_cache(maxsize=65_536)
def _speedups(model: BatchModel | None, asked: int, counts: tuple[int, ...], fair: int) -> tuple[float, ...]:
    """Goodput relative to a fair share's; in proportion to GPUs for a job of which nothing is known.

    Source: Pollux, section 4.2, eq. 13.
    """
    if model is None:
        return tuple(count / fair for count in counts)
    base = goodput(model, asked, fair)
    return tuple(goodput(model, asked, count) / base for count in counts)
