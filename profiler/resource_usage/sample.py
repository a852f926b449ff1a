"""Samples of used resources, their means and peaks over a run, and a throttle that keeps their cost low."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
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
