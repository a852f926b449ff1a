"""What a script that runs alone measures: stage summary, trace and dry run, chosen by its environment."""

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muri.launcher.clock import Gate, IntervalListener, StageClock
from muri.launcher.gpu.pace import FreePace
from muri.launcher.iteration_log import log_iterations
from muri.launcher.processes.gate import gate_from_environment
from muri.launcher.task import task_of
from muri.launcher.telemetry.trace import open_trace
from muri.profiler.dryrun.messages import DRY_RUN_VARIABLE, ITERATION_LOG_VARIABLE, DryRunRequest
from muri.profiler.records import STAGES

if TYPE_CHECKING:
    from muri.launcher.dry_run_recorder import DryRunRecorder

TIMING_VARIABLE: Final = "MURI_TIMING"
TRACE_VARIABLE: Final = "MURI_TRACE"


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether a script that runs alone is to be measured at all."""
    return measures_stages(environment) or bool(environment.get(ITERATION_LOG_VARIABLE))


def measures_stages(environment: Mapping[str, str]) -> bool:
    """Whether its stages are, so that each has to wait until the GPU is through."""
    asked = (DRY_RUN_VARIABLE, TRACE_VARIABLE)
    return environment.get(TIMING_VARIABLE) == "1" or any(environment.get(name) for name in asked)


def clock_from_environment(environment: Mapping[str, str]) -> StageClock:
    """The clock of a script that has its process for itself, with what its environment asks to be reported.

    Alone nothing is waited for, nor where members share plainly; else a member's own process asks the runtime that
    started it.
    """
    on_interval: IntervalListener | None = None
    gate = gate_from_environment(environment)
    if gate is not None and gate.traced:
        on_interval = gate.interval
    elif environment.get(TRACE_VARIABLE):
        on_interval = _solo_trace(Path(environment[TRACE_VARIABLE]), environment)
    request = DryRunRequest.from_environment(environment)
    if request is not None and task_of(environment)[0] == 0:
        clock = _measured(request, gate, on_interval)
    else:
        clock = StageClock(gate, on_interval=on_interval)
    if (gate is None or not gate.takes_turns) and not measures_stages(environment):
        clock.gpu = FreePace()
    log_iterations(clock, environment)
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


def _measured(request: DryRunRequest, gate: Gate | None, on_interval: IntervalListener | None) -> StageClock:
    """A clock that a dry run listens to."""
    from muri.launcher.dry_run_recorder import DryRunRecorder  # (only when needed)

    recorder = DryRunRecorder(request)
    atexit.register(_finish_in, os.getpid(), recorder)
    clock = StageClock(gate, on_interval=on_interval, on_iteration=recorder.add)
    clock.on_hold = recorder.hold
    clock.on_ahead = recorder.works_ahead
    return clock


def _finish_in(pid: int, recorder: "DryRunRecorder") -> None:
    if os.getpid() == pid:
        recorder.finish()


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
