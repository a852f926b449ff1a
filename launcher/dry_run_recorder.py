"""Measures the first iterations of a script from inside it, writes the result and ends the script."""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from muri.launcher.clock import IterationRecord
from muri.launcher.gradients import GradientSize
from muri.profiler.dryrun.contention import CoreMeter
from muri.profiler.dryrun.course import Course, TooShortError
from muri.profiler.dryrun.request import DryRunRequest
from muri.profiler.records import ProfileDetail, ProfileError

PROGRESS_INTERVAL_S: Final = 1.0
_GIB: Final = 1024**3


def write_result(path: Path, result: Mapping[str, object]) -> None:
    """Write a result so that a reader sees all of it or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result) + "\n", encoding="utf-8")
    temporary.replace(path)


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
        self._cores: CoreMeter | None = None
        self._told_s = 0.0
        self._done = False
        self.hold = self._course.hold

    def add(self, record: IterationRecord) -> None:
        """Take one iteration; after the last one, write the result and end the script."""
        if self._done:  # the script swallowed the SystemExit below
            os._exit(0)
        now_s = time.perf_counter()
        if self._cores is None:
            self._cores = CoreMeter()
        if not self._course.iteration(now_s - record.iteration_s, now_s):
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
            write_result(self._request.result_path, self.result())

    def result(self) -> dict[str, Any]:
        """The figures, or why there are none."""
        detail = ProfileDetail(gradient_mib=self._gradients.mib)
        try:
            figures = self._course.result(peak_gpu_mem_gib(), detail).to_dict()
        except (TooShortError, ProfileError) as error:
            return {"error": str(error)}
        cores = self._cores or CoreMeter()
        about = {"steady_since_s": self._course.steady_since_s, "busy_cores": cores.busy(), "core_count": cores.count}
        return figures | about

    def _tell(self, now_s: float) -> None:
        if now_s - self._told_s >= PROGRESS_INTERVAL_S:
            self._told_s = now_s
            so_far = {"iterations": len(self._course.windows), "measured": self._course.measured}
            write_result(self._request.progress_path, so_far)
