"""A script's throughput over some seconds, from when its iterations end and nothing else.

A dry run stops when its means are sure, and leaves far-off iterations out of them. Both mislead here: the workers
of a loader hand over in bursts, as many batches as there are workers, and the pause between bursts is what
the throughput depends on. So what counts is iterations over time, and nothing in the script is timed or waited for.
"""

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

from muri.profiler.dryrun.runner import DryRunFailedError, check_command, end, last_words, start
from muri.profiler.interference.stamps import ITERATION_LOG_VARIABLE, StampReader
from muri.profiler.sensitivity.curve import Measured

STEADY_S: Final = 3.0
LEAST_ITERATIONS: Final = 3
_WARMUP_ITERATIONS: Final = 10
_BLOCKS: Final = 8
_TICK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Window:
    """How long a script is watched.

    Attributes:
        steady_s: Seconds after the warm-up; more where they hold fewer than three iterations.
        warmup_iterations: First iterations that are left out, or those of the first `steady_s` if that is sooner.
        time_limit_s: Most seconds in all, with start-up.
    """

    steady_s: float = STEADY_S
    warmup_iterations: int = _WARMUP_ITERATIONS
    time_limit_s: float = 300.0

    def start_index(self, stamps_s: Sequence[float]) -> int:
        """Which end of an iteration the window begins with; beyond the last one while the warm-up goes on."""
        by_time = next((n for n, at_s in enumerate(stamps_s) if at_s - stamps_s[0] >= self.steady_s), len(stamps_s))
        return min(by_time, self.warmup_iterations)

    def is_over(self, stamps_s: Sequence[float]) -> bool:
        """Whether enough is known."""
        first = self.start_index(stamps_s)
        counted = len(stamps_s) - 1 - first
        return counted >= LEAST_ITERATIONS and stamps_s[-1] - stamps_s[first] >= self.steady_s


def measure_throughput(
    command: Sequence[str],
    *,
    cpus: frozenset[int] | None,
    environment: Mapping[str, str] = os.environ,
    window: Window = Window(),
) -> Measured:
    """Run a script for some seconds and count its iterations.

    Args:
        command: The script and its arguments, or "-m", a module and its arguments.
        cpus: The cores that it and all it starts may use; None: those of this process.
        environment: The script's environment.
        window: How long.

    Raises:
        NoScriptError: There is no such script.
        DryRunFailedError: It failed, never iterated or took too long; the message has its last words.
    """
    check_command(command)
    with tempfile.TemporaryDirectory(prefix="muri-sensitivity-") as folder:
        log, output = Path(folder, "iterations"), Path(folder, "output")
        with output.open("wb") as stream:
            process = start(command, {**environment, ITERATION_LOG_VARIABLE: str(log)}, stream, cpus=cpus)
            try:
                stamps_s = _watch(process, StampReader(log), window)
            finally:
                end(process)
        counted = stamps_s[window.start_index(stamps_s) :]
        if len(counted) <= LEAST_ITERATIONS:
            raise DryRunFailedError(_why(process.returncode, len(stamps_s), window) + _quoted(last_words(output)))
        return throughput_of(counted)


def throughput_of(stamps_s: Sequence[float]) -> Measured:
    """Iterations over time, and how sure that is.

    The standard error is that of the means of a few blocks of iterations: it knows of bursts and drifts that
    are shorter than a block, which the scatter of single iterations does not.
    """
    times_s = [after_s - before_s for before_s, after_s in pairwise(stamps_s)]
    size = max(1, len(times_s) // _BLOCKS)
    blocks = [fmean(times_s[begin : begin + size]) for begin in range(0, len(times_s) - size + 1, size)]
    mean_s = (stamps_s[-1] - stamps_s[0]) / len(times_s)
    error_s = stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else 0.0
    return Measured(1 / mean_s, error_s / mean_s)


def _watch(process: "subprocess.Popen[bytes]", stamps: StampReader, window: Window) -> list[float]:
    """Wait until enough is known, the script has ended, or it took too long."""
    deadline_s = time.monotonic() + window.time_limit_s
    while process.poll() is None and time.monotonic() < deadline_s:
        if window.is_over(stamps.read()):
            break
        time.sleep(_TICK_S)
    return stamps.read()


def _why(code: int, iterations: int, window: Window) -> str:
    if code > 0:
        return f"no throughput: the script failed with exit code {code} after {iterations} iterations"
    needed = window.warmup_iterations + LEAST_ITERATIONS + 1
    mended = "let it run longer" if iterations else "mark its iterations with muri.batches(loader) or stages"
    return f"no throughput: {iterations} iterations were seen, up to {needed} are needed; {mended}"


def _quoted(words: str) -> str:
    return f"\nits last words: {words}" if words else ""
