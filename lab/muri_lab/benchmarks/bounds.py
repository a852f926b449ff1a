"""Bounds on the throughput of groups."""

from collections.abc import Sequence

import numpy as np

from muri.policies.speed import Shape, figures_of


def throughput_bound(members: Sequence[Shape]) -> float:
    """Return the greatest total speed of any way of sharing: max Σ s_i with Σ_i s_i · u_i^j ≤ 1 and s_i ≤ 1.

    It may starve a member, so it bounds a runtime and is not a model of one.
    """
    from scipy.sparse import csc_array  # here: the GPU check's Python has neither

    from muri.policies.grouping.highs import linear_value

    share, ones = figures_of(members).share, np.ones(len(members))
    return linear_value(ones, csc_array(share), np.ones(len(share)), ones)
