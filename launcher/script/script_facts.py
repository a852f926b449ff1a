"""Measurements in the script's own process: the first iterations of a dry run, and a member's facts for its runtime.

A dry run writes its result and ends the script. A few more iterations run under PyTorch's profiler where its operators
can tell more than the stage marks. A member is measured while it trains: the runtime sees stages and waits of each
iteration, and only the process knows its GPU memory, the size of its gradients, how its loader works ahead, and dangers
to threads.
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

from muri.clock import GIB, MIB
from muri.files import PRIVATE_FILE, atomic_json
from muri.launcher.job.environment import AGENT_VARIABLE, leaves_steps_to_scheduler
from muri.launcher.job.script import after_import
from muri.launcher.job.stage_clock import IterationRecord, StageClock
from muri.launcher.threads import DangerWatch, danger_watch
from muri.profiler.dryrun.attribution import USE_THRESHOLD, Operator, Span, refine, stage_of
from muri.profiler.dryrun.course import Course, Disturbance, TooShortError
from muri.profiler.dryrun.messages import READS, DryRunRequest, DryRunResult
from muri.profiler.dryrun.steadiness import LoaderAhead
from muri.profiler.records import ProfileDetail, ProfileError

PROGRESS_INTERVAL_S: Final = 1.0

STEPS: Final = 3
"""Number of an optimizer's steps to inspect; in the first one some parameters may have no gradient yet."""

ITERATIONS: Final = 5
MOST_ITERATION_S: Final = 3.0
"""Iterations longer than this are not profiled, because they would prolong the dry run."""

_ANCHOR: Final = "muri: anchor"
_ANCHORS: Final = 8


def gpu_mem_gib(counter: str) -> float:
    """Return the sum of a counter of `torch.cuda` over the GPUs, in GiB; 0 without PyTorch or a GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0.0
    return float(sum(getattr(cuda, counter)(device) for device in range(cuda.device_count())) / GIB)


def dangers_of(watch: DangerWatch | None) -> tuple[str, ...] | None:
    """Return the dangers that a watch has found; None without one, or if it fails."""
    try:
        return None if watch is None else watch.found()
    except Exception as error:
        print(f"muri: dangers to threads are not looked for: {type(error).__name__}: {error}", file=sys.stderr)
        return None


class GradientSize:
    """Listens to the first steps of all optimizers of the process, from PyTorch's import on."""

    def __init__(self) -> None:
        self._bytes: dict[int, list[int]] = {}  # of each optimizer, at its first steps
        after_import("torch", self._listen)

    @property
    def mib(self) -> float | None:
        """Size of all gradients of an iteration; None when no optimizer stepped."""
        return sum(max(sizes, default=0) for sizes in self._bytes.values()) / MIB if self._bytes else None

    def _listen(self, _torch: ModuleType) -> None:
        try:
            from torch.optim.optimizer import register_optimizer_step_post_hook  # (once it is there; since 2.0)

            register_optimizer_step_post_hook(self._stepped)
        except Exception as error:
            print(f"muri: the size of the gradients is not measured: {error}", file=sys.stderr)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        sizes = self._bytes.setdefault(id(optimizer), [])
        if len(sizes) == STEPS:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sizes.append(sum(gradient.numel() * gradient.element_size() for gradient in gradients))


class OperatorTrace:
    """The profiler, from its start to its end in the thread that runs the loop."""

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        self.windows: list[Span] = []  # start and end of each iteration under the profiler
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
        marks = [event for event in events if event.name() == _ANCHOR]
        offset_s = clock_offset_s(self._anchors, sorted(_seconds(mark, "start") for mark in marks))
        return operators_of(events, offset_s, marks[0].start_thread_id())


def worth_it(result: DryRunResult) -> bool:
    """Whether operators can tell more than the stage marks did."""
    torch = sys.modules.get("torch")
    if torch is None or result.iteration_s > MOST_ITERATION_S:
        return False
    unowned_s = result.iteration_s - sum(result.stage_s)
    return bool(torch.cuda.is_initialized()) or unowned_s >= USE_THRESHOLD * result.iteration_s


def clock_offset_s(anchors: Sequence[Span], marks_s: Sequence[float]) -> float:
    """Return the seconds to add to the profiler's times to get to `time.perf_counter`.

    The first mark of a process takes long, and a busy machine may hold any of them up; so the shortest anchor counts.
    `anchors` are the times just before and after each mark, `marks_s` its begin by the profiler, in the same order.
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
    """Return those of Kineto's events that use a resource.

    `offset_s` seconds are added to their times to get to `time.perf_counter`. `thread` is the number of the thread that
    runs the loop; work of others has marks of its own.
    """
    on_host = {event.name() for event in events if event.device_type().name == "CPU"}
    operators = []
    for event in events:
        on_gpu = event.device_type().name != "CPU"
        if (event.name() in on_host) if on_gpu else (event.start_thread_id() != thread):
            continue  # on the GPU: the shadow of a mark
        stage = stage_of(event.name(), on_gpu=on_gpu)
        if stage is not None:
            start_s = _seconds(event, "start") + offset_s
            operators.append(Operator(stage, start_s, start_s + _seconds(event, "duration"), on_gpu))
    return operators


def _seconds(event: Any, name: str) -> float:
    """The "start" or "duration" of an event, on the profiler's clock; before PyTorch 2.4 it told microseconds."""
    exact = getattr(event, f"{name}_ns", None)
    return float(exact() * 1e-9 if exact is not None else getattr(event, f"{name}_us")() * 1e-6)


class DryRunRecorder:
    """One dry run, fed by the clock's listeners."""

    def __init__(self, request: DryRunRequest) -> None:
        from muri.launcher.script.dataset_cache import known_reads  # loads much, which only a dry run needs

        self._request = request
        self._course = Course(request.limits)
        self._gradients = GradientSize()
        self._dangers = danger_watch()
        self._disturbance: Disturbance | None = None
        self._figures: DryRunResult | None = None
        self._trace: OperatorTrace | None = None
        self._progress_s = 0.0
        self._done = False
        self._reads = known_reads
        self.hold = self._course.hold
        self.works_ahead = self._course.works_ahead

    def add(self, record: IterationRecord) -> None:
        """Take one iteration; after the last one, write the result and end the script."""
        if self._done:  # the script swallowed the SystemExit below
            os._exit(0)
        now_s = time.perf_counter()
        for reads in list(self._reads):
            reads.iteration_ended()
        if self._disturbance is None:
            self._disturbance = Disturbance()
            if self._dangers is not None:
                self._dangers.watch_lock()
        if not self._enough(now_s - record.iteration_s, now_s):
            if now_s - self._progress_s >= PROGRESS_INTERVAL_S:
                self._progress_s = now_s
                so_far = {"iterations": len(self._course.windows), "measured": self._course.measured}
                atomic_json(self._request.progress_path, so_far, PRIVATE_FILE)
            return
        self.finish()
        if os.environ.get(AGENT_VARIABLE) == str(os.getppid()):
            os.kill(os.getppid(), signal.SIGTERM)  # torchrun: the other ranks would wait for this one's collectives
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
        more: dict[str, Any] = {"accumulates": True} if leaves_steps_to_scheduler.is_set() else {}
        most_read = max(self._reads, key=lambda reads: reads.items, default=None)
        if most_read is not None and (reads := most_read.figures()) is not None:
            more[READS] = reads
        return {**figures.to_dict(), "steady_since_s": self._course.steady_since_s, **more}

    def _enough(self, start_s: float, end_s: float) -> bool:
        """Take an iteration; at the first end a few more may follow under PyTorch's profiler."""
        trace = self._trace
        if not (self._course.iteration if trace is None else trace.add)(start_s, end_s):
            return False
        try:
            if trace is None and self._request.limits.fixed_warmup is None:
                self._figures = self._measured()
                self._trace = OperatorTrace() if worth_it(self._figures) else None
            elif trace is not None and self._figures is not None:
                operators = trace.stop()
                self._figures = refine(self._figures, trace.windows, self._course.intervals, operators)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"muri: PyTorch's operators are left out of the dry run: {reason}", file=sys.stderr)
        return trace is not None or self._trace is None

    def _measured(self) -> DryRunResult:
        disturbed = 0.0 if self._disturbance is None else self._disturbance.share()
        detail = ProfileDetail(gradient_mib=self._gradients.mib, dangers=dangers_of(self._dangers))
        return self._course.result(gpu_mem_gib("max_memory_allocated"), detail, disturbed)


TOLD_AT: Final = (12, 48)
"""Iterations after which the facts are told: before anything can be sure, and again once memory has grown."""

LEAST_S: Final = 1.0
"""Not earlier after the first iteration: the interpreter's lock has to be looked at for a while."""


class ScriptFacts:
    """Tells the runtime the facts of the script to which a clock belongs, and then listens no more."""

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
        facts = {
            "gpu_mem_gib": gpu_mem_gib("max_memory_reserved"),
            "gradient_mib": self._gradients.mib,
            "dangers": dangers_of(self._dangers),
            "depth": self._ahead.depth,
            "period": self._ahead.period,
            "accumulates": leaves_steps_to_scheduler.is_set(),
        }
        self._tell(facts)
        if not self._due:
            self._clock.at_boundary.remove(self._look)
