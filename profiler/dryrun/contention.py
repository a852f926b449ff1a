"""Whether something else kept the cores busy on which a script was measured."""

import os
import time
from typing import Final

import psutil

CROWDED_FROM: Final = 0.9
"""From this share of its cores in use on, what else runs there slows a script down."""


class CoreMeter:
    """Tells how many of the cores that this process may use were in use by anybody since it was made."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))
        self._since_s = time.monotonic()
        self._before_s = self._in_use_s()

    @property
    def count(self) -> int:
        """How many it may use."""
        return len(self._cpus)

    def busy(self) -> float:
        """Mean number of them in use."""
        lasted_s = time.monotonic() - self._since_s
        return max(0.0, self._in_use_s() - self._before_s) / lasted_s if lasted_s > 0 else 0.0

    def _in_use_s(self) -> float:
        times = psutil.cpu_times(percpu=True)
        each = [times[cpu] for cpu in self._cpus if cpu < len(times)]
        return sum(sum(one[:8]) - one.idle - getattr(one, "iowait", 0.0) for one in each)  # guests are in user


def undisturbed(own_cores: float, busy_cores: float, core_count: int) -> float:
    """Share of the use of its cores that was the script's own; 1 while there was room for all.

    Args:
        own_cores: Mean cores that the script and its processes used.
        busy_cores: Mean cores of those it may use that anybody used.
        core_count: How many it may use.
    """
    if busy_cores < CROWDED_FROM * core_count or busy_cores <= 0:
        return 1.0
    return min(1.0, own_cores / busy_cores)
