"""What PyTorch's profiler adds to the stage marks: which part of a stage, or of no stage, used what. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from muri.profiler.dryrun.attribution import USE_THRESHOLD, Interval, attribute
from muri.profiler.dryrun.result import DryRunResult
from muri.profiler.records import STAGES

_LOAD, _PREPROCESS, _PROPAGATE, _SYNCHRONIZE = range(len(STAGES))
_COLLECTIVES: Final = ("gloo:", "nccl:", "c10d::")
_FETCHES: Final = "enumerate(DataLoader)"

HELD_UP: Final = 1.5
"""An iteration under the profiler that takes more than so many times the median does not count."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Operator:
    """One event of a profiler's trace.

    Attributes:
        stage: Index of the stage that stands for the resource it uses.
        start_s: Begin, on `time.perf_counter`.
        end_s: End.
        on_gpu: A kernel or a copy, not the host's part.
    """

    stage: int
    start_s: float
    end_s: float
    on_gpu: bool = False


def stage_of(name: str, *, on_gpu: bool) -> int | None:
    """The stage of an event by its name; None for marks that use nothing themselves."""
    if on_gpu:
        return _SYNCHRONIZE if "nccl" in name.lower() else _PROPAGATE
    if name.startswith(_COLLECTIVES):
        return _SYNCHRONIZE
    if name.startswith(_FETCHES):
        return _LOAD
    return _PREPROCESS if name.startswith("aten::") else None


def refine(
    result: DryRunResult, windows: Sequence[Span], holds: Sequence[Interval], operators: Sequence[Operator]
) -> DryRunResult:
    """Move time between stages where the operators of a few iterations show that it belongs elsewhere.

    Only shares are taken from these iterations: the profiler slows them down. A share of the iteration below the
    threshold of use is left where it is.

    Args:
        result: From iterations without the profiler.
        windows: The iterations with it; those that took far longer than the others do not count.
        holds: What the clock heard of meanwhile.
        operators: Of the loop's thread, and of the GPU.
    """
    windows = _undisturbed(windows)
    whole_s = sum(end_s - start_s for start_s, end_s in windows)
    if whole_s <= 0:
        return result
    refined = [*holds, *_uncovered(holds, operators)]
    stage_s = list(result.stage_s)
    for stage, (before_s, after_s) in enumerate(zip(_owned(holds, windows), _owned(refined, windows), strict=True)):
        share = (after_s - before_s) / whole_s
        if abs(share) >= USE_THRESHOLD:
            stage_s[stage] = max(0.0, stage_s[stage] + share * result.iteration_s)
    shrink = min(1.0, result.iteration_s / sum(stage_s)) if sum(stage_s) > 0 else 1.0
    load_s, preprocess_s, propagate_s, synchronize_s = (value * shrink for value in stage_s)
    owned = (load_s, preprocess_s, propagate_s, synchronize_s)
    busy = tuple(map(max, result.detail.busy_s or owned, owned))
    detail = replace(result.detail, busy_s=busy, gpu_utilisation=_gpu_share(operators, windows, whole_s))
    return replace(result, stage_s=owned, detail=detail)


def _undisturbed(windows: Sequence[Span]) -> list[Span]:
    """Leave out iterations that something held up: a wait between two operators would make their shares small."""
    if not windows:
        return []
    middle_s = median(end_s - start_s for start_s, end_s in windows)
    return [(start_s, end_s) for start_s, end_s in windows if end_s - start_s <= HELD_UP * middle_s]


def without(spans: Iterable[Span], covers: Iterable[Span]) -> list[Span]:
    """The parts of spans that no cover lies over."""
    merged = union(covers)
    left: list[Span] = []
    for start_s, end_s in union(spans):
        for cover_start_s, cover_end_s in merged:
            if cover_end_s <= start_s or cover_start_s >= end_s:
                continue
            if cover_start_s > start_s:
                left.append((start_s, cover_start_s))
            start_s = cover_end_s  # noqa: PLW2901 (what is left of the span)
        if start_s < end_s:
            left.append((start_s, end_s))
    return left


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that don't overlap, in order."""
    merged: list[Span] = []
    for start_s, end_s in sorted(spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((start_s, end_s))
    return merged


def _uncovered(holds: Sequence[Interval], operators: Sequence[Operator]) -> list[Interval]:
    """What operators add to the holds: host work outside of stages, and collectives while the GPU does nothing else."""
    own = [(hold.start_s, hold.end_s) for hold in holds if hold.own]
    elsewhere = [(hold.start_s, hold.end_s) for hold in holds if hold.own and hold.stage != _PROPAGATE]
    computing = _spans(operators, _PROPAGATE, on_gpu=True)
    found = [(_SYNCHRONIZE, without(_spans(operators, _SYNCHRONIZE, on_gpu=True), [*computing, *elsewhere]))]
    # A later begin wins, so that a fetch owns what the operators within it leave.
    found += [
        (stage, without(_spans(operators, stage, on_gpu=False), own)) for stage in (_LOAD, _PREPROCESS, _SYNCHRONIZE)
    ]
    return [Interval(stage, *span, own=True) for stage, spans in found for span in spans]


def _spans(operators: Sequence[Operator], stage: int, *, on_gpu: bool) -> list[Span]:
    return [(one.start_s, one.end_s) for one in operators if one.stage == stage and one.on_gpu == on_gpu]


def _owned(intervals: Sequence[Interval], windows: Sequence[Span]) -> list[float]:
    each = [attribute(intervals, *window).owned_s for window in windows]
    return [sum(column) for column in zip(*each, strict=True)]


def _gpu_share(operators: Sequence[Operator], windows: Sequence[Span], whole_s: float) -> float | None:
    """Share of the time in which the GPU computed; None where there is none."""
    kernels = [Interval(_PROPAGATE, *span) for span in _spans(operators, _PROPAGATE, on_gpu=True)]
    return min(1.0, _owned(kernels, windows)[_PROPAGATE] / whole_s) if kernels else None
