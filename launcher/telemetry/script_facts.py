"""What a member's own process tells the runtime beside its iterations, so that its model is measured while it trains.

The runtime sees stages and waits of each iteration. Only the process knows its GPU memory, the size of its gradients,
how its loader works ahead, and what it did that threads could not keep apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Callable, Final

from muri.launcher.job.environment import is_declared
from muri.launcher.job.stage_clock import StageClock
from muri.launcher.telemetry.dry_run_recorder import GradientSize
from muri.launcher.threads import danger_watch
from muri.profiler.dryrun.steadiness import LoaderAhead
from muri.units import GIB

TOLD_AT: Final = (12, 48)
"""Iterations after which the facts are told: before anything can be sure, and again once memory has grown."""

LEAST_S: Final = 1.0
"""Not earlier after the first iteration: the interpreter's lock has to be looked at for a while."""


def reserved_gpu_mem_gib() -> float:
    """Most GPU memory in GiB that PyTorch's allocator has taken in this process; 0 without PyTorch or a GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0.0
    return float(sum(cuda.max_memory_reserved(device) for device in range(cuda.device_count())) / GIB)


class ScriptFacts:
    """Tells the facts of the script to which a clock belongs, and then listens no more.

    Args:
        clock: The script's.
        tell: Takes them to the runtime.
    """

    def __init__(self, clock: StageClock, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._ahead = LoaderAhead()
        self._begun_s: float | None = None
        self._due = list(TOLD_AT)
        self._gradients = GradientSize()
        self._dangers = danger_watch()
        clock.on_prefetch_depth = self._works_ahead
        clock.at_boundary.append(self._look)

    def facts(self) -> dict[str, Any]:
        """All that is known by now, as plain JSON values."""
        return {
            "gpu_mem_gib": reserved_gpu_mem_gib(),
            "gradient_mib": self._gradients.mib,
            "dangers": self._found_dangers(),
            "depth": self._ahead.depth,
            "period": self._ahead.period,
            "accumulates": is_declared(),
        }

    def _works_ahead(self, depth: int, period: int) -> None:
        self._ahead = self._ahead.widened(LoaderAhead(depth, period))

    def _look(self) -> None:
        now_s = self._clock.now()
        if self._begun_s is None:
            self._begun_s = now_s
            if self._dangers is not None:
                self._dangers.watch_lock()
        if self._clock.iterations < self._due[0] or now_s - self._begun_s < LEAST_S:
            return
        self._due.pop(0)
        self._tell(self.facts())
        if not self._due:
            self._clock.at_boundary.remove(self._look)

    def _found_dangers(self) -> list[str] | None:
        try:
            return None if self._dangers is None else list(self._dangers.found())
        except Exception as error:
            print(f"muri: dangers to threads are not looked for: {type(error).__name__}: {error}", file=sys.stderr)
            return None
