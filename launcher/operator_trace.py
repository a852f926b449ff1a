"""A few iterations of a dry run under PyTorch's profiler, after those that are measured."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from muri.profiler.dryrun.attribution import USE_THRESHOLD, Operator, Span, stage_of
from muri.profiler.dryrun.messages import DryRunResult

ITERATIONS: Final = 5
MOST_ITERATION_S: Final = 3.0
"""Scripts with longer iterations are not kept waiting for this."""

_ANCHOR: Final = "muri: anchor"
_ANCHORS: Final = 8
_S_PER_NS: Final = 1e-9


def worth_it(result: DryRunResult) -> bool:
    """Whether operators can tell more than the stage marks did."""
    torch = sys.modules.get("torch")
    if torch is None or result.iteration_s > MOST_ITERATION_S:
        return False
    unowned_s = result.iteration_s - sum(result.stage_s)
    return bool(torch.cuda.is_initialized()) or unowned_s >= USE_THRESHOLD * result.iteration_s


class OperatorTrace:
    """The profiler, from its start to its end in the thread that runs the loop.

    Attributes:
        windows: Start and end of each iteration under the profiler.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        self.windows: list[Span] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: Any = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._anchors = [_anchor(torch) for _ in range(_ANCHORS)]

    def add(self, start_s: float, end_s: float) -> bool:
        """Take an iteration; returns whether it was the last."""
        self.windows.append((start_s, end_s))
        return len(self.windows) >= ITERATIONS

    def stop(self) -> list[Operator]:
        """End profiling and return what ran."""
        self._profiler.stop()
        events = list(self._profiler.profiler.kineto_results.events())
        marks = sorted((event for event in events if event.name() == _ANCHOR), key=lambda event: event.start_ns())
        offset_s = clock_offset_s(self._anchors, [mark.start_ns() * _S_PER_NS for mark in marks])
        return operators_of(events, offset_s, marks[0].start_thread_id())


def clock_offset_s(anchors: Sequence[Span], marks_s: Sequence[float]) -> float:
    """What is added to the profiler's times to get to `time.perf_counter`.

    The first mark of a process takes long, and a busy machine may hold any of them up; so the shortest anchor counts.

    Args:
        anchors: Times just before and after each mark, on `time.perf_counter`.
        marks_s: When the profiler says that each began, in the same order.
    """
    (before_s, after_s), mark_s = min(zip(anchors, marks_s, strict=True), key=lambda pair: pair[0][1] - pair[0][0])
    return (before_s + after_s) / 2 - mark_s


def _anchor(torch: Any) -> Span:
    """Leave a mark in the trace, and say between which times."""
    before_s = time.perf_counter()
    with torch.profiler.record_function(_ANCHOR):
        return before_s, time.perf_counter()


def operators_of(events: list[Any], offset_s: float, thread: int) -> list[Operator]:
    """The events that use a resource.

    Args:
        events: As Kineto has them.
        offset_s: What is added to their times to get to `time.perf_counter`.
        thread: Number of the thread that runs the loop; what others do has marks of its own.
    """
    on_host = {event.name() for event in events if event.device_type().name == "CPU"}
    found = []
    for event in events:
        on_gpu = event.device_type().name != "CPU"
        if (event.name() in on_host) if on_gpu else (event.start_thread_id() != thread):
            continue  # on the GPU: the shadow of a mark
        stage = stage_of(event.name(), on_gpu=on_gpu)
        if stage is not None:
            start_s = event.start_ns() * _S_PER_NS + offset_s
            found.append(Operator(stage, start_s, start_s + event.duration_ns() * _S_PER_NS, on_gpu))
    return found
