"""One entry to all solvers of a matching problem."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from muri.policies.matching.blossom import networkx_graph, rustworkx_graph, solve_networkx, solve_rustworkx
from muri.policies.matching.certified import assignment_bound, match_dense
from muri.policies.matching.result import Matching, Pair
from muri.policies.matching.weights import scaled
from muri.policies.options import MATCHINGS, OptionsError
from muri.policies.speed.model import Floats, Indices


def match_weights(weights: Floats, method: str = "certified") -> Matching:
    """Choose pairs without a common member, with the largest sum of weights.

    Args:
        weights: Array (n, n), symmetric, rows and columns in the order of priority; NaN or ≤ 0 where
            a pair may not be made. The diagonal is ignored.
        method: One of `MATCHINGS`: "certified" (fast, with a proven bound), "rustworkx" or "networkx"
            (Blossom on the whole graph; both choose the same pairs) or "priority-order"
            (neighbours in the queue).

    Raises:
        OptionsError: The method is not known.
        WeightsError: The array is not square, not symmetric or holds an infinity.
    """
    if method not in _METHODS:
        raise OptionsError(f"matching is {method!r}; valid are: {', '.join(MATCHINGS)}")
    return _METHODS[method](weights)


def allowed_pairs(weights: Floats) -> tuple[Indices, Indices]:
    """Row and column, row < column, of the pairs that may be made, in order."""
    first, second = np.nonzero(np.triu(weights > 0, 1))
    return first, second


def _match_blossom(weights: Floats, solver: Callable[[Indices, Indices, Floats], list[Pair]]) -> Matching:
    scale = scaled(weights)
    first, second = allowed_pairs(scale.values)
    pairs = solver(first, second, scale.values[first, second]) if len(first) else []
    total = _total(scale.values, pairs) * scale.unit
    return Matching(tuple(pairs), total, total)


def _match_rustworkx(weights: Floats) -> Matching:
    return _match_blossom(weights, lambda *edges: solve_rustworkx(rustworkx_graph(*edges)))


def _match_networkx(weights: Floats) -> Matching:
    return _match_blossom(weights, lambda *edges: solve_networkx(networkx_graph(*edges)))


def _match_priority_order(weights: Floats) -> Matching:
    """The most urgent takes the next most urgent that it may be merged with."""
    scale = scaled(weights)
    free = np.ones(len(scale.values), dtype=bool)
    pairs: list[Pair] = []
    for job, row in enumerate(scale.values):
        free_job, free[job] = free[job], False
        partners = np.flatnonzero(free & (row > 0)) if free_job else np.empty(0, dtype=np.intp)
        if len(partners):
            free[partners[0]] = False
            pairs.append((job, int(partners[0])))
    total = _total(scale.values, pairs) * scale.unit
    return Matching(tuple(pairs), total, max(total, assignment_bound(weights)))


def _total(values: Floats, pairs: list[Pair]) -> float:
    return math.fsum(float(values[pair]) for pair in pairs)


_METHODS: Final[dict[str, Callable[[Floats], Matching]]] = {
    "certified": match_dense,
    "rustworkx": _match_rustworkx,
    "networkx": _match_networkx,
    "priority-order": _match_priority_order,
}
