"""What a script that runs alone measures: stage summary, trace and dry run, chosen by its environment."""

import atexit
import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muri.errors import UsageError
from muri.launcher.clock import IntervalListener, IterationListener, IterationRecord, StageClock
from muri.launcher.gpu.pace import FreePace
from muri.launcher.processes.gate import gate_from_environment
from muri.launcher.telemetry.trace import open_trace
from muri.profiler.records import STAGES

DRY_RUN_VARIABLE: Final = "MURI_DRY_RUN"
DRY_RUN_RESULT_VARIABLE: Final = "MURI_DRY_RUN_RESULT"
TIMING_VARIABLE: Final = "MURI_TIMING"
TRACE_VARIABLE: Final = "MURI_TRACE"
LEAST_ITERATIONS: Final = 3
"""A dry run that ends early still counts if it measured this many iterations."""

_GIB: Final = 1024**3


class DryRunError(UsageError):
    """The environment asks for a dry run that makes no sense."""


@dataclass(frozen=True, slots=True)
class DryRunRequest:
    """What to measure.

    Attributes:
        iterations: Iterations to run in all, warm-up included.
        warmup: First iterations that are not measured.
        result_path: Where the result goes.
    """

    iterations: int
    warmup: int
    result_path: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "DryRunRequest | None":
        """Read MURI_DRY_RUN and MURI_DRY_RUN_RESULT.

        Raises:
            DryRunError: One is malformed or the other is missing.
        """
        text = environment.get(DRY_RUN_VARIABLE)
        if not text:
            return None
        result = environment.get(DRY_RUN_RESULT_VARIABLE)
        if not result:
            raise DryRunError(f"{DRY_RUN_VARIABLE} is set but {DRY_RUN_RESULT_VARIABLE} does not say where to write")
        iterations, colon, warmup = text.partition(":")
        if not (colon and iterations.isdecimal() and warmup.isdecimal()):
            raise DryRunError(f"{DRY_RUN_VARIABLE}={text!r}: give iterations:warm-up, for example 30:10")
        if int(iterations) - int(warmup) < 1:
            raise DryRunError(f"{DRY_RUN_VARIABLE}={text!r}: there must be more iterations than warm-up")
        return cls(int(iterations), int(warmup), Path(result).absolute())


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether a script that runs alone is to be measured at all."""
    asked = (DRY_RUN_VARIABLE, TRACE_VARIABLE)
    return environment.get(TIMING_VARIABLE) == "1" or any(environment.get(name) for name in asked)


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


class DryRun:
    """Measures the first iterations of the script, writes the means and ends the script."""

    def __init__(self, request: DryRunRequest) -> None:
        self._request = request
        self._records: list[IterationRecord] = []
        self._done = False

    def add(self, record: IterationRecord) -> None:
        """Take one iteration; after the last one, write the result and end the script."""
        if self._done:  # the script swallowed the SystemExit below
            os._exit(0)
        self._records.append(record)
        if len(self._records) < self._request.iterations:
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

    def result(self) -> dict[str, object]:
        """The means after warm-up, or why there are none."""
        measured = self._records[self._request.warmup :]
        if len(measured) < min(LEAST_ITERATIONS, self._request.iterations - self._request.warmup):
            return {
                "error": f"the script ended after {len(self._records)} iterations, {len(measured)} of them after "
                f"the warm-up of {self._request.warmup}; at least {LEAST_ITERATIONS} are needed"
            }
        count = len(measured)
        means: dict[str, object] = {
            f"{name}_s": sum(record.stage_s[index] for record in measured) / count for index, name in enumerate(STAGES)
        }
        means["iteration_s"] = sum(record.iteration_s for record in measured) / count
        return means | {"gpu_mem_gib": peak_gpu_mem_gib(), "iterations": count}


def clock_from_environment(environment: Mapping[str, str]) -> StageClock:
    """The clock of a script that has its process for itself, with what its environment asks to be reported.

    Alone nothing is waited for; a member's own process asks the runtime that started it.
    """
    on_interval: IntervalListener | None = None
    on_iteration: IterationListener | None = None
    gate = gate_from_environment(environment)
    if gate is not None and gate.traced:
        on_interval = gate.interval
    elif environment.get(TRACE_VARIABLE):
        on_interval = _solo_trace(Path(environment[TRACE_VARIABLE]), environment)
    request = DryRunRequest.from_environment(environment)
    if request is not None and environment.get("RANK", "0") == "0":
        dry_run = DryRun(request)
        on_iteration = dry_run.add
        atexit.register(_finish_in, os.getpid(), dry_run)
    clock = StageClock(gate, on_interval=on_interval, on_iteration=on_iteration)
    if gate is None and not wanted(environment):
        clock.gpu = FreePace()
    if environment.get(TIMING_VARIABLE) == "1":
        atexit.register(lambda: print(summary(clock), file=sys.stderr))
    return clock


def summary(clock: StageClock) -> str:
    """One line per stage: total seconds, and milliseconds per iteration."""
    count = clock.iterations
    mean_s = clock.recent_iteration_s()
    head = f"muri: {count} iterations"
    lines = [head if mean_s is None else f"{head}, the last ones took {mean_s * 1e3:.1f} ms on average"]
    for name, total_s in zip(STAGES, clock.stage_s, strict=True):
        each = f"  {total_s / count * 1e3:9.1f} ms per iteration" if count else ""
        lines.append(f"muri:   {name:<12}{total_s:10.3f} s{each}")
    return "\n".join(lines)


def _finish_in(pid: int, dry_run: DryRun) -> None:
    if os.getpid() == pid:
        dry_run.finish()


def _solo_trace(path: Path, environment: Mapping[str, str]) -> IntervalListener:
    member = environment.get("SLURM_JOB_ID", "solo")
    trace = open_trace(path, f"job {member}", shared=False)
    atexit.register(trace.close)
    pending = 0

    def record(stage: int, start_s: float, end_s: float, wait_s: float) -> None:
        nonlocal pending
        trace.record(member, STAGES[stage], start_s, end_s, wait_s)
        pending += 1
        if pending % 100 == 0:
            trace.flush()

    return record
