"""Period of a group that takes turns on its resources (Muri, section 4.1).

In slot j of a period the member at position i holds resource (i + j) mod k, so a slot lasts as long
as the slowest of its stages. k slots are a period, in which every member completes one iteration.
"""

from collections.abc import Sequence
from typing import Final

_TIE: Final = 1e-12
"""Relative difference below which two periods count as equal, so that rounding decides nothing."""


def period_s(stage_s: Sequence[Sequence[float]], positions: Sequence[int] | None = None) -> float:
    """Period of a group in a given ordering: T = Σ_{j<k} max_i t_i^{(i+j) mod k} (Muri, Eq. 3).

    Args:
        stage_s: For each member, its seconds on each of the k resources.
        positions: Position of each member in the rotation; by default 0, 1, … as in the paper. Positions
            must differ; those that nobody holds are gaps.

    Returns:
        Seconds in which every member completes one iteration.
    """
    resources = len(stage_s[0])
    placed = list(zip(range(len(stage_s)) if positions is None else positions, stage_s, strict=True))
    return sum(max(member[(position + slot) % resources] for position, member in placed) for slot in range(resources))


def first_extreme(periods: Sequence[float], *, worst: bool) -> int:
    """Index of the first of the shortest periods, or of the longest.

    Args:
        periods: Seconds; those that differ by rounding alone count as equal.
        worst: Whether to look for the longest.
    """
    if worst:
        limit = max(periods) * (1 - _TIE)
        return next(index for index, period in enumerate(periods) if period >= limit)
    limit = min(periods) * (1 + _TIE)
    return next(index for index, period in enumerate(periods) if period <= limit)
