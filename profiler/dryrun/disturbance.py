"""How far other processes hold a script up."""

from __future__ import annotations

import os
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

CROWDED_FROM: Final = 0.9
"""Where Linux does not say how long threads waited, others count from this share of the cores in use on."""

_S_PER_NS: Final = 1e-9
_TASKS: Final = Path("/proc/self/task")
_STAT: Final = Path("/proc/stat")
_IDLE: Final = 3
"""The place of a core's idle time in its line of /proc/stat; its time waiting for storage is the next."""

_GUESTS: Final = 8
"""From here on the line counts time that is also counted before."""


class Disturbance:
    """The share of the time since its creation in which others held this process up.

    Linux counts for each thread how long it was ready to run and had no core. The thread that waited longest stands for
    the script, and of that wait others are to blame by their share of the work on its cores; the rest are its own
    threads and processes that are in each other's way.
    """

    def __init__(self) -> None:
        self._cpus = frozenset(f"cpu{number}" for number in os.sched_getaffinity(0))
        self._since_s = time.monotonic()
        self._own_s = time.process_time()
        self._busy_s = _in_use_s(self._cpus)
        self._waited_s = _waited_s()

    def share(self) -> float:
        """Share of the time that others held it up, 0 to 1."""
        lasted_s = max(1e-9, time.monotonic() - self._since_s)
        busy_s = max(1e-9, _in_use_s(self._cpus) - self._busy_s)
        others = 1 - min(1.0, (time.process_time() - self._own_s) / busy_s)
        waits_s = [waited_s - self._waited_s.get(thread, 0.0) for thread, waited_s in _waited_s().items()]
        if not waits_s:
            return others if busy_s >= CROWDED_FROM * len(self._cpus) * lasted_s else 0.0
        return min(1.0, others * max(waits_s) / lasted_s)


def _in_use_s(cpus: AbstractSet[str]) -> float:
    """Core seconds that any process used of some cores so far."""
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *counts = line.split()
        if name in cpus:
            ticks += sum(map(int, counts[:_IDLE] + counts[_IDLE + 2 : _GUESTS]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _waited_s() -> dict[str, float]:
    """How long each thread waited for a core so far; empty where the kernel does not count it."""
    waited: dict[str, float] = {}
    for path in _TASKS.glob("*/schedstat"):
        try:
            waited[path.parent.name] = int(path.read_text().split()[1]) * _S_PER_NS
        except (OSError, IndexError, ValueError):  # it has ended
            continue
    return waited
