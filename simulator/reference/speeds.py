"""Periods and efficiencies of groups, computed once for each company of profiles."""

from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from math import comb
from typing import Final

import numpy as np

from muri.policies.speed.model import Shape
from muri.policies.speed.reference import MULTIPLIERS, Reference

Kinds = tuple[int, ...]
"""Kinds of a group's members, ascending."""

_AHEAD_LIMIT: Final = 20_000
"""Most groups of one GPU count that are computed before the first is asked for: one call instead of hundreds."""

_SLOTS: Final = 4


class GroupFigures:
    """What the simulator's formula says of groups; kinds index the shapes.

    Args:
        shapes: The distinct profiles.
        ordering: "best" or "worst" permutation of the members.
        multipliers: Factors on the period of two, three and four members.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        ordering: str = "best",
        multipliers: tuple[float, float, float] = MULTIPLIERS,
    ) -> None:
        self._shapes = shapes
        self._model = Reference(ordering, multipliers, capped=False)
        self._busy_s = [sum(shape.stage_s) for shape in shapes]
        self._period_s: dict[Kinds, float] = {}

    def compute_all(self, kinds: Sequence[int], largest: int) -> None:
        """Compute all groups of some kinds, unless there are too many."""
        for size in range(2, largest + 1):
            if comb(len(kinds) + size - 1, size) <= _AHEAD_LIMIT:
                self._compute(combinations_with_replacement(sorted(kinds), size))

    def period_s(self, kinds: Kinds) -> float:
        """Seconds in which every member completes one iteration, with the multiplier."""
        if kinds not in self._period_s:
            self._compute([kinds])
        return self._period_s[kinds]

    def efficiency(self, kinds: Kinds) -> float:
        """γ = Σ resource time / (4 T), T with its multiplier."""
        return sum(self._busy_s[kind] for kind in kinds) / (_SLOTS * self.period_s(kinds))

    def _compute(self, groups: Iterable[Kinds]) -> None:
        rows = list(groups)
        period_s = self._model.evaluate(self._shapes, np.array(rows, dtype=np.intp)).period_s
        self._period_s.update(zip(rows, period_s.tolist(), strict=True))
