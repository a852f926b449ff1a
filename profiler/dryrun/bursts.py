"""Loaders that deliver in bursts: several batches at once, then a wait. Pure.

Workers of a DataLoader start side by side and so finish side by side: of w iterations w − 1 find their batch ready
and one waits, again and again, with period w. What was made ready before the loop began comes on top, up to
`depth` batches. So the quick iterations in between are no settled state, and the waits no outliers:

- The first `depth` iterations are warm-up. Whether the script has settled is read off the means of `period`
  consecutive iterations.
- Means are taken over whole periods, of which there should be `LEAST_PERIODS`; none of their iterations is left out.
- The means of periods, not single iterations, are the values that say how sure the mean is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Final, TypeVar

Value = TypeVar("Value")

LEAST_PERIODS: Final = 2
"""One wait alone could be chance."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """How a loader works ahead of the loop.

    Attributes:
        depth: Most batches that may be ready at once: workers × prefetch_factor, and what a thread prefetches.
        period: After so many iterations the waits recur: the number of workers, 1 without any.
    """

    depth: int = 0
    period: int = 1

    def widened(self, other: "Ahead") -> "Ahead":
        """What covers both, where a script has several loaders."""
        return Ahead(max(self.depth, other.depth), max(self.period, other.period))


def moving_means(values: Sequence[float], period: int) -> list[float]:
    """The mean of each `period` consecutive values, at the place of the first of them."""
    if period <= 1:
        return list(values)
    sums = list(accumulate(values, initial=0.0))
    return [(after - before) / period for before, after in zip(sums, sums[period:], strict=False)]


def period_means(values: Sequence[float], period: int) -> list[float]:
    """The mean of each whole period; what is left at the end is no period."""
    starts = range(0, len(values) - period + 1, period)
    return [fmean(values[start : start + period]) for start in starts]


def whole_periods(values: Sequence[Value], period: int) -> list[Value]:
    """As many of the first values as make whole periods."""
    return list(values[: len(values) - len(values) % period])
