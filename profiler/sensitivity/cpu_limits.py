"""Limits of the CPU count that are real: the kernel keeps a job and all its processes on so many cores.

Affinity is inherited by every thread and process of the job, needs no privilege and is what a
job sees under Slurm's task/affinity too. Libraries that start a thread per core learn the count
when they load, from the affinity or from the variables set here.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Final

from muri.profiler.sensitivity.errors import CpuLimitError

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

CPUS_VARIABLE: Final = "MURI_CPUS"
"""Tells the script how many CPUs it was granted, for the number of its loader's workers."""

PLACEHOLDER: Final = "{cpus}"
"""Stands for the CPU count in the script's arguments."""


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
