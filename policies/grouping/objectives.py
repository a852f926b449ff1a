"""What a group is worth: the objectives that a grouping can maximise.

All three are sums over the members of a coefficient times the member's speed, so a bound on the
speeds is a bound on the objective.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from muri.policies.speed.model import Evaluation, Floats, Indices, Shape

_GAIN = 1e-9
"""Gain in total speed below which sharing is only a rounding error."""


def coefficients(shapes: Sequence[Shape], worth: Sequence[float], objective: str) -> Floats:
    """What a second at full speed of each job adds to the objective.

    Args:
        shapes: One for each job or type.
        worth: Weight of each under the objective "jct": the inverse of its remaining (or attained) service,
            as in Smith's rule for weighted completion times.
        objective: "efficiency" (γ, Muri Eq. 4: the share of time that the job keeps a resource busy,
            averaged over resources), "throughput" (1 each) or "jct".

    Returns:
        Array with a figure for each job.
    """
    if objective == "throughput":
        return np.ones(len(shapes))
    if objective == "jct":
        return np.asarray(worth, dtype=np.float64)
    return np.array([sum(shape.stage_s) / (len(shape.stage_s) * shape.iteration_s) for shape in shapes])


def values(evaluation: Evaluation, groups: Indices, coefficient: Floats, objective: str) -> Floats:
    """What each of n groups is worth.

    γ is taken from the speed model, which knows its own period.
    """
    if objective == "efficiency":
        return evaluation.efficiency
    return np.asarray((evaluation.speed * coefficient[groups]).sum(axis=1))


def pays_more(evaluation: Evaluation, alone: Floats | float, min_speedup: float) -> NDArray[np.bool_]:
    """Which groups do more work than `alone`, the total speed of what would run instead, by the factor asked for."""
    return np.asarray(evaluation.speed.sum(axis=1) > np.asarray(alone) * min_speedup + _GAIN)
