"""Measures a real script's sensitivity: one short dry run for each CPU count."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from muri.profiler.dryrun.result import DryRunResult
from muri.profiler.dryrun.runner import Limits, measure_script
from muri.profiler.sensitivity import cpu_limits
from muri.profiler.sensitivity.cache_model import measured_overlap
from muri.profiler.sensitivity.curve import Measured

STEADY_S: Final = 5.0
"""Most seconds of steady work in one measurement."""

UNSEEN_SHARE: Final = 0.01
"""Where reading takes less of an iteration than this, nothing can be said about how it overlaps."""


@dataclass
class ScriptMeter:
    """Measures one script on different CPU counts and remembers what it saw.

    Attributes:
        command: The script and its arguments; `{cpus}` in them is the count.
        pinned: Whether the kernel enforces the count; otherwise the script is only told.
        limits: How much one measurement may take.
        tell: Called with each measurement.
        results: The last measurement of each count.
    """

    command: Sequence[str]
    pinned: bool = True
    limits: Limits = field(default_factory=lambda: Limits(steady_s=STEADY_S))
    tell: Callable[[int, Measured], None] = lambda _cpus, _measured: None
    results: dict[int, DryRunResult] = field(default_factory=dict)

    def __call__(self, cpus: int) -> Measured:
        """Throughput on so many CPUs.

        Raises:
            CpuLimitError: There are fewer.
            DryRunFailedError: The script failed or never iterated.
        """
        result = measure_script(
            cpu_limits.command_for(cpus, self.command),
            cpus=cpu_limits.cores(cpus) if self.pinned else None,
            environment=cpu_limits.environment(cpus, os.environ),
            limits=self.limits,
        )
        self.results[cpus] = result
        measured = throughput_of(result)
        self.tell(cpus, measured)
        return measured

    @property
    def process_gib(self) -> float | None:
        """Peak memory of the script's processes over all measurements, None if nobody measured it."""
        peaks = [result.detail.host_mem_gib for result in self.results.values()]
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def overlap(self) -> float | None:
        """How much of reading the script hides, seen on the most CPUs; None where it hardly read."""
        result = self.results[max(self.results)]
        busy_s = result.detail.busy_s
        if busy_s is None or busy_s[0] < UNSEEN_SHARE * result.iteration_s:
            return None
        return measured_overlap(result.iteration_s, result.stage_s[0], busy_s[0])


def throughput_of(result: DryRunResult) -> Measured:
    """Iterations per second, and the standard error that the scatter of the iterations leaves."""
    scatter = result.detail.iteration_cv or 0.0
    return Measured(1 / result.iteration_s, scatter / math.sqrt(max(1, result.iterations)))
