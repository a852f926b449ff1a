"""What was seen of a node's or a job's resources, summed up; and how far other processes hold this one up.

It is asked inside scripts, under whatever Python they have.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

CPU_SHARE: Final = 0.001
"""Share of one core that each kind of reading may take."""


class Throttle:
    """Says when a reading is due again: the more CPU time the last one took, the later.

    Args:
        least_s: Seconds between two readings, however cheap they are.
        share: Share of one core that the readings may take.
    """

    def __init__(self, least_s: float, share: float = CPU_SHARE) -> None:
        self._least_s = least_s
        self._share = share
        self._next_s = 0.0
        self._began_s = 0.0

    def due(self) -> bool:
        """Whether it is time; a reading that begins now has to end with `done`."""
        if time.perf_counter() < self._next_s:
            return False
        self._began_s = time.thread_time()
        return True

    def done(self) -> None:
        """Note that the reading ended."""
        cost_s = time.thread_time() - self._began_s
        self._next_s = time.perf_counter() + max(self._least_s, cost_s / self._share)


@dataclass(frozen=True)
class Figures:
    """Use of the machine at one time or over many; None for what could not be read.

    Attributes:
        cpu_cores: Cores in use by the process and its descendants.
        host_mem_gib: Host memory of the process and its descendants, shared pages counted once.
        disk_mib_per_s: Read from and written to storage, page cache hits left out.
        network_mib_per_s: Sent and received by the node, loopback left out.
        loopback_mib_per_s: Sent over the loopback device, which ranks on one node use.
        gpu_utilisation: Mean over the visible devices, 0 to 1.
        gpu_mem_gib: GPU memory of the process and its descendants on all visible devices.
        gpu_device_mem_gib: GPU memory in use on all visible devices, by any process.
        pcie_mib_per_s: Sent and received over PCIe by all visible devices.
    """

    cpu_cores: float | None = None
    host_mem_gib: float | None = None
    disk_mib_per_s: float | None = None
    network_mib_per_s: float | None = None
    loopback_mib_per_s: float | None = None
    gpu_utilisation: float | None = None
    gpu_mem_gib: float | None = None
    gpu_device_mem_gib: float | None = None
    pcie_mib_per_s: float | None = None

    def to_dict(self) -> dict[str, float]:
        """What was read, as plain JSON values."""
        return {item.name: value for item in fields(Figures) if (value := getattr(self, item.name)) is not None}


@dataclass(frozen=True)
class Sample(Figures):
    """What was read at one time.

    Attributes:
        at_s: When it was read, on the clock `time.perf_counter`.
        over_s: Seconds that the rates are over: those since the sample before.
    """

    at_s: float = 0.0
    over_s: float = 0.0


@dataclass(frozen=True)
class Usage:
    """A run of samples.

    Attributes:
        samples: In the order of time.
        notes: What could not be read and why, and what a figure stands for where that is not plain.
        sampler_cpu_s: CPU time that the sampling itself took.
    """

    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()
    sampler_cpu_s: float = 0.0

    @property
    def mean(self) -> Figures:
        """Means over time; each sample counts for the seconds that it covers."""
        return self._each(_mean)

    @property
    def peak(self) -> Figures:
        """The highest value of each figure."""
        return self._each(lambda pairs: max(value for value, _ in pairs))

    def since(self, at_s: float) -> Usage:
        """The samples that begin at or after a time of `time.perf_counter`, for leaving a warm-up out."""
        kept = tuple(item for item in self.samples if item.at_s - item.over_s >= at_s)
        return Usage(kept, self.notes, self.sampler_cpu_s)

    def _each(self, of: Callable[[Sequence[tuple[float, float]]], float]) -> Figures:
        found: dict[str, float] = {}
        for item in fields(Figures):
            pairs = [
                (value, sample.over_s) for sample in self.samples if (value := getattr(sample, item.name)) is not None
            ]
            if pairs:
                found[item.name] = of(pairs)
        return Figures(**found)


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    weight = sum(over_s for _, over_s in pairs)
    if weight <= 0:
        return sum(value for value, _ in pairs) / len(pairs)
    return sum(value * over_s for value, over_s in pairs) / weight


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
    """Core seconds that anybody used of some cores so far."""
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
