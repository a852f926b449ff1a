"""Pairs of jobs that all have distinct profiles: the certified matching beside Blossom."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from muri.policies.matching.certified import networkx_graph, rustworkx_graph, solve_networkx, solve_rustworkx
from muri.policies.matching.problem import Pair
from muri.policies.matching.solve import allowed_pairs, match_weights
from muri.policies.speed.model import Floats, Indices, Shape
from muri.policies.speed.registry import speed_model
from muri.profiler.records import RESOURCES

NETWORKX_LIMIT = 400
"""Most jobs for which networkx is asked: more would keep it busy for minutes."""

_TYPICAL_STAGE_S = 0.05
_BOTTLENECK = 4.0
"""How many times a typical stage the bottleneck takes."""

_SPREAD = 0.6
"""Standard deviation of the logarithm of stage times."""

_ROWS = 256
"""Rows of the array of pairs that are evaluated at once."""


def random_shapes(count: int, seed: int) -> list[Shape]:
    """Distinct profiles: each has one bottleneck resource, all stage times are log-normal."""
    rng = np.random.default_rng(seed)
    stage_s = _TYPICAL_STAGE_S * np.exp(rng.normal(0.0, _SPREAD, (count, len(RESOURCES))))
    stage_s[np.arange(count), rng.integers(0, len(RESOURCES), count)] *= _BOTTLENECK
    memory_gib = rng.uniform(2.0, 20.0, count)
    return [
        Shape(tuple(stages.tolist()), float(stages.sum()), float(memory), f"model-{index}")
        for index, (stages, memory) in enumerate(zip(stage_s, memory_gib, strict=True))
    ]


def pair_weights(shapes: list[Shape]) -> Floats:
    """γ of every pair in lockstep (Eq. 3 and 4); NaN where sharing is no faster than one after the other."""
    model = speed_model("lockstep")
    count = len(shapes)
    weights = np.full((count, count), np.nan)
    for start in range(0, count, _ROWS):
        first, second = np.triu_indices(min(_ROWS, count - start), 1, count - start)
        first, second = first + start, second + start
        found = model.evaluate(shapes, np.stack([first, second], axis=1))
        value = np.where(found.speed.sum(axis=1) > 1.0, found.efficiency, np.nan)
        weights[first, second] = value
        weights[second, first] = value
    return weights


def solve_pairs(weights: Floats) -> dict[str, float]:
    """The certified matching: seconds from weights to pairs, total γ and what is proven of it."""
    start = time.perf_counter()
    found = match_weights(weights, "certified")
    seconds = time.perf_counter() - start
    return {
        "solver_s": round(seconds, 4),
        "efficiency": found.weight,
        "upper_bound": found.upper_bound,
        "gap": found.gap,
    }


def peers(weights: Floats) -> dict[str, dict[str, float]]:
    """The same graph in the usual solvers; `solver_s` is the solver's call alone, `build_s` making its graph."""
    result = {"rustworkx": _timed(weights, rustworkx_graph, solve_rustworkx)}
    if len(weights) <= NETWORKX_LIMIT:
        result["networkx"] = _timed(weights, networkx_graph, solve_networkx)
    return result


def _timed(
    weights: Floats, build: Callable[[Indices, Indices, Floats], Any], solve: Callable[[Any], list[Pair]]
) -> dict[str, float]:
    start = time.perf_counter()
    first, second = allowed_pairs(weights)
    graph = build(first, second, weights[first, second])
    built = time.perf_counter()
    pairs = solve(graph)
    solver_s = time.perf_counter() - built
    return {
        "solver_s": round(solver_s, 4),
        "build_s": round(built - start, 4),
        "efficiency": float(sum(weights[pair] for pair in pairs)),
    }
