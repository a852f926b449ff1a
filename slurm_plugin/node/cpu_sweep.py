"""Measures a batch script's throughput on a few numbers of the dry-run job's CPUs, after its stages were measured.

Affinity keeps the script on so many cores, and Slurm's variables tell it the number, as they will when a plan gives the
job so many. The script runs once for each of at most eight numbers.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Final

from muri.profiler.dryrun.messages import FULL_MEMORY_VARIABLE, NO_JOB
from muri.profiler.errors import SensitivityError
from muri.profiler.sensitivity.bisection import CpuSensitivity, Measured, bisect
from muri.profiler.sensitivity.throughput import Window, cores, environment, usable_cpus, watched_throughput

STEADY_S: Final = 3.0
"""Seconds of steady work in one measurement."""

_LIMITED: Final = "import os, sys; os.sched_setaffinity(0, {cores}); os.execv(sys.argv[1], sys.argv[1:])"
_WARMUP_ITERATIONS: Final = 10
_BATCHES_AHEAD: Final = 2
"""Batches that each loader worker prefetches; there is one worker for each CPU at most."""

CHECKPOINTS_VARIABLE: Final = "MURI_CHECKPOINT_DIR"

_SLURM_COUNTS: Final = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE")


class OutOfTimeError(SensitivityError):
    """The sweep had no time for another measurement."""


def told_cpus(count: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Slurm's variables say that a job has so many CPUs."""
    return {**base, **{name: str(count) for name in _SLURM_COUNTS if name in base}}


def most_cpus(asked: int) -> int:
    """How many CPUs can be measured: those that Slurm gave, of which no more than this machine has."""
    return max(1, min(asked, usable_cpus()))


def limited(command: Sequence[str], count: int) -> list[str]:
    """A command that runs on so many cores."""
    return [sys.executable, "-c", _LIMITED.format(cores=sorted(cores(count))), *command]


def sweep_cpus(command: Sequence[str], asked: int, time_limit_s: float) -> CpuSensitivity:
    """Find the CPUs that saturate a script's throughput.

    Args:
        command: The batch script, which can be executed, and its arguments.
        asked: The greatest count.
        time_limit_s: For all measurements together.

    Raises:
        MuriError: The script did not iterate, or time ran out.
    """
    deadline_s = time.monotonic() + time_limit_s

    def measure(count: int) -> Measured:
        left_s = deadline_s - time.monotonic()
        if left_s < 2 * STEADY_S:
            raise OutOfTimeError(f"no time is left to measure {count} CPUs")

        def launch(told: Mapping[str, str], output: BinaryIO) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                limited(command, count),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=told,
                start_new_session=True,
            )

        window = Window(STEADY_S, _WARMUP_ITERATIONS + _BATCHES_AHEAD * count, left_s)
        # Ended, a script with checkpoints saves itself; the next run must not resume from there.
        with tempfile.TemporaryDirectory(prefix="muri-sweep-") as checkpoints:
            told = told_cpus(count, environment(count, os.environ)) | {
                CHECKPOINTS_VARIABLE: checkpoints,
                FULL_MEMORY_VARIABLE: os.environ.get("SLURM_JOB_ID", NO_JOB),
            }
            return watched_throughput(launch, told, window)

    return bisect(measure, most_cpus(asked))
