"""Goodput of a job on another number of GPUs than it asked for: throughput times statistical efficiency. Pure.

The policy plans with it, and the simulator takes it for the truth.

Source: Pollux (Qiao et al., OSDI 2021), section 3: goodput, its throughput model and statistical efficiency.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Final

from muri.policies.traits import BatchModel
from muri.profiler.records import StageProfile

NOISE_SCALE: Final = 4.0
"""Gradient noise scale φ, in batches of the size that the job asked for. Pollux measures φ while a job trains; here it
is the same for all jobs and does not grow. At φ = 4 a batch twice as large makes 83 % of the progress per sample."""

FIRST_SYNC_SHARE: Final = 0.1
"""Time that synchronizing 2 GPUs adds to a job measured on one, over its iteration there: 10 % is the median of the
eight measured models in Muri's table of profiles."""

_MOST_SYNC_SHARE: Final = 0.9
"""No job is taken to synchronize for longer, or one GPU would look infinitely fast."""

_BATCH_SCALES: Final = 8
"""How many batch sizes are tried between the one asked for and the largest."""


def ring_share(gpu_count: int) -> float:
    """Data that every GPU sends in a ring all-reduce, over the size of the gradients: 2(n − 1)/n."""
    return 2.0 * (gpu_count - 1) / gpu_count


def statistical_efficiency(batch_scale: float) -> float:
    """Progress per sample with a batch so many times the one asked for, relative to that: (φ + 1)/(φ + scale).

    Source: Pollux, section 3.1, eq. 7.
    """
    return (NOISE_SCALE + 1.0) / (NOISE_SCALE + batch_scale)


def model_of(batch: BatchModel | None, profile: StageProfile | None) -> BatchModel | None:
    """A job's iterations on the GPUs that it asked for; None while nothing is known of it.

    A batch model that computes nothing says nothing.
    """
    if batch is not None and batch.compute_fixed_s + batch.compute_per_sample_s > 0:
        return batch
    return None if profile is None else iteration_model(profile)


@lru_cache(maxsize=4096)
def iteration_model(profile: StageProfile) -> BatchModel:
    """What a stage profile says of computing and synchronizing: stages that overlap keep their shares of the iteration.

    Input and preprocessing count as computing: every GPU brings its share of CPUs and storage along. On one GPU
    nobody synchronizes, whatever the profile calls it.
    """
    total_s = sum(profile.stage_s)
    known = profile.key.gpu_count > 1 and total_s > 0
    share = min(_MOST_SYNC_SHARE, profile.synchronize_s / total_s) if known else 0.0
    return BatchModel(1, 0.0, profile.iteration_s * (1.0 - share), communicate_s=profile.iteration_s * share)


@lru_cache(maxsize=65_536)
def goodput(model: BatchModel, asked: int, gpu_count: int) -> float:
    """Iterations per second of the batch asked for, discounted by what a larger batch loses; the best batch counts.

    A batch is divided among the GPUs. With more GPUs than asked for it may grow up to their memory, so that they
    synchronize less often; with fewer, each GPU computes its part in several accumulation steps.

    Args:
        model: Iteration time on the GPUs asked for.
        asked: GPUs that the job asked for.
        gpu_count: GPUs that it would have, ≥ 1.
    """
    largest = max(1.0, gpu_count / asked)
    scales = {math.pow(largest, step / _BATCH_SCALES) for step in range(_BATCH_SCALES + 1)}
    return max(scale * statistical_efficiency(scale) / _iteration_s(model, asked, gpu_count, scale) for scale in scales)


def relative_goodput(model: BatchModel, asked: int, gpu_count: int) -> float:
    """Goodput relative to that on the GPUs asked for: exactly 1 there."""
    return goodput(model, asked, gpu_count) / goodput(model, asked, asked)


def _iteration_s(model: BatchModel, asked: int, gpu_count: int, scale: float) -> float:
    """Seconds of an iteration of a scaled batch."""
    scaled = replace(
        model,
        compute_per_sample_s=model.compute_per_sample_s * scale * asked / gpu_count,
        communicate_s=_communicate_s(model, asked, gpu_count),
    )
    return scaled.iteration_s(math.ceil(asked / gpu_count))


def _communicate_s(model: BatchModel, asked: int, gpu_count: int) -> float:
    if gpu_count == 1:
        return 0.0
    if asked == 1:
        return FIRST_SYNC_SHARE * replace(model, communicate_s=0.0).iteration_s() * ring_share(gpu_count)
    return model.communicate_s * ring_share(gpu_count) / ring_share(asked)
