"""From the iterations of a dry run, and what the script was seen to use, to the figures of a profile. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from statistics import fmean, pstdev
from typing import Final

from muri.profiler.dryrun.attribution import Attribution, Interval, attribute
from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.dryrun.steadiness import LEAST_FOR_SCATTER, LEAST_PERIODS, certainty, ordinary, period_means
from muri.profiler.records import STAGES, ProfileDetail, ProfileError

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
    """What is known of a dry run beside its iterations."""

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


def summarise(samples: Sequence[IterationSample], circumstances: Circumstances) -> DryRunResult:
    """The means of the iterations after the warm-up, with what says how far to trust them.

    A few iterations that something else delayed do not count for the means (`steadiness.ordinary`); the 95th
    percentiles and the coefficients of variation are of all.

    Raises:
        ProfileError: There are no iterations, or one cannot be true.
    """
    if not samples:
        raise ProfileError("there are no iterations to measure after the warm-up")
    _refuse_impossible(samples)
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


def _refuse_impossible(samples: Sequence[IterationSample]) -> None:
    for sample in samples:
        for stage, value in zip(STAGES, sample.owned_s):
            if not math.isfinite(value) or value < 0:
                raise ProfileError(f"{stage} time is {value}; it must be ≥ 0 s")
        if not math.isfinite(sample.iteration_s) or sample.iteration_s <= 0:
            raise ProfileError(f"iteration time {sample.iteration_s} s must be > 0")


def _percentile(values: Sequence[float]) -> float:
    """The 95th percentile: the least value that at least 95 % of them do not exceed."""
    return sorted(values)[math.ceil(_P95 * len(values)) - 1]


def _variation(values: Sequence[float]) -> float:
    mean = fmean(values)
    return pstdev(values) / mean if mean > 0 else 0.0
