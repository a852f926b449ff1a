"""Finds the stage clock of the calling script, and makes that of a script that runs alone.

A script alone is measured as its environment asks: a summary of its stages, a trace, a dry run, a log of iterations.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from muri.launcher.job.environment import task_of
from muri.launcher.job.stage_clock import STAGE_COUNT, Gate, HostPace, IntervalListener, StageClock
from muri.launcher.process_gate import gate_from_environment
from muri.launcher.script.trace import Trace
from muri.profiler.dryrun.messages import DRY_RUN_VARIABLE, ITERATION_LOG_VARIABLE, DryRunRequest
from muri.profiler.records import STAGES, UNEXPLAINED_SHARE, UNMARKED, WAITS_UNSEEN
from muri.text import counted

TIMING_VARIABLE: Final = "MURI_TIMING"
TRACE_VARIABLE: Final = "MURI_TRACE"

_NOTICED_S: Final = 0.001
"""Less hidden time than this is not worth a word."""


class _Provider:
    """Finds the clock of the script that is calling."""

    def __init__(self) -> None:
        self.current: Callable[[], StageClock] = self.solo
        self._solo: StageClock | None = None
        self._making = threading.Lock()

    def solo(self) -> StageClock:
        """The one clock of a process that runs one script."""
        if self._solo is None:
            with self._making:  # two threads may mark their first stage at once
                if self._solo is None:
                    self._solo = clock_from_environment(os.environ)
        return self._solo

    def detach(self) -> None:
        """In a forked child: measure only for itself, and wait for no resource."""
        self._solo = StageClock()
        self.current = self.solo


_provider = _Provider()
os.register_at_fork(after_in_child=_provider.detach)


def current_clock() -> StageClock:
    """The clock of the calling thread's script."""
    return _provider.current()


def set_clock_provider(provider: Callable[[], StageClock | None]) -> None:
    """Let the runtime choose the clock of a thread; None stands for the process's own."""
    _provider.current = lambda: provider() or _provider.solo()


def measures_stages(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for stage times, so that each stage has to wait for the GPU's work."""
    asked = (DRY_RUN_VARIABLE, TRACE_VARIABLE)
    return environment.get(TIMING_VARIABLE) == "1" or any(environment.get(name) for name in asked)


def clock_from_environment(environment: Mapping[str, str]) -> StageClock:
    """The clock of a script that has its process for itself, with what its environment asks to be reported.

    A script alone waits for no resource, nor do members that share plainly; any other member's own process asks its
    group's runtime.
    """
    on_interval: IntervalListener | None = None
    gate, first_rank = gate_from_environment(environment), task_of(environment)[0] == 0
    if gate is not None and gate.traced:
        on_interval = gate.interval
    elif environment.get(TRACE_VARIABLE) and first_rank:
        on_interval = _solo_trace(Path(environment[TRACE_VARIABLE]), environment)
    clock = StageClock(gate, on_interval)
    request = DryRunRequest.from_environment(environment)
    if request is not None and first_rank:
        from muri.launcher.script.script_facts import DryRunRecorder

        recorder, pid = DryRunRecorder(request), os.getpid()
        atexit.register(lambda: recorder.finish() if os.getpid() == pid else None)
        clock.on_record, clock.on_hold, clock.on_prefetch_depth = recorder.add, recorder.hold, recorder.works_ahead
    if not measures_stages(environment):
        clock.gpu = HostPace(gate or Gate())
    if gate is not None and first_rank:
        from muri.launcher.script.script_facts import ScriptFacts

        ScriptFacts(clock, gate.facts)
    log_iterations(clock, environment)
    if environment.get(TIMING_VARIABLE) == "1":
        # In one piece: torchrun's ranks have no buffer, and print would write the end of the line on its own.
        atexit.register(lambda: sys.stderr.write(f"{summary(clock)}\n"))
    return clock


def summary(clock: StageClock) -> str:
    """One line per stage: total seconds, and of the last iterations milliseconds and share; then what is in none."""
    records = list(clock.recent)
    whole_s = sum(record.iteration_s for record in records)
    rank, ranks = task_of(os.environ)
    head = f"muri: {f'rank {rank}, ' if ranks > 1 else ''}{counted(clock.iterations, 'iteration')}"
    lines = [head if not records else f"{head}, the last ones took {whole_s / len(records) * 1e3:.1f} ms on average"]
    owned = [sum(column) for column in zip(*(record.stage_s for record in records))] or [0.0] * STAGE_COUNT
    waited_s = sum(sum(record.wait_s) for record in records)
    for name, total_s, hidden_s, owned_s in zip(STAGES, clock.stage_s, clock.hidden_s, owned):
        hidden = f", {hidden_s:.3f} s more behind other stages" if hidden_s >= _NOTICED_S else ""
        mean = (
            f"  {owned_s / len(records) * 1e3:9.1f} ms per iteration ({owned_s / whole_s:4.0%})" if whole_s > 0 else ""
        )
        lines.append(f"muri:   {name:<12}{total_s:10.3f} s{mean}{hidden}")
    if records:
        rest_s = max(0.0, whole_s - waited_s - sum(owned))
        why = f": {UNMARKED if clock.explicit else WAITS_UNSEEN}" if rest_s >= UNEXPLAINED_SHARE * whole_s else ""
        lines.append(f"muri: {rest_s / whole_s:.0%} of an iteration in no stage{why}")
    return "\n".join(lines)


def _solo_trace(path: Path, environment: Mapping[str, str]) -> IntervalListener:
    member = environment.get("SLURM_JOB_ID", "solo")
    trace = Trace(path, f"job {member}", shared=False)
    atexit.register(trace.close)

    def record(stage: int, start_s: float, end_s: float, wait_s: float) -> None:
        trace.record(member, STAGES[stage], start_s, end_s, wait_s)
        if len(trace.pending) >= 100:
            trace.flush()

    return record


def log_iterations(clock: StageClock, environment: Mapping[str, str]) -> None:
    """Append a line at each iteration's end to the file that the environment names, if it does.

    Of several ranks only the first one does. No iteration waits for the GPU, because the log serves to measure
    throughput over seconds.
    """
    path = environment.get(ITERATION_LOG_VARIABLE)
    if not path or task_of(environment)[0] != 0:
        return
    try:
        stream = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 -- open as long as the script
    except OSError as error:
        print(f"muri: iterations are not logged: {path}: {error.strerror}", file=sys.stderr)
        return
    clock.at_boundary.append(lambda: print(f"{time.perf_counter():.6f}", file=stream))
