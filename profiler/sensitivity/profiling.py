"""Measures a real script's sensitivity: some seconds on each CPU count, and a dry run where it is saturated."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from muri.profiler.dryrun.result import DryRunResult
from muri.profiler.dryrun.runner import Limits, measure_script
from muri.profiler.sensitivity import cpu_limits
from muri.profiler.sensitivity.cache_model import measured_overlap
from muri.profiler.sensitivity.curve import Measured
from muri.profiler.sensitivity.throughput import STEADY_S, Window, measure_throughput

UNSEEN_SHARE: Final = 0.01
"""Where reading takes less of an iteration than this, nothing can be said about how it overlaps."""

_WARMUP_ITERATIONS: Final = 10
_BATCHES_AHEAD: Final = 2
"""Of each loader worker, PyTorch's default: so many come before the loader's pace shows."""


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
            cpu_limits.command_for(cpus, self.command),
            cpus=self._cores(cpus),
            environment=cpu_limits.environment(cpus, os.environ),
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
            cpu_limits.command_for(cpus, self.command),
            cpus=self._cores(cpus),
            environment=cpu_limits.environment(cpus, os.environ),
            limits=Limits(steady_s=self.steady_s),
        )

    def _cores(self, cpus: int) -> frozenset[int] | None:
        return cpu_limits.cores(cpus) if self.pinned else None


def overlap_seen(result: DryRunResult) -> float | None:
    """How much of its reading a script hid in a dry run; None where it hardly read."""
    busy_s = result.detail.busy_s
    if busy_s is None or busy_s[0] < UNSEEN_SHARE * result.iteration_s:
        return None
    return measured_overlap(result.iteration_s, result.stage_s[0], busy_s[0])
