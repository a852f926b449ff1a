"""What a script that runs alone measures: stage summary, trace and dry run, chosen by its environment."""

import atexit
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muri.launcher.clock import IntervalListener, IterationListener, IterationRecord, StageClock
from muri.launcher.gpu.pace import FreePace
from muri.launcher.processes.gate import gate_from_environment
from muri.launcher.telemetry.trace import open_trace
from muri.profiler.dryrun.request import DRY_RUN_VARIABLE, DryRunRequest
from muri.profiler.records import STAGES

TIMING_VARIABLE: Final = "MURI_TIMING"
TRACE_VARIABLE: Final = "MURI_TRACE"
LEAST_ITERATIONS: Final = 3
"""A dry run that ends early still counts if it measured this many iterations."""

_GIB: Final = 1024**3


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
        self._warmup = 10 if request.limits.fixed_warmup is None else request.limits.fixed_warmup
        self._records: list[IterationRecord] = []
        self._done = False

    def add(self, record: IterationRecord) -> None:
        """Take one iteration; after the last one, write the result and end the script."""
        if self._done:  # the script swallowed the SystemExit below
            os._exit(0)
        self._records.append(record)
        if len(self._records) < self._warmup + self._request.limits.iterations:
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
        measured = self._records[self._warmup :]
        if len(measured) < min(LEAST_ITERATIONS, self._request.limits.iterations):
            return {
                "error": f"the script ended after {len(self._records)} iterations, {len(measured)} of them after "
                f"the warm-up of {self._warmup}; at least {LEAST_ITERATIONS} are needed"
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
