"""What a group is worth: the objectives that a grouping can maximise.

All three are sums over the members of a coefficient times the member's speed, so a bound on the
speeds is a bound on the objective.
"""

from collections.abc import Sequence

import numpy as np

from muri.policies.speed.model import Floats, Shape


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
