"""A few iterations of a dry run under PyTorch's profiler, after those that are measured."""

import sys
import time
from typing import Any, Final

from muri.profiler.dryrun.attribution import USE_THRESHOLD
from muri.profiler.dryrun.operators import Operator, Span, stage_of
from muri.profiler.dryrun.result import DryRunResult

ITERATIONS: Final = 3
MOST_ITERATION_S: Final = 5.0
"""Scripts with longer iterations are not kept waiting for this."""

_ANCHOR: Final = "muri: anchor"
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
        with torch.profiler.record_function(_ANCHOR):
            self._anchor_s = time.perf_counter()

    def add(self, start_s: float, end_s: float) -> bool:
        """Take an iteration; returns whether it was the last."""
        self.windows.append((start_s, end_s))
        return len(self.windows) >= ITERATIONS

    def stop(self) -> list[Operator]:
        """End profiling and return what ran."""
        self._profiler.stop()
        events = list(self._profiler.profiler.kineto_results.events())
        anchor = next(event for event in events if event.name() == _ANCHOR)
        offset_s = self._anchor_s - anchor.start_ns() * _S_PER_NS
        return operators_of(events, offset_s, anchor.start_thread_id())


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
