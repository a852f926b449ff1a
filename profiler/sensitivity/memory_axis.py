"""The memory axis without measuring it: a cache that never replaces has a hit rate that is known beforehand.

Each item is read once per epoch, in random order. A cache that replaces what it holds evicts items
before they come round again; one that keeps a fixed set (MinIO) hits for that set in every epoch,
so that the hit rate is its size over the dataset's (Synergy, section 3.1; Mohan et al., "Analyzing
and Mitigating Data Stalls in DNN Training", VLDB 2021, section 5.1). The rest comes from storage, whose
bandwidth is measured once, without the page cache's help.
"""

import errno
import mmap
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from muri.profiler import figures
from muri.profiler.errors import SensitivityError, StorageError
from muri.profiler.sensitivity.bisection import GAIN
from muri.units import GIB, MIB, MIB_PER_GIB

CHUNK_BYTES: Final = 4 * MIB
READ_LIMIT_MIB: Final = 512.0
READ_LIMIT_S: Final = 3.0
_SEED: Final = 1
_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


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
        for name, bounds in (
            ("dataset_gib", figures.DATASET_GIB),
            ("batch_mib", figures.BATCH_MIB),
            ("storage_mib_per_s", figures.BANDWIDTH_MIB_PER_S),
            ("overlap", figures.SHARE),
        ):
            if fault := bounds.fault(getattr(self, name)):
                raise SensitivityError(f"{name} {fault}")
        if self.batch_mib > self.dataset_gib * MIB_PER_GIB:
            raise SensitivityError(
                f"an iteration reads {self.batch_mib:g} MiB of a dataset of only {self.dataset_gib:g} GiB"
            )


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


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """A measured read bandwidth.

    Attributes:
        mib_per_s: What was read over the time it took.
        read_mib: How much was read.
        direct: Whether the page cache was bypassed (O_DIRECT); otherwise its pages were dropped before.
    """

    mib_per_s: float
    read_mib: float
    direct: bool


def files_of(dataset: Path) -> tuple[Path, ...]:
    """All files of a dataset, in the order of their names.

    Raises:
        StorageError: There are none, or they cannot be listed.
    """
    if dataset.is_file():
        return (dataset,)
    if not dataset.exists():
        raise StorageError(f"there is no dataset {dataset}; give a file or a folder")
    found = tuple(sorted(path for path in dataset.rglob("*") if path.is_file()))
    if not found:
        raise StorageError(f"the folder {dataset} holds no files that may be read")
    return found


def size_gib(files: Iterable[Path]) -> float:
    """Size of all files together."""
    return sum(path.stat().st_size for path in files) / GIB


def measure_bandwidth(
    files: Sequence[Path], *, limit_mib: float = READ_LIMIT_MIB, limit_s: float = READ_LIMIT_S
) -> ReadBandwidth:
    """Read files in a shuffled order, as training does, until a limit is reached.

    Raises:
        StorageError: Nothing could be read.
    """
    shuffled = list(files)
    random.Random(_SEED).shuffle(shuffled)
    read_bytes, direct = 0, True
    begin_s = time.perf_counter()
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:  # O_DIRECT needs memory at the start of a page
        for path in shuffled:
            fd, bypassed = _open(path)
            direct = direct and bypassed
            try:
                while count := os.readv(fd, [buffer]):
                    read_bytes += count
                    spent_s = time.perf_counter() - begin_s
                    if read_bytes >= limit_mib * MIB or spent_s >= limit_s:
                        return ReadBandwidth(read_bytes / MIB / spent_s, read_bytes / MIB, direct)
            except OSError as error:
                raise StorageError(f"cannot read {path}: {error.strerror}") from error
            finally:
                os.close(fd)
    if not read_bytes:
        raise StorageError(f"the {len(files)} files of the dataset are empty")
    return ReadBandwidth(read_bytes / MIB / (time.perf_counter() - begin_s), read_bytes / MIB, direct)


def _open(path: Path) -> tuple[int, bool]:
    """Open past the page cache, or without the file's pages in it where the file system has no O_DIRECT."""
    try:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return fd, False


MEMORY_KEYS: Final = ("dataset", "dataset-gib", "storage-mib-per-s", "batch-mib", "overlap")
"""What the memory axis is told: the dataset's files, or its size in place of them; the bandwidth of its storage, else
measured on them; what an iteration reads; the share of reading that the job hides, else measured."""


@dataclass(frozen=True, slots=True)
class MemoryAxis:
    """How the memory axis is to be computed.

    Attributes:
        batch_mib: What one iteration reads.
        path: The dataset's files; None where size and bandwidth are given.
        dataset_gib: Size of the dataset; None: that of its files.
        storage_mib_per_s: Bandwidth of its storage; None: measured on its files.
        overlap: Share of reading that the job hides; None: as its dry run shows.
    """

    batch_mib: float
    path: Path | None = None
    dataset_gib: float | None = None
    storage_mib_per_s: float | None = None
    overlap: float | None = None

    @classmethod
    def from_words(cls, words: str) -> "MemoryAxis":
        """Return the axis that KEY=VALUE,... means.

        Raises:
            SensitivityError: A key or value is none, or there are not enough.
        """
        given: dict[str, str] = {}
        for word in words.split(","):
            key, _, value = word.partition("=")
            if key not in MEMORY_KEYS or not value:
                raise SensitivityError(f"{word!r} says nothing of memory; give KEY=VALUE of {', '.join(MEMORY_KEYS)}")
            given[key] = value
        path = Path(given["dataset"]) if "dataset" in given else None
        missing = [] if "batch-mib" in given else ["batch-mib (batch size × mean size of a sample)"]
        if path is None:
            missing += [f"dataset or {key}" for key in ("dataset-gib", "storage-mib-per-s") if key not in given]
        if missing:
            raise SensitivityError(f"the memory axis also needs {', '.join(missing)}")
        try:
            figures = {key.replace("-", "_"): float(value) for key, value in given.items() if key != "dataset"}
        except ValueError as error:
            raise SensitivityError(f"of memory {words!r} a value is not a number: {error}") from error
        return cls(path=path, **figures)

    def measure(self) -> Dataset:
        """Measure what was not said.

        Raises:
            StorageError: The files cannot be read.
            SensitivityError: What was said cannot be true.
        """
        files = () if self.path is None else files_of(self.path)
        gib = size_gib(files) if self.dataset_gib is None else self.dataset_gib
        rate = measure_bandwidth(files).mib_per_s if self.storage_mib_per_s is None else self.storage_mib_per_s
        return Dataset(gib, self.batch_mib, rate, 1.0 if self.overlap is None else self.overlap)

    def with_overlap(self, dataset: Dataset, measured: float | None) -> Dataset:
        """The dataset with the overlap that its job showed; what a person said counts more.

        Where nothing was said and nothing could be seen, reading is taken to overlap, as it does
        with a loader that has workers.
        """
        return dataset if self.overlap is not None or measured is None else replace(dataset, overlap=measured)
