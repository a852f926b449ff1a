"""Maximum-weight matching: which pairs to merge so that the sum of their efficiencies is largest.

Both solvers get the same whole-number weights, made so that the optimum is unique. Their results
are therefore the same, on every machine and in every process.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from muri.policies.options import MATCHINGS, OptionsError


class Edge(NamedTuple):
    """A pair that may be merged.

    Attributes:
        first: Index of one partner.
        second: Index of the other, greater than `first`.
        weight: What merging them is worth, ≥ 0.
    """

    first: int
    second: int
    weight: float


Pair = tuple[int, int]

_QUANTUM: Final = 1_000_000_000
"""Weights are compared to nine digits: below that there is only the rounding of floats."""

_TIE_BITS: Final = 40
"""Bits that tell pairs of equal weight apart."""

_SUM_BITS: Final = 20
"""Room for adding up the tie-breakers of a million pairs without touching the weights."""


def match(edges: Sequence[Edge], method: str = "rustworkx") -> tuple[Pair, ...]:
    """Choose pairs without a common member, with the largest sum of weights.

    Args:
        edges: Candidate pairs over indices that follow the order of priority.
        method: One of `MATCHINGS`.

    Returns:
        The chosen pairs, sorted.

    Raises:
        OptionsError: The method is not known.
    """
    if method not in _SOLVERS:
        raise OptionsError(f"matching is {method!r}; valid are: {', '.join(MATCHINGS)}")
    ordered = sorted(edges)
    return tuple(sorted(_SOLVERS[method](ordered))) if ordered else ()


def whole_weight(edge: Edge) -> int:
    """The weight as a whole number that no other set of pairs can equal by chance.

    Adding a fixed pseudo-random number below the last digit that counts makes the optimal
    matching unique (the isolation lemma of Mulmuley, Vazirani and Vazirani).
    """
    return (round(edge.weight * _QUANTUM) << (_TIE_BITS + _SUM_BITS)) + _scramble(edge.first, edge.second)


def _scramble(first: int, second: int) -> int:
    """A number below 2^40 that depends on both indices only (the finaliser of SplitMix64)."""
    mask = (1 << 64) - 1
    value = ((first << 32) + second + 1) * 0x9E3779B97F4A7C15 & mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return (value ^ (value >> 31)) >> (64 - _TIE_BITS)


def _match_rustworkx(edges: Sequence[Edge]) -> list[Pair]:
    import rustworkx  # noqa: PLC0415 -- loaded only by a plan that needs it

    graph: rustworkx.PyGraph[None, int] = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from([None] * (1 + max(edge.second for edge in edges)))
    graph.add_edges_from([(edge.first, edge.second, whole_weight(edge)) for edge in edges])
    pairs = rustworkx.max_weight_matching(graph, weight_fn=lambda weight: weight)
    return [(min(pair), max(pair)) for pair in pairs]


def _match_networkx(edges: Sequence[Edge]) -> list[Pair]:
    import networkx  # noqa: PLC0415 -- loaded only by a plan that needs it

    graph: networkx.Graph[int] = networkx.Graph()
    graph.add_weighted_edges_from((edge.first, edge.second, whole_weight(edge)) for edge in edges)
    return [(min(pair), max(pair)) for pair in networkx.max_weight_matching(graph)]


def _match_priority_order(edges: Sequence[Edge]) -> list[Pair]:
    """The most urgent takes the next most urgent that it may be merged with."""
    taken: set[int] = set()
    pairs = []
    for edge in edges:
        if edge.first not in taken and edge.second not in taken:
            taken.update((edge.first, edge.second))
            pairs.append((edge.first, edge.second))
    return pairs


_SOLVERS: Final[dict[str, Callable[[Sequence[Edge]], list[Pair]]]] = {
    "certified": _match_rustworkx,
    "rustworkx": _match_rustworkx,
    "networkx": _match_networkx,
    "priority-order": _match_priority_order,
}
