"""A bound on any grouping that takes milliseconds: all GPUs of a bucket as one pool of resources."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.sparse import csr_array

from muri.policies.highs import solve_linear
from muri.policies.speed.model import Floats, Shape

PHYSICAL_MODELS: Final = ("lockstep", "fair")
"""Speed models under which no resource is ever used for more than the time that passes."""


def pooled_bound(
    shapes: Sequence[Shape], counts: Floats, coefficient: Floats, *, slots: int, max_size: int, physical: bool
) -> float:
    """No grouping of these jobs is worth more than this.

    A group's members hold a resource for at most the time that passes, Σ_i s_i·u_i^j ≤ 1, where u_i^j is the
    share of its iteration during which job i uses resource j, and no member is faster than alone. Added up
    over all groups these limits still hold, without saying who shares with whom: a linear program over kinds.

    Args:
        shapes: The kinds of jobs.
        counts: Jobs of each kind.
        coefficient: What a second at full speed of each kind adds to the objective.
        slots: Most groups.
        max_size: Most members of a group.
        physical: Whether the speed model keeps to the resources' limits.
    """
    if not len(shapes) or slots < 1:
        return 0.0
    rows = [np.ones(len(shapes))]
    right = [float(max_size * slots)]
    if physical:
        usage = np.array([shape.stage_s for shape in shapes]) / np.array([[shape.iteration_s] for shape in shapes])
        rows += list(usage.T)
        right += [float(slots)] * usage.shape[1]
    return solve_linear(coefficient, csr_array(np.array(rows)), np.array(right), counts).value
