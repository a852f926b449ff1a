"""What matching takes, a symmetric array of what each pair is worth, and what it returns."""

import math
from dataclasses import dataclass

import numpy as np

from muri.errors import MuriError
from muri.policies.speed.model import Floats

Pair = tuple[int, int]

_BLOCK_CELLS = 1 << 18
"""Cells worked on at once, so that they stay in the processor's cache (2 MiB)."""

_TILE = 512
"""Rows and columns of the tiles by which an array is compared with its transpose."""


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs without a common member, and the proof of how good they are.

    Attributes:
        pairs: Index pairs (first < second), sorted.
        weight: Sum of their weights.
        upper_bound: Proven: no matching of the same graph weighs more.
    """

    pairs: tuple[Pair, ...]
    weight: float
    upper_bound: float

    @property
    def gap(self) -> float:
        """Share of the bound by which the weight may fall short of the optimum."""
        return _gap(self.weight, self.upper_bound)


@dataclass(frozen=True, slots=True)
class TypeMatching:
    """How many pairs of which types, and the proof of how good they are.

    Attributes:
        pairs: (one type, the same or a later type, how many pairs), sorted; none without pairs.
        weight: Sum of their weights.
        upper_bound: Proven: no matching of these counts weighs more.
    """

    pairs: tuple[tuple[int, int, int], ...]
    weight: float
    upper_bound: float

    @property
    def gap(self) -> float:
        """Share of the bound by which the weight may fall short of the optimum."""
        return _gap(self.weight, self.upper_bound)


def _gap(weight: float, upper_bound: float) -> float:
    return max(0.0, 1.0 - weight / upper_bound) if upper_bound > 0 else 0.0


class WeightsError(MuriError):
    """An array of pair weights has a form that no matching can be computed for."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Weights between 0 and 1 that differ from the caller's by a power of two, hence without rounding.

    Attributes:
        values: Array (n, n); 0 on the diagonal and where a pair may not be made.
        unit: What 1 stands for in the caller's weights.
    """

    values: Floats
    unit: float


def scaled(weights: Floats, *, diagonal: bool = False) -> Scaled:
    """Check the weights and bring them to a common scale.

    Args:
        weights: Array (n, n), symmetric; NaN or ≤ 0 where a pair may not be made.
        diagonal: Keep the diagonal instead of clearing it.

    Raises:
        WeightsError: The array is not square, not symmetric or holds an infinity.
    """
    given = np.asarray(weights, dtype=np.float64)
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise WeightsError(f"pair weights must be a square array, one row and column per job, not {given.shape}")
    values = np.where(given > 0, given, 0.0)
    if not diagonal:
        np.fill_diagonal(values, 0.0)
    largest = float(values.max(initial=0.0))
    if math.isinf(largest):
        row, column = np.argwhere(np.isinf(values))[0]
        raise WeightsError(f"the weight of pair ({row}, {column}) is infinite; leave out a pair with NaN or 0")
    _refuse_asymmetric(values)
    exponent = math.frexp(largest)[1] if largest else 0
    np.ldexp(values, -exponent, out=values)
    return Scaled(values, math.ldexp(1.0, exponent))


def _refuse_asymmetric(values: Floats) -> None:
    for top in range(0, len(values), _TILE):
        for left in range(top, len(values), _TILE):
            upper = values[top : top + _TILE, left : left + _TILE]
            lower = values[left : left + _TILE, top : top + _TILE].T
            if not np.array_equal(upper, lower):
                row, column = np.argwhere(upper != lower)[0] + (top, left)
                raise WeightsError(
                    f"pair weights must be symmetric, but ({row}, {column}) is {values[row, column]} "
                    f"and ({column}, {row}) is {values[column, row]}"
                )


def row_blocks(count: int) -> list[slice]:
    """Ranges of rows of a (count, count) array that fit the processor's cache."""
    size = max(1, _BLOCK_CELLS // max(1, count))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
