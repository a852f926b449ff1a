"""Exact matching by Edmonds' Blossom algorithm, in rustworkx (compiled) and networkx (readable).

Both get the same whole-number weights, made so that the optimum is unique. Their results are
therefore the same, on every machine and in every process.
"""

from typing import TYPE_CHECKING, Final

import numpy as np

from muri.policies.matching.result import Pair
from muri.policies.speed.model import Floats, Indices

if TYPE_CHECKING:
    import networkx
    import rustworkx

_QUANTUM_BITS: Final = 40
"""Weights are compared to twelve digits: below that there is only the rounding of floats."""

_TIE_BITS: Final = 40
"""Bits that tell pairs of equal weight apart."""

_SUM_BITS: Final = 20
"""Room for adding up the tie-breakers of a million pairs without touching the weights."""


def whole_weights(first: Indices, second: Indices, weight: Floats) -> list[int]:
    """Weights as whole numbers that no other set of pairs can equal by chance.

    Adding a fixed pseudo-random number below the last digit that counts makes the optimal
    matching unique (the isolation lemma of Mulmuley, Vazirani and Vazirani).

    Args:
        first: Index of one partner.
        second: Index of the other, greater than `first`.
        weight: What merging them is worth, 0 to 1.
    """
    parts = np.rint(np.ldexp(weight, _QUANTUM_BITS)).astype(np.int64).tolist()
    ties = _scrambled(first, second)
    return [(part << (_TIE_BITS + _SUM_BITS)) + tie for part, tie in zip(parts, ties, strict=True)]


def _scrambled(first: Indices, second: Indices) -> list[int]:
    """Numbers below 2^40 that depend on both indices only (the finaliser of SplitMix64)."""
    value = (first.astype(np.uint64) << np.uint64(32)) + second.astype(np.uint64) + np.uint64(1)
    value *= np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = (value ^ (value >> np.uint64(31))) >> np.uint64(64 - _TIE_BITS)
    ties: list[int] = value.tolist()
    return ties


def rustworkx_graph(first: Indices, second: Indices, weight: Floats) -> "rustworkx.PyGraph[None, int]":
    """The graph that rustworkx matches, with whole-number weights."""
    import rustworkx  # -- loaded only by a plan that needs it

    graph: rustworkx.PyGraph[None, int] = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from([None] * (1 + int(second.max(initial=-1))))
    whole = whole_weights(first, second, weight)
    graph.add_edges_from(list(zip(first.tolist(), second.tolist(), whole, strict=True)))
    return graph


def solve_rustworkx(graph: "rustworkx.PyGraph[None, int]") -> list[Pair]:
    """The maximum-weight matching of such a graph, sorted."""
    import rustworkx  # -- loaded only by a plan that needs it

    pairs = rustworkx.max_weight_matching(graph, weight_fn=lambda weight: weight)
    return sorted((min(pair), max(pair)) for pair in pairs)


def networkx_graph(first: Indices, second: Indices, weight: Floats) -> "networkx.Graph[int]":
    """The same graph for networkx."""
    import networkx  # -- loaded only by a plan that needs it

    graph: networkx.Graph[int] = networkx.Graph()
    whole = whole_weights(first, second, weight)
    graph.add_weighted_edges_from(zip(first.tolist(), second.tolist(), whole, strict=True))
    return graph


def solve_networkx(graph: "networkx.Graph[int]") -> list[Pair]:
    """The maximum-weight matching of such a graph, sorted."""
    import networkx  # -- loaded only by a plan that needs it

    return sorted((min(pair), max(pair)) for pair in networkx.max_weight_matching(graph))
