"""Bounds on the throughput of groups."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog  # not the policies' solver: the GPU check's Python has no highspy

from muri.policies.speed import Shape, figures_of


def throughput_bound(members: Sequence[Shape]) -> float:
    """Return the greatest total speed of any way of sharing: max Σ s_i with Σ_i s_i · u_i^j ≤ 1 and s_i ≤ 1.

    It may starve a member, so it bounds a runtime and is not a model of one.
    """
    share = figures_of(members).share
    solved = linprog(-np.ones(len(members)), A_ub=share, b_ub=np.ones(len(share)), bounds=(0, 1), method="highs")
    return -float(solved.fun)
