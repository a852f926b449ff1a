"""When a script has warmed up, how sure its mean times are, and the figures that its iterations give. Pure.

Warm-up: a script has settled after `w` iterations when, of the 2 × `HALF_WINDOW` next ones, the medians of the two
halves differ by at most `TOLERANCE` or show no trend (Mann and Kendall's test at 5 %), and neither the first nor the
last three stand out. The least such `w` counts, from `LEAST_WARMUP` up to `MOST_WARMUP`.

Enough: the 95 % confidence half-widths of the mean iteration time and of the mean time of its longest stage are both
within `TOLERANCE` of these means.

Bursts: the w workers of a DataLoader finish side by side, so w − 1 iterations find their batch ready and one waits,
again and again; up to `LoaderAhead.depth` batches were ready before the loop began. So the first `depth` iterations are
warm-up, settling is judged by the means of w iterations, and the means of at least `LEAST_PERIODS` whole periods of w
iterations, none of them left out, say how sure the mean is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, compress
from statistics import fmean, median, pstdev
from typing import Final, TypeVar

from muri.profiler.dryrun.attribution import Attribution, Interval, attribute
from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.records import STAGES, ProfileDetail, ProfileError, fault_in

TOLERANCE: Final = 0.05
"""How near to its true value a mean should be, as a share of it."""

HALF_WINDOW: Final = 5
LEAST_FOR_SCATTER: Final = 3
LEAST_WARMUP: Final = 2
MOST_WARMUP: Final = 20
MOST_OUTLIERS: Final = 0.1
"""A larger share of far-off iterations is not a chance but part of the job."""

FEW: Final = 2
"""More far-off iterations than these are part of the job too."""

RECURS_FROM: Final = 2.0
"""An iteration that takes this many times the median is chance only if there is one."""

_OUTLIER_DEVIATIONS: Final = 4.0
_SIGMA_PER_MAD: Final = 1.4826  # of a normal distribution
_LEVEL: Final = 0.95
_LARGEST_QUANTILE: Final = 13.0
"""Above that of one degree of freedom."""

_HALVINGS: Final = 50
_CHANCE_RISES: Final = 21  # Mann and Kendall's S: of 10 values without trend, 5 % exceed it
_MOST_CORRELATED: Final = 0.9
Value = TypeVar("Value")
LEAST_PERIODS: Final = 2
"""One wait alone could be chance."""


@dataclass(frozen=True)
class Certainty:
    """How sure a mean is."""

    mean: float  # Of the values
    half_width: float  # 95 % confidence half-width as a share of the mean; infinite when there are too few values
    probability: float  # That the true mean lies within `TOLERANCE` of this one, given the values' scatter; 0 to 1


def has_settled(times_s: Sequence[float]) -> bool:
    """Whether 2 × `HALF_WINDOW` consecutive iteration times are those of a script that has warmed up."""
    first, second = times_s[:HALF_WINDOW], times_s[HALF_WINDOW:]
    middle_s = median(times_s)
    far_s = max(2 * TOLERANCE * middle_s, 3 * max(_deviation(first), _deviation(second)))
    if times_s[0] > middle_s + far_s or median(times_s[-3:]) < middle_s - far_s:
        return False
    return abs(median(first) - median(second)) <= TOLERANCE * middle_s or not _has_trend(times_s)


def settled_after(times_s: Sequence[float], *, known_unsettled: int = 0, least: int = LEAST_WARMUP) -> int | None:
    """After how many iterations a script has settled; None while it has not."""
    for warmup in range(max(least, known_unsettled), len(times_s) - 2 * HALF_WINDOW + 1):
        if warmup >= most_warmup(least) or has_settled(times_s[warmup : warmup + 2 * HALF_WINDOW]):
            return warmup
    return None


def warmup_by_now(times_s: Sequence[float], ahead: LoaderAhead, most_measured: int) -> int | None:
    """After how many iterations a script has settled, as its newest one tells; None while it has not."""
    # Looking at longer periods than fit would itself take more than the limit.
    fits = max(1, most_measured - 2 * HALF_WINDOW + 1)
    means_s = moving_means(times_s, min(ahead.period, fits))
    # The latest iteration completes one new window; earlier ones were judged before.
    newest = max(ahead.least_warmup, len(means_s) - 2 * HALF_WINDOW)
    return settled_after(means_s, known_unsettled=newest, least=ahead.least_warmup)


def most_warmup(least: int = LEAST_WARMUP) -> int:
    """After how many iterations measuring begins although the script has not settled."""
    return least + MOST_WARMUP - LEAST_WARMUP


def ordinary(times_s: Sequence[float]) -> list[bool]:
    """Which iterations count for the means: all but a few that something else on the machine held up.

    Left out is what lies further than four standard deviations, estimated from the median absolute deviation,
    and further than the tolerance from the median, unless that is more than `FEW` or a tenth of all, or takes a
    multiple of the median (`RECURS_FROM`) and recurs: then it is a part of the job, such as waiting for data.
    """
    middle_s = median(times_s)
    far_s = max(_OUTLIER_DEVIATIONS * _deviation(times_s), 2 * TOLERANCE * middle_s)
    kept = [abs(value - middle_s) <= far_s for value in times_s]
    recurs = sum(value >= RECURS_FROM * middle_s for value in times_s) > 1
    few = kept.count(False) <= min(FEW, MOST_OUTLIERS * len(kept))
    return kept if few and not recurs else [True] * len(kept)


def certainty(values: Sequence[float], bias: float = 0.0, least: int = LEAST_FOR_SCATTER) -> Certainty:
    """How sure the mean of values is that follow each other in time.

    What delays one iteration often delays the next: with the correlation ρ of neighbors, n values say as much
    as n (1 − ρ) / (1 + ρ) independent ones.
    """
    count = len(values)
    mean = fmean(values)
    if count < least or mean <= 0:
        return Certainty(mean, math.inf, 0.0)
    squares = sum((value - mean) ** 2 for value in values)
    correlation = _neighbors(values, mean) / squares if squares > 0 else 0.0
    correlation = min(max(correlation, 0.0), _MOST_CORRELATED)
    independent = max(2.0, count * (1 - correlation) / (1 + correlation))
    error = math.sqrt(squares / (count - 1) / independent) / mean
    freedom = max(1, int(independent - 1))
    if error == 0:
        return Certainty(mean, 0.0, float(bias < TOLERANCE))
    return Certainty(
        mean, student_quantile(freedom) * error, student_within(max(0.0, TOLERANCE - bias) / error, freedom)
    )


def student_within(limit: float, freedom: int) -> float:
    """Probability that |t| is at most `limit`."""
    angle = math.atan(limit / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    # The finite series for a whole number of degrees of freedom; scripts' own Pythons may lack SciPy.
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for number in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (number - 1) / number
        total += term
    return min(1.0, (angle + sine * total) * 2 / math.pi if odd else sine * total)


def student_quantile(freedom: int) -> float:
    """The limit that |t| stays below with a probability of 95 %."""
    low, high = 0.0, _LARGEST_QUANTILE
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, freedom) < _LEVEL else (low, middle)
    return high


def _has_trend(values: Sequence[float]) -> bool:
    rises = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    return abs(rises) > _CHANCE_RISES


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation as the median absolute deviation tells it, which a few outliers do not move."""
    middle = median(values)
    return _SIGMA_PER_MAD * median(abs(value - middle) for value in values)


def _neighbors(values: Sequence[float], mean: float) -> float:
    return sum((one - mean) * (two - mean) for one, two in zip(values, values[1:]))


@dataclass(frozen=True)
class LoaderAhead:
    """How a loader works ahead of the loop."""

    depth: int = 0  # Most batches that may be ready at once: workers × prefetch_factor, and prefetched by threads
    period: int = 1  # After so many iterations the waits recur: the number of workers, 1 without any

    @property
    def least_warmup(self) -> int:
        """Iterations that are warm-up in any case."""
        return max(LEAST_WARMUP, self.depth)

    def widened(self, other: LoaderAhead) -> LoaderAhead:
        """What covers both, where a script has several loaders."""
        return LoaderAhead(max(self.depth, other.depth), max(self.period, other.period))


def moving_means(values: Sequence[float], period: int) -> list[float]:
    """The mean of each `period` consecutive values, at the place of the first of them."""
    if period <= 1:
        return list(values)
    sums = list(accumulate(values, initial=0.0))
    return [(after - before) / period for before, after in zip(sums, sums[period:])]


def period_means(values: Sequence[float], period: int) -> list[float]:
    """The mean of each whole period; a rest at the end is left out."""
    starts = range(0, len(values) - period + 1, period)
    return [fmean(values[start : start + period]) for start in starts]


def whole_periods(values: Sequence[Value], period: int) -> list[Value]:
    """The first values, as many as make whole periods."""
    return list(values[: len(values) - len(values) % period])


UNSETTLED_FACTOR: Final = 0.5
"""Factor of the confidence when a script never settled, or too few periods were measured."""

_P95: Final = 0.95


@dataclass(frozen=True)
class IterationSample:
    """One measured iteration."""

    owned_s: tuple[float, ...]  # Seconds that each stage's resource owned, in the order of `STAGES`
    iteration_s: float  # Wall-clock seconds of the whole iteration
    busy_s: tuple[float, ...] = (0.0,) * len(STAGES)  # Seconds in which each resource was used, owned or hidden


@dataclass(frozen=True)
class Circumstances:
    """A dry run's facts beside its iterations."""

    warmup: int = 0  # Iterations that were left out before them
    settled: bool = True  # Whether the script had settled by then
    disturbed: float = 0.0  # Share of the time that others held the script up
    stopped: str = ""  # Why there are no more of them
    period: int = 1  # Iterations after which the waits for the loader recur
    gpu_mem_gib: float = 0.0  # Peak GPU memory
    detail: ProfileDetail = field(default_factory=ProfileDetail)  # What else was measured; the rest is filled in


@dataclass(frozen=True)
class Certain:
    """How sure the means of some iterations are."""

    # The larger of the two 95 % half-widths, of the iteration and of the stage that takes most of it, as a share of the
    # mean
    half_width: float
    confidence: float  # The smaller of the probabilities that these means lie within the tolerance of the true ones
    left_out: int = 0  # Iterations that do not count for them


def samples_of(windows: Sequence[tuple[float, float]], intervals: Iterable[Interval]) -> list[IterationSample]:
    """Attribute the time of each iteration."""
    waiting = sorted(intervals, key=lambda interval: interval.start_s)
    going: list[Interval] = []
    samples, position = [], 0
    for start_s, end_s in windows:
        while position < len(waiting) and waiting[position].start_s < end_s:
            going.append(waiting[position])
            position += 1
        going = [interval for interval in going if interval.end_s > start_s]
        samples.append(sample_of(attribute(going, start_s, end_s), end_s - start_s))
    return samples


def sample_of(attribution: Attribution, iteration_s: float) -> IterationSample:
    """One iteration as a sample."""
    return IterationSample(attribution.owned_s, iteration_s, attribution.busy_s)


def how_sure(samples: Sequence[IterationSample], disturbed: float = 0.0, period: int = 1) -> Certain:
    """How sure the means of these iterations are; delays by other processes may affect all of them alike.

    Where waits recur the means of whole periods are the values, if there are enough.
    """
    kept = _counted(samples, period)
    by_period = period > 1 and enough_periods(samples, period)
    columns = [[sample.iteration_s for sample in kept]]
    stages = list(zip(*(sample.owned_s for sample in kept)))
    dominant = max(stages, key=sum)
    if sum(dominant) > 0:
        columns.append(list(dominant))
    if by_period:
        columns = [period_means(column, period) for column in columns]
    least = LEAST_PERIODS if by_period else LEAST_FOR_SCATTER
    sure = [certainty(column, disturbed, least) for column in columns]
    half_width, confidence = max(one.half_width for one in sure), min(one.probability for one in sure)
    return Certain(half_width, confidence, len(samples) - len(kept))


def enough_periods(samples: Sequence[IterationSample], period: int) -> bool:
    """Whether so many whole periods were measured that their means can be trusted."""
    return period <= 1 or len(samples) >= LEAST_PERIODS * period


def summarize(samples: Sequence[IterationSample], circumstances: Circumstances) -> DryRunResult:
    """The means of the iterations after the warm-up, with what says how far to trust them.

    A few iterations that something else delayed do not count for the means (`steadiness.ordinary`); the 95th
    percentiles and the coefficients of variation are of all.

    Raises:
        ProfileError: There are no iterations, or one cannot be true.
    """
    if not samples:
        raise ProfileError("there are no iterations to measure after the warm-up")
    if fault := next(filter(None, (fault_in(each.owned_s, each.iteration_s, 0.0, 0) for each in samples)), ""):
        raise ProfileError(fault)
    kept = _counted(samples, circumstances.period)
    iteration_s = fmean(sample.iteration_s for sample in kept)
    owned = [fmean(column) for column in zip(*(sample.owned_s for sample in kept))]
    busy = [fmean(column) for column in zip(*(sample.busy_s for sample in kept))]
    load_s, preprocess_s, propagate_s, synchronize_s = owned
    trusted = circumstances.settled and enough_periods(samples, circumstances.period)
    sure = how_sure(samples, circumstances.disturbed, circumstances.period)
    stages = list(zip(*(sample.owned_s for sample in samples)))
    iterations = [sample.iteration_s for sample in samples]
    return DryRunResult(
        stage_s=(load_s, preprocess_s, propagate_s, synchronize_s),
        iteration_s=iteration_s,
        gpu_mem_gib=circumstances.gpu_mem_gib,
        iterations=len(samples),
        detail=replace(
            circumstances.detail,
            stage_p95_s=tuple(_percentile(column) for column in stages),
            stage_cv=tuple(_variation(column) for column in stages),
            busy_s=tuple(busy),
            iteration_p95_s=_percentile(iterations),
            iteration_cv=_variation(iterations),
            confidence=sure.confidence * (1.0 if trusted else UNSETTLED_FACTOR),
            warmup_iterations=circumstances.warmup,
        ),
        stopped=circumstances.stopped,
    )


def _counted(samples: Sequence[IterationSample], period: int) -> list[IterationSample]:
    if period > 1:  # what stands out are the waits
        return list(samples)
    return list(compress(samples, ordinary([sample.iteration_s for sample in samples])))


def _percentile(values: Sequence[float]) -> float:
    """The 95th percentile: the least value that at least 95 % of them do not exceed."""
    return sorted(values)[math.ceil(_P95 * len(values)) - 1]


def _variation(values: Sequence[float]) -> float:
    mean = fmean(values)
    return pstdev(values) / mean if mean > 0 else 0.0
