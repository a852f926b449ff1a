"""The memory axis without measuring it: a cache that never replaces has a hit rate that is known beforehand.

Each item is read once per epoch, in random order. A cache that replaces what it holds evicts items
before they come round again; one that keeps a fixed set (MinIO) hits for that set in every epoch,
so that the hit rate is its size over the dataset's (Synergy, section 3.1; Mohan et al., "Analyzing
and Mitigating Data Stalls in DNN Training", VLDB 2021, section 5.1). The rest comes from storage, whose
bandwidth is measured once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muri.profiler.sensitivity.curve import GAIN
from muri.profiler.sensitivity.errors import SensitivityError

_MIB_PER_GIB: Final = 1024.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """What is read in an epoch, and how fast.

    Attributes:
        dataset_gib: Size of the whole dataset.
        batch_mib: What one iteration reads of it.
        storage_mib_per_s: Measured bandwidth of its storage.
        overlap: Share of the shorter of reading and the rest of the iteration that is hidden behind
            the other: 1 where batches are prefetched, 0 where the loop waits for each.
    """

    dataset_gib: float
    batch_mib: float
    storage_mib_per_s: float
    overlap: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no dataset can be.

        Raises:
            SensitivityError: A figure is out of its range.
        """
        for name in ("dataset_gib", "batch_mib", "storage_mib_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SensitivityError(f"{name} is {value}; it must be > 0")
        if self.batch_mib > self.dataset_gib * _MIB_PER_GIB:
            raise SensitivityError(
                f"an iteration reads {self.batch_mib:g} MiB of a dataset of only {self.dataset_gib:g} GiB"
            )
        if not 0 <= self.overlap <= 1:
            raise SensitivityError(f"overlap is {self.overlap}; it must be between 0 and 1")


def hit_rate(dataset: Dataset, cache_gib: float) -> float:
    """Share of the items that a cache of this size holds, in every epoch after the first."""
    return min(1.0, max(0.0, cache_gib) / dataset.dataset_gib)


def load_s(dataset: Dataset, cache_gib: float) -> float:
    """Seconds per iteration that storage needs for what the cache does not hold."""
    return (1 - hit_rate(dataset, cache_gib)) * dataset.batch_mib / dataset.storage_mib_per_s


def throughput(dataset: Dataset, cpu_throughput: float, cache_gib: float) -> float:
    """Iterations per second with so much cache.

    Where batches are prefetched, reading runs beside everything else and the slower of the two sets
    the pace: the least of the CPU curve and the storage curve. Where the loop waits for each batch,
    their times add up. What was measured lies in between, and so does the result.

    Args:
        dataset: What is read.
        cpu_throughput: Iterations per second at full memory on the CPUs in question.
        cache_gib: Size of the cache.
    """
    compute_s, read_s = 1 / cpu_throughput, load_s(dataset, cache_gib)
    return 1 / (max(compute_s, read_s) + (1 - dataset.overlap) * min(compute_s, read_s))


def matrix(dataset: Dataset, cpu_curve: Sequence[float], caches_gib: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Throughput for each CPU count (rows) and cache size (columns): one measured axis, one computed."""
    return tuple(tuple(throughput(dataset, at_full, gib) for gib in caches_gib) for at_full in cpu_curve)


def saturating_cache_gib(dataset: Dataset, cpu_throughput: float, gain: float = GAIN) -> float:
    """The least cache from which a cache of the whole dataset gives less than `gain` on top, in GiB.

    The model solved for the cache: the iteration may take (1 + gain) × its time at full memory.
    """
    compute_s = 1 / cpu_throughput
    read_s = (1 + gain) * compute_s - (1 - dataset.overlap) * compute_s  # when reading is the longer one
    if dataset.overlap < 1 and gain * compute_s / (1 - dataset.overlap) <= compute_s:
        read_s = gain * compute_s / (1 - dataset.overlap)
    missed = min(1.0, read_s * dataset.storage_mib_per_s / dataset.batch_mib)
    return (1 - missed) * dataset.dataset_gib


def measured_overlap(iteration_s: float, owned_s: float, busy_s: float) -> float:
    """How much of its reading a job hides, from a dry run in which it read.

    Args:
        iteration_s: Wall-clock seconds of an iteration.
        owned_s: Those of them that storage owns: the job did nothing but wait for it.
        busy_s: Those in which storage was used, also behind other work.

    Returns:
        The hidden share of the shorter of reading and the rest.
    """
    shorter_s = min(busy_s, iteration_s - owned_s)
    return min(1.0, max(0.0, (busy_s - owned_s) / shorter_s)) if shorter_s > 0 else 0.0


def cache_sizes(dataset: Dataset, columns: int = 5) -> tuple[float, ...]:
    """Evenly spaced cache sizes from nothing to the whole dataset, in GiB."""
    return tuple(dataset.dataset_gib * index / (columns - 1) for index in range(columns))
