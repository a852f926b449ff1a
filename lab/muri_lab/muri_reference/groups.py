"""The groups that jobs can form: their periods and efficiencies, and the matching of the greatest weight."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from math import comb
from typing import Final

import numpy as np
import rustworkx
from numpy.typing import NDArray

from muri.policies.grouping.kway import multisets
from muri.policies.lockstep import MULTIPLIERS, Reference
from muri.policies.speed import Floats, Indices, Shape
from muri_lab.muri_reference.state import RUN_TIME_FACTOR, JobTable

_AHEAD_LIMIT: Final = 20_000
"""Most groups of one GPU count that are computed before the first is asked for: one call instead of hundreds."""

_SLOTS: Final = 4
_COLUMN_LIMIT: Final = 20_000
"""Most groups of one GPU count; with more kinds of jobs than that allows, groups get smaller."""

_DIRECT: Final = 32  # Most units that are matched as they are
_UNITS: Final = 1 << 40  # Resolution of weights
_CHECKSUM_BITS: Final = 20
_GIVEN_BACK: Final = 2
"""Pairs of each sort, of half the bucket, that are not taken for granted. With 2, one matching in a thousand weighs
0.02 % less than the best; with 1 it is one in sixty, by up to 0.4 %."""

Kinds = tuple[int, ...]  # Kinds of a group's members, ascending

Counts = tuple[tuple[Kinds, int], ...]  # Kinds of units, ascending, and how many there are of each

Pairs = tuple[tuple[Kinds, Kinds, int], ...]
"""Two kinds of units and how many pairs of them, those of the least weight first."""


class GroupFigures:
    """Periods and efficiencies of groups by the simulator's formula; kinds index the shapes."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        ordering: str = "best",
        multipliers: tuple[float, float, float] = MULTIPLIERS,
        planned: Sequence[Shape] | None = None,
    ) -> None:
        self._shapes = shapes
        self._planned = None if planned == shapes else planned
        self._model = Reference(ordering, multipliers, capped=False)
        self._busy_s = [sum(shape.stage_s) for shape in shapes]
        self._period_s: dict[Kinds, float] = {}

    def compute_all(self, kinds: Sequence[int], largest: int) -> None:
        """Compute all groups of some kinds, unless there are too many."""
        for size in range(2, largest + 1):
            if comb(len(kinds) + size - 1, size) <= _AHEAD_LIMIT:
                self.compute(combinations_with_replacement(sorted(kinds), size))

    def period_s(self, kinds: Kinds) -> float:
        """Seconds in which every member completes one iteration, with the multiplier."""
        self.compute([kinds])
        return self._period_s[kinds]

    def efficiency(self, kinds: Kinds) -> float:
        """γ = Σ resource time / (4 T), T with its multiplier."""
        return sum(self._busy_s[kind] for kind in kinds) / (_SLOTS * self.period_s(kinds))

    def compute(self, groups: Iterable[Kinds]) -> None:
        """Compute groups, those of one size at once, unless they are known."""
        new = {kinds for kinds in groups if kinds not in self._period_s}
        for size in {len(kinds) for kinds in new}:
            rows = [kinds for kinds in new if len(kinds) == size]
            found = self._model.evaluate(self._shapes, np.array(rows, dtype=np.intp), self._planned)
            self._period_s.update(zip(rows, found.period_s.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Columns:
    """Groups of jobs of one GPU count; rows of the arrays are groups."""

    kinds: tuple[int, ...]  # Kinds (indices into the job table's shapes) that jobs of this GPU count are of
    size: int  # Most members of a group
    members: tuple[tuple[int, ...], ...]  # For each group the places of its members' kinds in `kinds`, ascending
    index: dict[tuple[int, ...], int]  # The row of each of these tuples
    candidate: Indices  # (n, size): kind × size + earlier members of that kind; last value: no member
    speed: Floats  # Array (n, size): planned speed of each member, 1 = alone
    overhead_s: Floats  # cost of an event for each member: the sum over the group


def columns_of(table: JobTable, gpus: int, largest: int) -> Columns:
    """List and evaluate all groups of up to `largest` jobs of this GPU count."""
    kinds, first = np.unique(np.where(table.gpus == gpus, table.kind, -1), return_index=True)
    kinds, first = kinds[kinds >= 0], first[kinds >= 0]
    size = largest
    while size > 1 and comb(len(kinds) + size, size) > _COLUMN_LIMIT:
        size -= 1
    parts = [_of_size(table, kinds, count, size) for count in range(1, size + 1)]
    groups = [tuple(row) for members, _, _ in parts for row in members.tolist()]
    overhead_s = table.overhead_s[first]
    return Columns(
        kinds=tuple(kinds.tolist()),
        size=size,
        members=tuple(groups),
        index={members: row for row, members in enumerate(groups)},
        candidate=np.concatenate([candidate for _, candidate, _ in parts]),
        speed=np.concatenate([speed for _, _, speed in parts]),
        overhead_s=np.concatenate([overhead_s[members].sum(axis=1) for members, _, _ in parts]),
    )


def _of_size(table: JobTable, kinds: Indices, count: int, size: int) -> tuple[Indices, Indices, Floats]:
    """Members, candidates and speeds of the groups of `count` jobs."""
    members = multisets(len(kinds), count).astype(np.intp)
    alone_s = np.array([table.planned[kind].iteration_s for kind in kinds.tolist()]) * RUN_TIME_FACTOR
    period_s = alone_s[members[:, 0]]
    if count > 1:
        period_s = Reference(capped=False).evaluate(table.planned, kinds[members]).period_s
    before = np.zeros_like(members)
    for column in range(1, count):
        same = members[:, column] == members[:, column - 1]
        before[:, column] = np.where(same, before[:, column - 1] + 1, 0)
    missing = ((0, 0), (0, size - count))
    candidate = np.pad(members * size + before, missing, constant_values=len(kinds) * size)
    return members, candidate, np.pad(alone_s[members] / period_s[:, None], missing)


class Pairing:
    """Matches kinds of units and remembers the answers.

    A bucket with many units is solved through one of half the size: twice its pairs, less a few of each sort, are taken
    for granted; the rest is matched exactly.
    """

    def __init__(self, figures: GroupFigures, largest: int) -> None:
        self._figures = figures
        self._weight = lru_cache(maxsize=None)(figures.efficiency)
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
        weight = np.zeros((len(units), len(units)), dtype=np.int64)
        pairs = [
            (one, other, merged(units[one], units[other]))
            for one, other in combinations_with_replacement(range(len(units)), 2)
            if len(units[one]) + len(units[other]) <= self._largest
        ]
        self._figures.compute([kinds for _, _, kinds in pairs])
        for one, other, kinds in pairs:
            weight[one, other] = weight[other, one] = self._whole(kinds)
        return weight

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
