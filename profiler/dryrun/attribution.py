"""Which resource owns the time, where a job uses several at once (Muri, section 4.2). Pure.

At each instant the resource with the highest normalized use owns the time; use below a threshold counts as none. The
thread that runs the training loop fully uses the resource of its innermost open stage, which wins over hidden work in
threads that prefetch or in workers. While it only waits, the hidden work owns the time, shared by resources in equal
use. `refine` corrects the marks of stages by a few iterations under PyTorch's profiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Tuple

from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.records import STAGES

USE_THRESHOLD: Final = 0.05
_EQUAL: Final = 1e-9
_LOAD, _PREPROCESS, _PROPAGATE, _SYNCHRONIZE = range(len(STAGES))
_COLLECTIVES: Final = ("gloo:", "nccl:", "c10d::")
_FETCHES: Final = "enumerate(DataLoader)"
HELD_UP: Final = 1.5
"""An iteration under the profiler that takes more than this many times the median does not count."""

Span = Tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A time in which one thread or process of a job used a resource."""

    stage: int  # Index into `STAGES` of the stage that stands for the resource
    start_s: float  # Begin, on the clock `time.perf_counter`
    end_s: float
    use: float = 1.0  # Share of the resource's peak, 0 to 1
    own: bool = False  # Whether the thread that runs the loop did it


@dataclass(frozen=True)
class Attribution:
    """Where the time of one window went, in the order of `STAGES`."""

    owned_s: tuple[float, ...]  # Seconds that each resource owned; together at most the window
    busy_s: tuple[float, ...]  # Seconds in which each was used, also while another one owned the time


def attribute(intervals: Iterable[Interval], start_s: float, end_s: float) -> Attribution:
    """Attribute the time of a window; intervals of all threads and processes count as far as they lie in it."""
    events: list[tuple[float, int, Interval]] = []
    for interval in intervals:
        begin_s, until_s = max(interval.start_s, start_s), min(interval.end_s, end_s)
        if begin_s < until_s:
            events += [(begin_s, 1, interval), (until_s, 0, interval)]
    events.sort(key=lambda event: event[:2])
    owned_s, busy_s = [0.0] * len(STAGES), [0.0] * len(STAGES)
    now_s = start_s
    own: list[Interval] = []
    hidden: list[Interval] = []
    for at_s, begins, interval in events:
        if at_s > now_s:
            use, owners = _use(own, hidden)
            for stage, share in enumerate(use):
                busy_s[stage] += at_s - now_s if share >= USE_THRESHOLD else 0.0
            for stage in owners:
                owned_s[stage] += (at_s - now_s) / len(owners)
            now_s = at_s
        group = own if interval.own else hidden
        if begins:
            group.append(interval)
        else:
            group.remove(interval)
    return Attribution(tuple(owned_s), tuple(busy_s))


def _use(own: list[Interval], hidden: list[Interval]) -> tuple[list[float], list[int]]:
    """Use of each resource by intervals under way, and the stages that own the time."""
    use = [0.0] * len(STAGES)
    for interval in hidden:
        use[interval.stage] = min(1.0, use[interval.stage] + interval.use)
    if own:
        innermost = max(own, key=lambda interval: interval.start_s).stage
        use[innermost] = 1.0
        return use, [innermost]
    highest = max(use)
    return use, [stage for stage, share in enumerate(use) if highest - share <= _EQUAL and highest >= USE_THRESHOLD]


@dataclass(frozen=True)
class Operator:
    """One event of a profiler's trace."""

    stage: int  # Index of the stage that stands for the resource it uses
    start_s: float  # Begin, on `time.perf_counter`
    end_s: float
    on_gpu: bool = False  # A kernel or a copy, not the host's part


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

    These iterations give only shares, since the profiler slows them down. A share of the iteration below the
    threshold of use stays where it is.
    """
    # A wait between two operators of a delayed iteration would make their shares small.
    middle_s = median([end_s - start_s for start_s, end_s in windows] or [0.0])
    windows = [(start_s, end_s) for start_s, end_s in windows if end_s - start_s <= HELD_UP * middle_s]
    whole_s = sum(end_s - start_s for start_s, end_s in windows)
    if whole_s <= 0:
        return result
    refined = [*holds, *_uncovered(holds, operators)]
    stage_s = list(result.stage_s)
    for stage, (before_s, after_s) in enumerate(zip(_owned(holds, windows), _owned(refined, windows))):
        share = (after_s - before_s) / whole_s
        if abs(share) >= USE_THRESHOLD:
            stage_s[stage] = max(0.0, stage_s[stage] + share * result.iteration_s)
    shrink = min(1.0, result.iteration_s / sum(stage_s)) if sum(stage_s) > 0 else 1.0
    load_s, preprocess_s, propagate_s, synchronize_s = (value * shrink for value in stage_s)
    owned = (load_s, preprocess_s, propagate_s, synchronize_s)
    busy = tuple(map(max, result.detail.busy_s or owned, owned))
    detail = replace(result.detail, busy_s=busy, gpu_utilization=_gpu_share(operators, windows, whole_s))
    return replace(result, stage_s=owned, detail=detail)


def without(spans: Iterable[Span], covers: Iterable[Span]) -> list[Span]:
    """The parts of spans that no cover lies over."""
    merged = union(covers)
    left: list[Span] = []
    for start_s, end_s in union(spans):
        rest_s = start_s
        for cover_start_s, cover_end_s in merged:
            if cover_end_s <= rest_s or cover_start_s >= end_s:
                continue
            if cover_start_s > rest_s:
                left.append((rest_s, cover_start_s))
            rest_s = cover_end_s
        if rest_s < end_s:
            left.append((rest_s, end_s))
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
    return [sum(column) for column in zip(*each)]


def _gpu_share(operators: Sequence[Operator], windows: Sequence[Span], whole_s: float) -> float | None:
    """Share of the time in which the GPU computed; None where there is none."""
    kernels = [Interval(_PROPAGATE, *span) for span in _spans(operators, _PROPAGATE, on_gpu=True)]
    return min(1.0, _owned(kernels, windows)[_PROPAGATE] / whole_s) if kernels else None
