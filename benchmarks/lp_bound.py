"""The most that members can get on together, whatever the discipline."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog


def lp_bound(shares: Sequence[Sequence[float]]) -> float:
    """LP: max Σ s_i with Σ_i s_i·u_i^j ≤ 1 for every resource j and 0 ≤ s_i ≤ 1.

    Args:
        shares: u, for each member the share of its time alone in which it holds each resource.
    """
    by_resource = np.array(shares).T
    solution = linprog(-np.ones(len(shares)), A_ub=by_resource, b_ub=np.ones(len(by_resource)), bounds=(0, 1))
    return float(-solution.fun)
