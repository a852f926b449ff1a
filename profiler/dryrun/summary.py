"""From the iterations of a dry run to the figures of a profile. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from statistics import fmean, pstdev
from typing import Final

from muri.profiler.dryrun.attribution import Attribution, Interval, attribute
from muri.profiler.dryrun.result import DryRunResult
from muri.profiler.dryrun.steadiness import certainty, ordinary
from muri.profiler.records import STAGES, ProfileDetail, ProfileError

UNSETTLED_FACTOR: Final = 0.5
"""What the confidence is multiplied with when a script never settled."""

_P95: Final = 0.95


@dataclass(frozen=True, slots=True)
class IterationSample:
    """One measured iteration.

    Attributes:
        owned_s: Seconds that each stage's resource owned, in the order of `STAGES`.
        iteration_s: Wall-clock seconds of the whole iteration.
        busy_s: Seconds in which each resource was used, owned or hidden.
    """

    owned_s: tuple[float, ...]
    iteration_s: float
    busy_s: tuple[float, ...] = (0.0,) * len(STAGES)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known beside the iterations.

    Attributes:
        warmup: Iterations that were left out before them.
        settled: Whether the script had settled by then.
        disturbed: Share of the time that others held the script up.
        stopped: Why there are no more of them.
        gpu_mem_gib: Peak GPU memory.
        detail: What else was measured; the rest is filled in.
    """

    warmup: int = 0
    settled: bool = True
    disturbed: float = 0.0
    stopped: str = ""
    gpu_mem_gib: float = 0.0
    detail: ProfileDetail = field(default_factory=ProfileDetail)


@dataclass(frozen=True, slots=True)
class Certain:
    """How sure the means of some iterations are.

    Attributes:
        half_width: The larger of the two 95 % half-widths, of the iteration and of the stage that takes most
            of it, as a share of the mean.
        confidence: The smaller of the probabilities that these means lie within the tolerance of the true ones.
    """

    half_width: float
    confidence: float


def samples_of(windows: Sequence[tuple[float, float]], intervals: Iterable[Interval]) -> list[IterationSample]:
    """Attribute the time of each iteration.

    Args:
        windows: Start and end of each iteration.
        intervals: Of the whole time, in any order.
    """
    waiting = sorted(intervals, key=lambda interval: interval.start_s)
    samples, going, position = [], list[Interval](), 0
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


def how_sure(samples: Sequence[IterationSample], disturbed: float = 0.0) -> Certain:
    """How sure the means of these iterations are; what others held them up for may be missing from all alike."""
    kept = _counted(samples)
    columns = [[sample.iteration_s for sample in kept]]
    stages = list(zip(*(sample.owned_s for sample in kept), strict=True))
    dominant = max(stages, key=sum)
    if sum(dominant) > 0:
        columns.append(list(dominant))
    sure = [certainty(column, disturbed) for column in columns]
    return Certain(max(one.half_width for one in sure), min(one.probability for one in sure))


def summarise(samples: Sequence[IterationSample], circumstances: Circumstances) -> DryRunResult:
    """The means of the iterations after the warm-up, with what says how far to trust them.

    A few iterations that something else held up do not count for the means (`steadiness.ordinary`); the 95th
    percentiles and the coefficients of variation are of all.

    Raises:
        ProfileError: There are no iterations, or one cannot be true.
    """
    if not samples:
        raise ProfileError("there are no iterations to measure after the warm-up")
    _refuse_impossible(samples)
    kept = _counted(samples)
    iteration_s = fmean(sample.iteration_s for sample in kept)
    owned = [fmean(column) for column in zip(*(sample.owned_s for sample in kept), strict=True)]
    busy = [fmean(column) for column in zip(*(sample.busy_s for sample in kept), strict=True)]
    load_s, preprocess_s, propagate_s, synchronize_s = owned
    confidence = how_sure(samples, circumstances.disturbed).confidence * (
        1.0 if circumstances.settled else UNSETTLED_FACTOR
    )
    stages = list(zip(*(sample.owned_s for sample in samples), strict=True))
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
            confidence=confidence,
            warmup_iterations=circumstances.warmup,
        ),
        stopped=circumstances.stopped,
    )


def _counted(samples: Sequence[IterationSample]) -> list[IterationSample]:
    return list(compress(samples, ordinary([sample.iteration_s for sample in samples])))


def _refuse_impossible(samples: Sequence[IterationSample]) -> None:
    for sample in samples:
        for stage, value in zip(STAGES, sample.owned_s, strict=True):
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
