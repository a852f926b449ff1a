"""What CPUs and host memory do for a job, and what it therefore asks of a node."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Final

from muri.policies.speed.model import Shape
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import FreeNode, PlanJob

SLACK: Final = 1e-9
"""Relative difference that is only a rounding error."""

Wish = Callable[[PlanJob, FreeNode, int], Demand]
"""What a job asks for each of its GPUs on a node, of which it has so many there."""

_LOAD, _PREPROCESS = 0, 1


def fair_share(node: FreeNode) -> Demand:
    """The GPU-proportional share: a node's CPUs and memory by its GPUs; 0 of what is unknown of the node."""
    if not node.gpu_count:
        return Demand(0.0, 0.0)
    return Demand(node.cpu_count / node.gpu_count, node.mem_gib / node.gpu_count)


def proportional_wish(job: PlanJob, node: FreeNode, gpus: int) -> Demand:
    """The wish of every job when CPUs and memory follow the GPUs."""
    return fair_share(node)


def saturating_wish(job: PlanJob, node: FreeNode, gpus: int) -> Demand:
    """The least that saturates a job's throughput, as far as the node has it; never slower than the fair share.

    A job of which nothing is known asks for its proportional share.

    Source: Synergy (Mohan et al., OSDI 2022), section 3: the demand vector.
    """
    fair = fair_share(node)
    if job.sensitivity is None or not node.gpu_count:
        return fair
    return _saturating(job.sensitivity, fair, Demand(node.cpu_count / gpus, node.mem_gib / gpus))


def speed(job: PlanJob, per_gpu: Demand, node: FreeNode) -> float:
    """Throughput with a share, relative to the proportional share of the node; 1 while nothing is known."""
    fair = fair_share(node)
    return throughput_ratio(job.sensitivity, enough(per_gpu, fair), enough(fair, fair))


def steps(job: PlanJob, node: FreeNode, gpus: int) -> tuple[Demand, ...]:
    """What a job can make use of between its proportional share and its demand, the fastest first."""
    if job.sensitivity is None or not node.gpu_count:
        return ()
    return _steps(job.sensitivity, fair_share(node), saturating_wish(job, node, gpus))


def exceeds(first: Demand, second: Demand) -> bool:
    """Whether the first has more of anything than the second."""
    return more(first.cpus, second.cpus) or more(first.mem_gib, second.mem_gib)


def more(first: float, second: float) -> bool:
    """Whether the first amount is larger by more than a rounding error."""
    return first > second + SLACK * max(1.0, abs(second))


@lru_cache(maxsize=4096)
def cells(sensitivity: Sensitivity, fair: Demand, most: Demand) -> tuple[Demand, ...]:
    """The shares worth considering: up to `most`, as fast as the fair share at least, none beaten by a smaller one.

    The fair share and the demand are among the candidates. What is unknown of the node (0) stays 0.
    """
    cpus = _candidates((*sensitivity.cpus, sensitivity.demand.cpus, fair.cpus), most.cpus, known=fair.cpus > 0)
    mem_gib = _candidates(
        (*sensitivity.mem_gib, sensitivity.demand.mem_gib, fair.mem_gib), most.mem_gib, known=fair.mem_gib > 0
    )
    usual = throughput(sensitivity, fair, fair)
    found: list[tuple[float, Demand]] = []
    for share in (Demand(*pair) for pair in product(cpus, mem_gib)):
        reached = throughput(sensitivity, share, fair)
        beaten = any(
            other >= reached * (1 - SLACK) and smaller.cpus <= share.cpus and smaller.mem_gib <= share.mem_gib
            for other, smaller in found
        )
        if reached >= usual * (1 - SLACK) and not beaten:
            found.append((reached, share))
    return tuple(share for _, share in found)


@lru_cache(maxsize=4096)
def _steps(sensitivity: Sensitivity, fair: Demand, most: Demand) -> tuple[Demand, ...]:
    within = (share for share in cells(sensitivity, fair, most) if not exceeds(share, most))
    return tuple(sorted(within, key=lambda share: (-throughput(sensitivity, share, fair), share)))


@lru_cache(maxsize=4096)
def _saturating(sensitivity: Sensitivity, fair: Demand, most: Demand) -> Demand:
    wanted = Demand(
        min(sensitivity.demand.cpus, most.cpus) if fair.cpus else 0.0,
        min(sensitivity.demand.mem_gib, most.mem_gib) if fair.mem_gib else 0.0,
    )
    usual = throughput(sensitivity, fair, fair)
    if throughput(sensitivity, wanted, fair) >= usual * (1 - SLACK):
        return wanted
    # Profiles tell the demand within some tolerance: take the least that is really as fast as the fair share.
    enough = [share for share in cells(sensitivity, fair, most) if not exceeds(share, fair)]
    return min(enough, default=fair)


def throughput(sensitivity: Sensitivity, per_gpu: Demand, fair: Demand) -> float:
    """Throughput of a share, in the sensitivity's own unit."""
    return sensitivity.throughput_at(*enough(per_gpu, fair))


def enough(per_gpu: Demand, fair: Demand) -> Demand:
    """A share with no limit on what is unknown of the node."""
    return Demand(per_gpu.cpus if fair.cpus else math.inf, per_gpu.mem_gib if fair.mem_gib else math.inf)


def _candidates(amounts: tuple[float, ...], most: float, *, known: bool) -> list[float]:
    return sorted({amount for amount in amounts if amount <= most}) if known else [0.0]


def throughput_ratio(sensitivity: Sensitivity | None, given: Demand, fair: Demand) -> float:
    """Throughput of a job alone with what it is given, relative to the GPU-proportional share.

    Args:
        sensitivity: None of a job that nothing makes faster or slower.
        given: CPUs and memory per GPU; infinite where unlimited.
        fair: The GPU-proportional share, per GPU.
    """
    if sensitivity is None or given == fair:
        return 1.0
    usual = sensitivity.throughput_at(*fair)
    return sensitivity.throughput_at(*given) / usual if usual > 0 else 1.0


def shape_with(shape: Shape, sensitivity: Sensitivity | None, given: Demand, fair: Demand) -> Shape:
    """The stages of a job with what it is given; those on GPU and network stay as they are.

    What CPUs change is the preprocess stage, what memory changes is the load stage. Where a stage has less time than
    the throughput says is saved, the other one loses the rest.

    Args:
        shape: With the GPU-proportional share.
        sensitivity: None of a job that nothing makes faster or slower.
        given: CPUs and memory per GPU; infinite where unlimited.
        fair: The GPU-proportional share, per GPU.
    """
    ratio = throughput_ratio(sensitivity, given, fair)
    if ratio == 1.0 or ratio <= 0:
        return shape
    by_cpus = throughput_ratio(sensitivity, Demand(given.cpus, fair.mem_gib), fair) or ratio
    iteration_s = shape.iteration_s / ratio
    preprocess_s = shape.stage_s[_PREPROCESS] + shape.iteration_s / by_cpus - shape.iteration_s
    load_s = shape.stage_s[_LOAD] + iteration_s - shape.iteration_s / by_cpus
    load_s, preprocess_s = load_s + min(0.0, preprocess_s), preprocess_s + min(0.0, load_s)
    stage_s = (max(0.0, load_s), max(0.0, preprocess_s), *shape.stage_s[2:])
    return Shape(stage_s, iteration_s, shape.gpu_mem_gib, shape.model)
