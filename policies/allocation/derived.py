"""A sensitivity for models that nobody measured one of: it follows from the stage profile. Pure.

The time of the preprocess stage is inversely proportional to the CPUs; host memory makes no difference.
"""

import math
from itertools import pairwise
from typing import Final

from muri.policies.traits import Demand, Sensitivity
from muri.profiler.records import StageProfile

_LEAST_GAIN: Final = 0.10
"""Synergy's profiler stops where one more CPU gains less (Mohan et al., OSDI 2022, section 3.1)."""

_MOST_POINTS: Final = 64
_FRACTIONS: Final = (0.25, 0.5, 0.75)


def derived_sensitivity(profile: StageProfile, fair: Demand, most_cpus: float) -> Sensitivity | None:
    """What a stage profile says about CPUs; None where the number of CPUs is unknown or unlimited.

    Args:
        profile: Measured with the GPU-proportional share.
        fair: That share, per GPU.
        most_cpus: CPUs per GPU of a job that has its nodes' CPUs to itself.
    """
    if not 0 < fair.cpus < math.inf:
        return None
    axis = _axis(fair.cpus, most_cpus)
    throughput = [_throughput(profile, fair.cpus, cpus) for cpus in axis]
    needs_gib = (profile.detail.host_mem_gib or 0.0) / profile.key.gpu_count
    mem_gib = min(needs_gib, fair.mem_gib) or fair.mem_gib
    demand = Demand(_saturating(axis, throughput), mem_gib if mem_gib < math.inf else 0.0)
    return Sensitivity(axis, (0.0,), tuple((value,) for value in throughput), demand)


def _axis(fair_cpus: float, most_cpus: float) -> tuple[float, ...]:
    """Whole CPUs, some fractions of one, and the share that the profile was measured with."""
    most = max(fair_cpus, most_cpus)
    step = max(1, math.ceil(most / _MOST_POINTS))
    whole = [float(count) for count in range(step, math.floor(most) + 1, step)]
    return tuple(sorted({*(share for share in _FRACTIONS if share < most), *whole, fair_cpus, most}))


def _throughput(profile: StageProfile, fair_cpus: float, cpus: float) -> float:
    """Relative to the proportional share."""
    preprocess_s = min(profile.preprocess_s, profile.iteration_s)
    scaled_s = profile.iteration_s - preprocess_s + preprocess_s * fair_cpus / cpus
    return profile.iteration_s / scaled_s


def _saturating(axis: tuple[float, ...], throughput: list[float]) -> float:
    """The least CPUs from which on one more gains less than 10 %."""
    for (cpus, value), (more, better) in pairwise(zip(axis, throughput, strict=True)):
        if cpus >= 1 and better / value - 1 < _LEAST_GAIN * (more - cpus):
            return cpus
    return axis[-1]
