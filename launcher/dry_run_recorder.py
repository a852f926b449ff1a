"""Measures the first iterations of a script from inside it, writes the result and ends the script."""

import os
import sys
import threading
import time
from typing import Any, Final

from muri.launcher.accumulation.declared import is_declared
from muri.launcher.clock import IterationRecord
from muri.launcher.gradients import GradientSize
from muri.launcher.operator_trace import OperatorTrace, worth_it
from muri.launcher.whole_files import write_whole
from muri.profiler.dryrun.attribution import refine
from muri.profiler.dryrun.course import Course, TooShortError
from muri.profiler.dryrun.messages import DryRunRequest, DryRunResult
from muri.profiler.records import ProfileDetail, ProfileError
from muri.profiler.resource_usage.host import Disturbance

PROGRESS_INTERVAL_S: Final = 1.0
_GIB: Final = 1024**3


def peak_gpu_mem_gib() -> float:
    """Peak GPU memory of this process in GiB, 0 without PyTorch or a GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0.0
    return float(sum(cuda.max_memory_allocated(device) for device in range(cuda.device_count())) / _GIB)


class DryRunRecorder:
    """One dry run, heard of through the clock's listeners.

    Args:
        request: What to measure.
    """

    def __init__(self, request: DryRunRequest) -> None:
        self._request = request
        self._course = Course(request.limits)
        self._gradients = GradientSize()
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
        if self._disturbance is None:
            self._disturbance = Disturbance()
        if not self._enough(now_s - record.iteration_s, now_s):
            self._tell(now_s)
            return
        self.finish()
        if threading.current_thread() is not threading.main_thread():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(0)

    def finish(self) -> None:
        """Write what was measured, once."""
        if not self._done:
            self._done = True
            write_whole(self._request.result_path, self.result())

    def result(self) -> dict[str, Any]:
        """The figures, or why there are none."""
        try:
            figures = self._figures or self._measured()
        except (TooShortError, ProfileError) as error:
            return {"error": str(error)}
        said = {"accumulates": True} if is_declared(os.environ) else {}
        return figures.to_dict() | {"steady_since_s": self._course.steady_since_s} | said

    def _enough(self, start_s: float, end_s: float) -> bool:
        if self._trace is not None:
            return self._trace.add(start_s, end_s) and self._refined(self._trace)
        return self._course.iteration(start_s, end_s) and not self._goes_on()

    def _measured(self) -> DryRunResult:
        disturbed = 0.0 if self._disturbance is None else self._disturbance.share()
        detail = ProfileDetail(gradient_mib=self._gradients.mib)
        return self._course.result(peak_gpu_mem_gib(), detail, disturbed)

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
            write_whole(self._request.progress_path, so_far)


def _leave_out_operators(error: Exception) -> None:
    print(f"muri: PyTorch's operators are left out of the dry run: {type(error).__name__}: {error}", file=sys.stderr)
