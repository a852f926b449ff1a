"""Maximum-weight matching of a bucket's units by kind: only the number of units of each kind counts."""

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np
import rustworkx
from numpy.typing import NDArray

from muri.policies.speed.model import Indices
from muri.simulator.reference.speeds import Kinds

Counts = tuple[tuple[Kinds, int], ...]
"""Kinds of units, ascending, and how many there are of each."""

Pairs = tuple[tuple[Kinds, Kinds, int], ...]
"""Two kinds of units and how many pairs of them, those of the least weight first."""

_DIRECT: Final = 32
"""Most units that are matched as they are."""

_UNITS: Final = 1 << 40
"""Resolution of weights."""

_CHECKSUM_BITS: Final = 20

_GIVEN_BACK: Final = 2
"""Pairs of each sort, of half the bucket, that are not taken for granted. With 2, one matching in a thousand weighs
0.02 % less than the best; with 1 it is one in sixty, by up to 0.4 %."""


class Pairing:
    """Matches kinds of units and remembers the answers.

    A bucket with many units is solved through one of half the size: twice its pairs, less a few of each sort, are taken
    for granted, and what then is left over is matched exactly.

    Args:
        weight: What a unit of these kinds (all members, ascending) is worth.
        largest: Most members of a unit.
    """

    def __init__(self, weight: Callable[[Kinds], float], largest: int) -> None:
        self._weight = lru_cache(maxsize=None)(weight)
        self._table = lru_cache(maxsize=1 << 12)(self._weights)
        self._largest = largest
        self.match = lru_cache(maxsize=None)(self._match)

    def _match(self, counts: Counts) -> Pairs:
        """The pairs of a matching of maximum weight."""
        total = self._solve(counts)
        order = sorted(total, key=lambda pair: (self._weight(merged(*pair)), pair))
        return tuple((*pair, total[pair]) for pair in order)

    def _solve(self, counts: Counts) -> dict[tuple[Kinds, Kinds], int]:
        if sum(count for _, count in counts) <= _DIRECT:
            return self._matched(counts)
        half = self.match(tuple((kinds, count // 2) for kinds, count in counts if count > 1))
        total = {(one, other): 2 * (count - _GIVEN_BACK) for one, other, count in half if count > _GIVEN_BACK}
        left = dict(counts)
        for (one, other), count in total.items():
            left[one] -= count
            left[other] -= count
        for pair, count in self._matched(tuple(sorted(left.items()))).items():
            total[pair] = total.get(pair, 0) + count
        return total

    def _matched(self, counts: Counts) -> dict[tuple[Kinds, Kinds], int]:
        """Match units one by one."""
        if sum(count for _, count in counts) < 2:
            return {}
        whole = self._table(tuple(kinds for kinds, _ in counts))
        index = np.repeat(np.arange(len(counts)), [count for _, count in counts])
        first, second = _all_pairs(len(index))
        weight = whole[index[first], index[second]]
        graph: rustworkx.PyGraph[None, int] = rustworkx.PyGraph(multigraph=False)
        graph.add_nodes_from([None] * len(index))
        allowed = weight > 0
        graph.add_edges_from(
            list(zip(first[allowed].tolist(), second[allowed].tolist(), weight[allowed].tolist(), strict=True))
        )
        found: dict[tuple[Kinds, Kinds], int] = {}
        for pair in rustworkx.max_weight_matching(graph, weight_fn=int):
            one, other = sorted(int(index[unit]) for unit in pair)
            kinds = (counts[one][0], counts[other][0])
            found[kinds] = found.get(kinds, 0) + 1
        return found

    def _weights(self, units: tuple[Kinds, ...]) -> NDArray[np.int64]:
        """Weight of each pair of kinds of units; 0 where they would be too many."""
        return np.array(
            [
                [self._whole(merged(one, other)) if len(one) + len(other) <= self._largest else 0 for other in units]
                for one in units
            ]
        )

    def _whole(self, kinds: Kinds) -> int:
        """The weight as a whole number, in whose last digits a checksum decides between equally good matchings."""
        return (round(self._weight(kinds) * _UNITS) << _CHECKSUM_BITS) + (
            zlib.crc32(repr(kinds).encode()) >> (32 - _CHECKSUM_BITS)
        )


@lru_cache(maxsize=1 << 10)
def _all_pairs(count: int) -> tuple[Indices, Indices]:
    first, second = np.triu_indices(count, 1)
    return first, second


@lru_cache(maxsize=1 << 16)
def merged(one: Kinds, other: Kinds) -> Kinds:
    """Kinds of the unit that two units become."""
    return tuple(sorted(one + other))
