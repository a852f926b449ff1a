"""Maximum-weight matching of a bucket's units by kind: only the number of units of each kind counts."""

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Final

import numpy as np

from muri.policies.matching import match_weights
from muri.simulator.reference.speeds import Kinds

Counts = tuple[tuple[Kinds, int], ...]
"""Kinds of units, ascending, and how many there are of each."""

Pairs = tuple[tuple[Kinds, Kinds, int], ...]
"""Two kinds of units and how many pairs of them, those of the least weight first."""

_DIRECT: Final = 28
"""Most units that are matched as they are."""


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
        total = {(one, other): 2 * (count - 1) for one, other, count in half if count > 1}
        left = dict(counts)
        for (one, other), count in total.items():
            left[one] -= count
            left[other] -= count
        for pair, count in self._matched(tuple(sorted(left.items()))).items():
            total[pair] = total.get(pair, 0) + count
        return total

    def _matched(self, counts: Counts) -> dict[tuple[Kinds, Kinds], int]:
        """Match units one by one."""
        index = np.repeat(np.arange(len(counts)), [count for _, count in counts])
        table = np.full((len(counts), len(counts)), np.nan)
        for one, other in combinations_with_replacement(range(len(counts)), 2):
            kinds = merged(counts[one][0], counts[other][0])
            if len(kinds) <= self._largest:
                table[one, other] = table[other, one] = self._weight(kinds)
        found: dict[tuple[Kinds, Kinds], int] = {}
        for first, second in match_weights(table[np.ix_(index, index)], "rustworkx").pairs:
            pair = (counts[index[first]][0], counts[index[second]][0])
            found[pair] = found.get(pair, 0) + 1
        return found


def merged(one: Kinds, other: Kinds) -> Kinds:
    """Kinds of the unit that two units become."""
    return tuple(sorted(one + other))
