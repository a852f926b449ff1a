"""When a script has warmed up, and how sure its mean times are. Pure.

Warm-up: the script has settled after `w` iterations when the median of the next `HALF_WINDOW` and that of the
`HALF_WINDOW` after them differ by at most `TOLERANCE`, or by no more than their own scatter explains. The least `w`
counts; it is at least `LEAST_WARMUP` and, for a script that never settles, `MOST_WARMUP`.

Enough: the 95 % confidence half-widths of the mean iteration time and of the mean time of the stage that takes
most of it are both within `TOLERANCE` of these means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import Final

TOLERANCE: Final = 0.05
"""How near to its true value a mean should be, as a share of it."""

HALF_WINDOW: Final = 5
LEAST_WARMUP: Final = 2
MOST_WARMUP: Final = 20

MOST_OUTLIERS: Final = 0.1
"""A larger share of far-off iterations is not chance but part of the job."""

_OUTLIER_DEVIATIONS: Final = 4.0
_SIGMA_PER_MAD: Final = 1.4826  # of a normal distribution
_MEDIAN_NOISE: Final = 1.2533  # standard error of a median, in those of a mean (normal distribution)
_NORMAL: Final = NormalDist()
_LEVEL: Final = 0.975
_LEAST_FOR_SCATTER: Final = 3


@dataclass(frozen=True, slots=True)
class Certainty:
    """How sure a mean is.

    Attributes:
        mean: Of the values.
        half_width: 95 % confidence half-width as a share of the mean; infinite when there are too few values.
        probability: That the true mean lies within `TOLERANCE` of this one, given the values' scatter; 0 to 1.
    """

    mean: float
    half_width: float
    probability: float


def has_settled(times_s: Sequence[float]) -> bool:
    """Whether 2 × `HALF_WINDOW` consecutive iteration times show no trend beyond tolerance and scatter."""
    first, second = times_s[:HALF_WINDOW], times_s[HALF_WINDOW:]
    middle_s = median(times_s)
    scatter_s = max(_deviation(first), _deviation(second))
    noise_s = 2 * _MEDIAN_NOISE * scatter_s * math.sqrt(2 / HALF_WINDOW)
    allowed_s = max(TOLERANCE * middle_s, min(noise_s, 4 * TOLERANCE * middle_s))
    return abs(median(first) - median(second)) <= allowed_s and times_s[0] <= middle_s + max(
        2 * TOLERANCE * middle_s, 3 * scatter_s
    )


def settled_after(times_s: Sequence[float], *, known_unsettled: int = 0) -> int | None:
    """After how many iterations a script has settled; None while it has not.

    Args:
        times_s: Wall-clock seconds of all iterations so far.
        known_unsettled: So many iterations are known to be too few; what was found out before need not be again.
    """
    for warmup in range(max(LEAST_WARMUP, known_unsettled), len(times_s) - 2 * HALF_WINDOW + 1):
        if warmup >= MOST_WARMUP or has_settled(times_s[warmup : warmup + 2 * HALF_WINDOW]):
            return warmup
    return None


def ordinary(times_s: Sequence[float]) -> list[bool]:
    """Which iterations count for the means: all but a few that something else on the machine held up.

    Left out is what lies further than four standard deviations, estimated from the median absolute deviation,
    and further than the tolerance from the median, unless that is more than a tenth of all.
    """
    middle_s = median(times_s)
    far_s = max(_OUTLIER_DEVIATIONS * _deviation(times_s), 2 * TOLERANCE * middle_s)
    kept = [abs(value - middle_s) <= far_s for value in times_s]
    return kept if kept.count(False) <= MOST_OUTLIERS * len(kept) else [True] * len(kept)


def certainty(values: Sequence[float]) -> Certainty:
    """How sure the mean of values is that follow each other in time.

    What holds up one iteration often holds up the next: with the correlation ρ of neighbours, n values say as much
    as n (1 − ρ) / (1 + ρ) independent ones.
    """
    count = len(values)
    mean = fmean(values)
    if count < _LEAST_FOR_SCATTER or mean <= 0:
        return Certainty(mean, math.inf, 0.0)
    squares = sum((value - mean) ** 2 for value in values)
    correlation = _neighbours(values, mean) / squares if squares > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    independent = max(2.0, count * (1 - correlation) / (1 + correlation))
    error = math.sqrt(squares / (count - 1) / independent) / mean
    freedom = independent - 1
    if error == 0:
        return Certainty(mean, 0.0, 1.0)
    return Certainty(mean, student_quantile(freedom) * error, student_within(TOLERANCE / error, freedom))


def student_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t distribution, above 1 degree of freedom (Abramowitz and Stegun, 26.7.5)."""
    z = _NORMAL.inv_cdf(_LEVEL)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def student_within(limit: float, freedom: float) -> float:
    """Probability that |t| is at most `limit` (Abramowitz and Stegun, 26.7.8)."""
    z = limit * (1 - 1 / (4 * freedom)) / math.sqrt(1 + limit**2 / (2 * freedom))
    return max(0.0, 2 * _NORMAL.cdf(z) - 1)


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation as the median absolute deviation tells it, which a few outliers do not move."""
    middle = median(values)
    return _SIGMA_PER_MAD * median(abs(value - middle) for value in values)


def _neighbours(values: Sequence[float], mean: float) -> float:
    return sum((one - mean) * (two - mean) for one, two in pairwise(values))
