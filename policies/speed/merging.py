"""Merging two groups: single evaluations and tables of all pairs of kinds, for Algorithm 1's rounds.

The predecessor of the speed models, which do the same for groups of any composition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, permutations

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.speed.efficiency import interleaving_efficiency
from muri.policies.speed.model import Floats, Shape
from muri.profiler.records import RESOURCES, ProfileError

RESOURCE_COUNT = len(RESOURCES)

_TIE = 1e-12
"""Relative difference below which two periods count as equal, so that rounding decides nothing."""

_CHUNK = 65_536
"""Combinations evaluated at once: bounds the memory that a large queue needs."""


@dataclass(frozen=True, slots=True)
class Interleaving:
    """The best (or worst) way to interleave given members.

    Attributes:
        order: Indices of the members by position: position i starts with stage i.
        period_s: T of Eq. 3.
        efficiency: γ of Eq. 4, above 0 and at most 1.
        speed: Predicted speed of each member, in the order in which they were given.
    """

    order: tuple[int, ...]
    period_s: float
    efficiency: float
    speed: tuple[float, ...]


@lru_cache(maxsize=32)
def orderings(members: int, resources: int = RESOURCE_COUNT) -> tuple[tuple[int, ...], ...]:
    """All orderings that can differ in their period.

    With as many members as resources, turning the ordering turns the slots and changes nothing:
    the first member stays first. With fewer it does change the period, so all are tried.
    """
    if members == resources:
        return tuple((0, *rest) for rest in permutations(range(1, members)))
    return tuple(permutations(range(members)))


def all_periods(stage_s: Floats) -> Floats:
    """Periods of many groups of equal size in every ordering (Eq. 3).

    Args:
        stage_s: Array (groups, members, resources) of seconds.

    Returns:
        Array (groups, orderings) in the order of `orderings`.
    """
    _, members, resources = stage_s.shape
    stage = (np.arange(members)[:, None] + np.arange(resources)[None, :]) % resources
    columns = [
        stage_s[:, np.array(order)[:, None], stage].max(axis=1).sum(axis=1) for order in orderings(members, resources)
    ]
    return np.stack(columns, axis=1)


def interleave(shapes: Sequence[Shape], *, worst: bool = False) -> Interleaving:
    """Find the ordering with the shortest period, the first one on a tie.

    Every member advances one iteration per period, but none faster than alone: where stages
    cover only part of an iteration, the longest iteration bounds the period from below.

    Args:
        shapes: The members, at most one for each resource.
        worst: Take the longest period instead.

    Raises:
        ProfileError: There are no members, or more than resources.
    """
    resources = len(shapes[0].stage_s) if shapes else RESOURCE_COUNT
    if not 1 <= len(shapes) <= resources:
        raise ProfileError(f"a group must have 1 to {resources} members to interleave, not {len(shapes)}")
    stage_s = np.array([shape.stage_s for shape in shapes], dtype=np.float64)
    periods = all_periods(stage_s[None])[0]
    chosen = _first_extreme(periods, worst=worst)
    period = float(periods[chosen])
    pace_s = max(period, *(shape.iteration_s for shape in shapes))
    return Interleaving(
        order=orderings(len(shapes), resources)[chosen],
        period_s=period,
        efficiency=interleaving_efficiency([shape.stage_s for shape in shapes], period),
        speed=tuple(min(1.0, shape.iteration_s / pace_s) for shape in shapes),
    )


def _first_extreme(periods: Floats, *, worst: bool) -> int:
    if worst:
        return int(np.argmax(periods >= periods.max() * (1 - _TIE)))
    return int(np.argmax(periods <= periods.min() * (1 + _TIE)))


@dataclass(frozen=True, slots=True)
class MergeTable:
    """What comes of merging any two kinds of groups; all arrays are square and symmetric.

    Attributes:
        efficiency: γ of the merged group; NaN where it would have too many members.
        total_speed: Sum of its members' speeds, NaN likewise.
        gpu_mem_gib: Its GPU memory.
    """

    efficiency: Floats
    total_speed: Floats
    gpu_mem_gib: Floats


def merge_table(kinds: Sequence[Sequence[Shape]], *, max_size: int = MAX_GROUP_SIZE, worst: bool = False) -> MergeTable:
    """Evaluate merging of every two kinds of groups at once.

    Args:
        kinds: Distinct groups, each as the shapes of its members (one for a single job).
        max_size: Most members of a merged group.
        worst: Use the worst ordering instead of the best.
    """
    count = len(kinds)
    efficiency = np.full((count, count), np.nan)
    total_speed = np.full((count, count), np.nan)
    by_size: dict[int, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_size.setdefault(len(kind), []).append(index)
    for size_a, size_b in combinations_with_replacement(sorted(by_size), 2):
        if size_a + size_b > max_size:
            continue
        rows, columns = by_size[size_a], by_size[size_b]
        partners = [kinds[column] for column in columns]
        for part in _chunks(rows, max(1, _CHUNK // len(columns))):
            cells = np.ix_(part, columns)
            values = _evaluate([kinds[row] for row in part], partners, worst=worst)
            for table, value in zip((efficiency, total_speed), values, strict=True):
                table[cells] = value.reshape(len(part), len(columns))
                table.T[cells] = table[cells]
    memory = np.array([sum(shape.gpu_mem_gib for shape in kind) for kind in kinds], dtype=np.float64)
    return MergeTable(efficiency, total_speed, memory[:, None] + memory[None, :])


def _chunks(items: list[int], size: int) -> list[list[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _evaluate(
    first: Sequence[Sequence[Shape]], second: Sequence[Sequence[Shape]], *, worst: bool
) -> tuple[Floats, Floats]:
    """γ and total speed of every group of `first` merged with every one of `second`, row by row."""
    stage_s = _cross(_stages(first), _stages(second))
    iteration_s = _cross(_iterations(first), _iterations(second))
    periods = all_periods(stage_s)
    period = periods.max(axis=1) if worst else periods.min(axis=1)
    pace_s = np.maximum(period, iteration_s.max(axis=1))
    busy_s = stage_s.sum(axis=(1, 2))
    gamma = np.divide(busy_s, stage_s.shape[2] * period, out=np.zeros_like(period), where=period > 0)
    return gamma, np.minimum(1.0, iteration_s / pace_s[:, None]).sum(axis=1)


def _stages(kinds: Sequence[Sequence[Shape]]) -> Floats:
    return np.array([[shape.stage_s for shape in kind] for kind in kinds], dtype=np.float64)


def _iterations(kinds: Sequence[Sequence[Shape]]) -> Floats:
    return np.array([[shape.iteration_s for shape in kind] for kind in kinds], dtype=np.float64)


def _cross(first: Floats, second: Floats) -> Floats:
    """Join every row of `first` with every row of `second` along the members' axis."""
    count_a, count_b = len(first), len(second)
    left = np.repeat(first, count_b, axis=0)
    right = np.tile(second, (count_a, *(1 for _ in second.shape[1:])))
    return np.concatenate([left, right], axis=1)
