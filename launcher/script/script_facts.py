"""What the script's own process measures: the first iterations of a dry run, and facts that a member tells its runtime.

A dry run writes its result and ends the script. A few more iterations run under PyTorch's profiler where its operators
can tell more than the stage marks.

A member is measured while it trains. The runtime sees stages and waits of each iteration. Only the process knows its
GPU memory, the size of its gradients, how its loader works ahead, and what it did that threads could not keep apart.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Callable, Final

from muri.files import PRIVATE_FILE, atomic_json
from muri.launcher.job.environment import AGENT_VARIABLE, is_declared
from muri.launcher.job.script import after_import
from muri.launcher.job.stage_clock import IterationRecord, StageClock
from muri.launcher.script.dataset_cache import iteration_ended, reads_found
from muri.launcher.threads import danger_watch
from muri.profiler.dryrun.attribution import USE_THRESHOLD, Operator, Span, refine, stage_of
from muri.profiler.dryrun.course import Course, TooShortError
from muri.profiler.dryrun.disturbance import Disturbance
from muri.profiler.dryrun.messages import READS, DryRunRequest, DryRunResult
from muri.profiler.dryrun.steadiness import LoaderAhead
from muri.profiler.records import ProfileDetail, ProfileError
from muri.units import GIB, MIB

PROGRESS_INTERVAL_S: Final = 1.0

STEPS: Final = 3
"""Number of an optimizer's steps to inspect; in the first one some parameters may have no gradient yet."""

ITERATIONS: Final = 5
MOST_ITERATION_S: Final = 3.0
"""Iterations longer than this are not profiled, because they would prolong the dry run."""

_ANCHOR: Final = "muri: anchor"
_ANCHORS: Final = 8
_S_PER_NS: Final = 1e-9
_S_PER_US: Final = 1e-6


def peak_gpu_mem_gib() -> float:
    """Peak GPU memory of this process in GiB, 0 without PyTorch or a GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0.0
    return float(sum(cuda.max_memory_allocated(device) for device in range(cuda.device_count())) / GIB)


class GradientSize:
    """Listens to the first steps of all optimizers of the process, from PyTorch's import on."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        after_import("torch", self._listen)

    @property
    def mib(self) -> float | None:
        """Size of all gradients of an iteration; None when no optimizer stepped."""
        return sum(self._bytes.values()) / MIB if self._bytes else None

    def _listen(self, _torch: ModuleType) -> None:
        try:
            from torch.optim.optimizer import register_optimizer_step_post_hook  # (once it is there; since 2.0)

            register_optimizer_step_post_hook(self._stepped)
        except Exception as error:
            print(f"muri: the size of the gradients is not measured: {error}", file=sys.stderr)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        key = id(optimizer)
        steps = self._steps[key] = self._steps.get(key, 0) + 1
        if steps > STEPS:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        size = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
        self._bytes[key] = max(size, self._bytes.get(key, 0))


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
        marks = sorted((event for event in events if event.name() == _ANCHOR), key=_start_s)
        offset_s = clock_offset_s(self._anchors, [_start_s(mark) for mark in marks])
        return operators_of(events, offset_s, marks[0].start_thread_id())


def worth_it(result: DryRunResult) -> bool:
    """Whether operators can tell more than the stage marks did."""
    torch = sys.modules.get("torch")
    if torch is None or result.iteration_s > MOST_ITERATION_S:
        return False
    unowned_s = result.iteration_s - sum(result.stage_s)
    return bool(torch.cuda.is_initialized()) or unowned_s >= USE_THRESHOLD * result.iteration_s


def clock_offset_s(anchors: Sequence[Span], marks_s: Sequence[float]) -> float:
    """Seconds added to the profiler's times to get to `time.perf_counter`.

    The first mark of a process takes long, and a busy machine may hold any of them up; so the shortest anchor counts.

    Args:
        anchors: Times just before and after each mark, on `time.perf_counter`.
        marks_s: When the profiler says that each began, in the same order.
    """
    if len(anchors) != len(marks_s):
        raise ValueError(f"{len(anchors)} marks were made and {len(marks_s)} found")
    (before_s, after_s), mark_s = min(zip(anchors, marks_s), key=lambda pair: pair[0][1] - pair[0][0])
    return (before_s + after_s) / 2 - mark_s


def _anchor(torch: Any) -> Span:
    """Leave a mark in the trace; return the times just before and after it."""
    before_s = time.perf_counter()
    with torch.profiler.record_function(_ANCHOR):
        return before_s, time.perf_counter()


def operators_of(events: list[Any], offset_s: float, thread: int) -> list[Operator]:
    """The events that use a resource.

    Args:
        events: As Kineto has them.
        offset_s: Seconds added to their times to get to `time.perf_counter`.
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
            start_s = _start_s(event) + offset_s
            found.append(Operator(stage, start_s, start_s + _duration_s(event), on_gpu))
    return found


def _start_s(event: Any) -> float:
    """When an event began, on the profiler's clock; before PyTorch 2.4 it told microseconds."""
    return float(event.start_ns() * _S_PER_NS if hasattr(event, "start_ns") else event.start_us() * _S_PER_US)


def _duration_s(event: Any) -> float:
    return float(event.duration_ns() * _S_PER_NS if hasattr(event, "duration_ns") else event.duration_us() * _S_PER_US)


class DryRunRecorder:
    """One dry run, fed by the clock's listeners.

    Args:
        request: What to measure.
    """

    def __init__(self, request: DryRunRequest) -> None:
        self._request = request
        self._course = Course(request.limits)
        self._gradients = GradientSize()
        self._dangers = danger_watch()
        self._disturbance: Disturbance | None = None
        self._figures: DryRunResult | None = None
        self._trace: OperatorTrace | None = None
        self._told_s = 0.0
        self._done = False
        self.hold = self._course.hold
        self.works_ahead = self._course.works_ahead

    def add(self, record: IterationRecord) -> None:
        """Take one iteration; after the last one, write the result and end the script."""
        if self._done:  # the script swallowed the SystemExit below
            os._exit(0)
        now_s = time.perf_counter()
        iteration_ended()
        if self._disturbance is None:
            self._disturbance = Disturbance()
            if self._dangers is not None:
                self._dangers.watch_lock()
        if not self._enough(now_s - record.iteration_s, now_s):
            self._tell(now_s)
            return
        self.finish()
        _end_other_ranks()
        if threading.current_thread() is not threading.main_thread():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(0)

    def finish(self) -> None:
        """Write what was measured, once."""
        if not self._done:
            self._done = True
            atomic_json(self._request.result_path, self.result(), PRIVATE_FILE)

    def result(self) -> dict[str, Any]:
        """The figures, or why there are none."""
        try:
            figures = self._figures or self._measured()
        except (TooShortError, ProfileError) as error:
            return {"error": str(error)}
        said: dict[str, Any] = {"accumulates": True} if is_declared() else {}
        reads = reads_found()
        if reads is not None:
            said[READS] = reads
        return {**figures.to_dict(), "steady_since_s": self._course.steady_since_s, **said}

    def _enough(self, start_s: float, end_s: float) -> bool:
        if self._trace is not None:
            return self._trace.add(start_s, end_s) and self._refined(self._trace)
        return self._course.iteration(start_s, end_s) and not self._goes_on()

    def _measured(self) -> DryRunResult:
        disturbed = 0.0 if self._disturbance is None else self._disturbance.share()
        detail = ProfileDetail(gradient_mib=self._gradients.mib, dangers=self._found_dangers())
        return self._course.result(peak_gpu_mem_gib(), detail, disturbed)

    def _found_dangers(self) -> tuple[str, ...] | None:
        try:
            return None if self._dangers is None else self._dangers.found()
        except Exception as error:
            print(f"muri: dangers to threads are not looked for: {type(error).__name__}: {error}", file=sys.stderr)
            return None

    def _goes_on(self) -> bool:
        """Whether a few more iterations run under PyTorch's profiler."""
        if self._request.limits.fixed_warmup is not None:
            return False
        try:
            self._figures = self._measured()
            if worth_it(self._figures):
                self._trace = OperatorTrace()
        except Exception as error:
            _leave_out_operators(error)
        return self._trace is not None

    def _refined(self, trace: OperatorTrace) -> bool:
        try:
            if self._figures is not None:
                operators = trace.stop()
                self._figures = refine(self._figures, trace.windows, self._course.intervals, operators)
        except Exception as error:
            _leave_out_operators(error)
        return True

    def _tell(self, now_s: float) -> None:
        if now_s - self._told_s >= PROGRESS_INTERVAL_S:
            self._told_s = now_s
            so_far = {"iterations": len(self._course.windows), "measured": self._course.measured}
            atomic_json(self._request.progress_path, so_far, PRIVATE_FILE)


def _end_other_ranks() -> None:
    """End torchrun, if it has started this process: the other ranks would wait for this one's collectives."""
    if os.environ.get(AGENT_VARIABLE) == str(os.getppid()):
        os.kill(os.getppid(), signal.SIGTERM)


def _leave_out_operators(error: Exception) -> None:
    print(f"muri: PyTorch's operators are left out of the dry run: {type(error).__name__}: {error}", file=sys.stderr)


TOLD_AT: Final = (12, 48)
"""Iterations after which the facts are told: before anything can be sure, and again once memory has grown."""

LEAST_S: Final = 1.0
"""Not earlier after the first iteration: the interpreter's lock has to be looked at for a while."""


def reserved_gpu_mem_gib() -> float:
    """Most GPU memory in GiB that PyTorch's allocator has taken in this process; 0 without PyTorch or a GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0.0
    return float(sum(cuda.max_memory_reserved(device) for device in range(cuda.device_count())) / GIB)


class ScriptFacts:
    """Tells the facts of the script to which a clock belongs, and then listens no more.

    Args:
        clock: The script's.
        tell: Takes them to the runtime.
    """

    def __init__(self, clock: StageClock, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._ahead = LoaderAhead()
        self._begun_s: float | None = None
        self._due = list(TOLD_AT)
        self._gradients = GradientSize()
        self._dangers = danger_watch()
        clock.on_prefetch_depth = self._works_ahead
        clock.at_boundary.append(self._look)

    def facts(self) -> dict[str, Any]:
        """All that is known by now, as plain JSON values."""
        return {
            "gpu_mem_gib": reserved_gpu_mem_gib(),
            "gradient_mib": self._gradients.mib,
            "dangers": self._found_dangers(),
            "depth": self._ahead.depth,
            "period": self._ahead.period,
            "accumulates": is_declared(),
        }

    def _works_ahead(self, depth: int, period: int) -> None:
        self._ahead = self._ahead.widened(LoaderAhead(depth, period))

    def _look(self) -> None:
        now_s = self._clock.now()
        if self._begun_s is None:
            self._begun_s = now_s
            if self._dangers is not None:
                self._dangers.watch_lock()
        if self._clock.iterations < self._due[0] or now_s - self._begun_s < LEAST_S:
            return
        self._due.pop(0)
        self._tell(self.facts())
        if not self._due:
            self._clock.at_boundary.remove(self._look)

    def _found_dangers(self) -> list[str] | None:
        try:
            return None if self._dangers is None else list(self._dangers.found())
        except Exception as error:
            print(f"muri: dangers to threads are not looked for: {type(error).__name__}: {error}", file=sys.stderr)
            return None
