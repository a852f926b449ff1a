"""A script's throughput on a number of CPUs: iterations over some seconds, from when they end and nothing else.

A dry run stops when its means are sure, and leaves far-off iterations out of them. Both mislead here: the workers
of a loader hand over in bursts, as many batches as there are workers, and the pause between bursts is what
the throughput depends on. So what counts is iterations over time, and nothing in the script is timed or waited for.

The kernel enforces the number of CPUs by affinity, which all threads and processes of the script inherit. Affinity
needs no privilege, and it is what a job sees under Slurm's task/affinity. Libraries that start a thread per core learn
the count when they load, from the affinity or from the variables set here.
"""

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import BinaryIO, Final

from muri.profiler.dryrun.messages import ITERATION_LOG_VARIABLE, DryRunResult, Limits, StampReader
from muri.profiler.dryrun.runner import DryRunFailedError, check_command, end, measure_script, start, with_last_words
from muri.profiler.errors import CpuLimitError
from muri.profiler.sensitivity.bisection import Measured
from muri.profiler.sensitivity.memory_axis import measured_overlap

STEADY_S: Final = 3.0
LEAST_ITERATIONS: Final = 3
_BLOCKS: Final = 8
_TICK_S: Final = 0.05
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
CPUS_VARIABLE: Final = "MURI_CPUS"
"""Tells the script how many CPUs it has, for the number of its loader's workers."""

Launch = Callable[[Mapping[str, str], BinaryIO], "subprocess.Popen[bytes]"]

PLACEHOLDER: Final = "{cpus}"
"""Stands for the CPU count in the script's arguments."""

UNSEEN_SHARE: Final = 0.01
"""Reading that takes a smaller share of the iteration does not show how it overlaps."""

_WARMUP_ITERATIONS: Final = 10
_BATCHES_AHEAD: Final = 2
"""Batches that each loader worker prefetches (PyTorch's default); the loader's pace shows after them."""


def usable_cpus() -> int:
    """How many cores this process, and what it starts, may use."""
    return len(os.sched_getaffinity(0))


def cores(count: int) -> frozenset[int]:
    """The numbers of so many cores, the lowest of those that this process may use.

    Raises:
        CpuLimitError: There are fewer.
    """
    usable = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(usable):
        raise CpuLimitError(f"{count} CPUs were asked for; this process may use 1 to {len(usable)}")
    return frozenset(usable[:count])


def environment(count: int, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job on so many CPUs: as many threads, and the count itself."""
    return {**base, **dict.fromkeys((*THREAD_VARIABLES, CPUS_VARIABLE), str(count))}


def command_for(count: int, command: Sequence[str]) -> tuple[str, ...]:
    """The command with the count in place of `{cpus}`, such as `--workers {cpus}`."""
    return tuple(word.replace(PLACEHOLDER, str(count)) for word in command)


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
        """The index of the end of an iteration with which the window begins; beyond the last during warm-up."""
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
    return watched_throughput(lambda told, stream: start(command, told, stream, cpus=cpus), environment, window)


def watched_throughput(launch: Launch, environment: Mapping[str, str], window: Window) -> Measured:
    """Count the iterations of what is launched, and end it.

    Args:
        launch: Starts it, as the leader of a session, in the environment and with the output that it is given.
        environment: To which the place of the iteration log is added.
        window: How long.

    Raises:
        DryRunFailedError: It failed, never iterated or took too long; the message has its last words.
    """
    with tempfile.TemporaryDirectory(prefix="muri-sensitivity-") as folder:
        log, output = Path(folder, "iterations"), Path(folder, "output")
        with output.open("wb") as stream:
            process = launch({**environment, ITERATION_LOG_VARIABLE: str(log)}, stream)
            try:
                stamps_s = _watch(process, StampReader(log), window)
            finally:
                end(process)
        counted = stamps_s[window.start_index(stamps_s) :]
        if len(counted) <= LEAST_ITERATIONS:
            raise DryRunFailedError(with_last_words(_why(process.returncode, len(stamps_s), window), output))
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
    advice = "let it run longer" if iterations else "mark its iterations with muri.batches(loader) or stages"
    return f"no throughput: {iterations} iterations were seen, up to {needed} are needed; {advice}"


@dataclass(frozen=True, slots=True)
class ScriptMeter:
    """Measures one script on different CPU counts.

    Attributes:
        command: The script and its arguments; `{cpus}` in them is the count.
        pinned: Whether the kernel enforces the count; otherwise the script is only told.
        steady_s: Seconds of steady work in one measurement.
        tell: Called with each measurement.
    """

    command: Sequence[str]
    pinned: bool = True
    steady_s: float = STEADY_S
    tell: Callable[[int, Measured], None] = lambda _cpus, _measured: None

    def __call__(self, cpus: int) -> Measured:
        """Throughput on so many CPUs.

        Raises:
            CpuLimitError: There are fewer.
            NoScriptError: There is no such script.
            DryRunFailedError: It failed or never iterated.
        """
        measured = measure_throughput(
            command_for(cpus, self.command),
            cpus=self._cores(cpus),
            environment=environment(cpus, os.environ),
            window=Window(self.steady_s, _WARMUP_ITERATIONS + _BATCHES_AHEAD * cpus),
        )
        self.tell(cpus, measured)
        return measured

    def dry_run(self, cpus: int) -> DryRunResult:
        """Where the time and the memory go on so many CPUs.

        Raises:
            DryRunFailedError: The script failed or never iterated.
        """
        return measure_script(
            command_for(cpus, self.command),
            cpus=self._cores(cpus),
            environment=environment(cpus, os.environ),
            limits=Limits(steady_s=self.steady_s),
        )

    def _cores(self, cpus: int) -> frozenset[int] | None:
        return cores(cpus) if self.pinned else None


def overlap_seen(result: DryRunResult) -> float | None:
    """The share of its reading that a script hid in a dry run; None if it hardly read."""
    busy_s = result.detail.busy_s
    if busy_s is None or busy_s[0] < UNSEEN_SHARE * result.iteration_s:
        return None
    return measured_overlap(result.iteration_s, result.stage_s[0], busy_s[0])
