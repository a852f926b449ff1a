"""A job's sensitivity to CPUs and memory, as a document of the profile store.

The memory axis is computed. Each item is read once per epoch, in random order. A cache that replaces what it holds
evicts items before they come round again; one that keeps a fixed set (MinIO) hits for that set in every epoch, so that
the hit rate is its size over the dataset's (Synergy, section 3.1; Mohan et al., "Analyzing and Mitigating Data Stalls
in DNN Training", VLDB 2021, section 5.1). The rest comes from storage, whose bandwidth is measured once.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from muri.profiler import figures
from muri.profiler.cpu_curve import GAIN, CpuSensitivity, Point
from muri.profiler.errors import SensitivityError
from muri.profiler.store import Document, ProfileStore
from muri.units import MIB_PER_GIB

SENSITIVITIES: Final = "sensitivity"
"""Kind of the store's documents that hold sensitivities."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """What is read in an epoch, and how fast."""

    dataset_gib: float  # Size of the whole dataset
    batch_mib: float  # What one iteration reads of it
    storage_mib_per_s: float  # Measured bandwidth of its storage
    # Share of the shorter of reading and the rest of the iteration that is hidden behind the other: 1 where batches are
    # prefetched, 0 where the loop waits for each
    overlap: float = 1.0

    def __post_init__(self) -> None:
        """Refuse figures that no dataset has."""
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


def throughput(dataset: Dataset, cpu_throughput: float, cache_gib: float) -> float:
    """Iterations per second with so much cache, on CPUs that give `cpu_throughput` at full memory.

    Where batches are prefetched, reading runs beside everything else and the slower of the two sets
    the pace: the least of the CPU curve and the storage curve. Where the loop waits for each batch,
    their times add up. What was measured lies in between, and so does the result.
    """
    hit_rate = min(1.0, max(0.0, cache_gib) / dataset.dataset_gib)
    compute_s, read_s = 1 / cpu_throughput, (1 - hit_rate) * dataset.batch_mib / dataset.storage_mib_per_s
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
    """The share of the shorter of reading and the rest that a job hides, from a dry run in which it read.

    Args:
        iteration_s: Wall-clock seconds of an iteration.
        owned_s: Those of them that storage owns: the job did nothing but wait for it.
        busy_s: Those in which storage was used, also behind other work.
    """
    shorter_s = min(busy_s, iteration_s - owned_s)
    return min(1.0, max(0.0, (busy_s - owned_s) / shorter_s)) if shorter_s > 0 else 0.0


def cache_sizes(dataset: Dataset, columns: int = 5) -> tuple[float, ...]:
    """Evenly spaced cache sizes from nothing to the whole dataset, in GiB."""
    return tuple(dataset.dataset_gib * index / (columns - 1) for index in range(columns))


@dataclass(frozen=True, slots=True)
class Demand:
    """The least that saturates a job's throughput (Synergy's demand vector)."""

    cpus: int  # Cores
    cache_gib: float | None = None  # Memory for a cache of the dataset; None where the dataset is not known
    process_gib: float | None = None  # Memory of the job's own processes; None where it was not measured

    @property
    def mem_gib(self) -> float | None:
        """Memory in all; None where none of it is known."""
        known = [part for part in (self.cache_gib, self.process_gib) if part is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class SensitivityProfile:
    """How a job's throughput depends on CPU and memory."""

    name: str  # The job's name
    measured_at: str  # UTC time, ISO-8601
    cpu: CpuSensitivity  # Throughput over the CPU count, measured
    pinned: bool = True  # Whether the kernel enforced the counts; otherwise the script was only told them
    dataset: Dataset | None = None  # What the memory axis is computed from; None where it is not known
    process_gib: float | None = None  # Peak memory of the job's own processes; None where it was not measured

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give."""
        for name, bounds, value in (
            ("saturating_cpus", figures.CPU_COUNT, self.cpu.saturating_cpus),
            ("process_gib", figures.HOST_MEM_GIB, self.process_gib or 0),
        ):
            if fault := bounds.fault(value):
                raise SensitivityError(f"sensitivity of {self.name!r}: {name} {fault}")

    @property
    def demand(self) -> Demand:
        """The least CPU count and memory that saturate."""
        cpus, dataset = self.cpu.saturating_cpus, self.dataset
        cache_gib = None if dataset is None else saturating_cache_gib(dataset, self.cpu.throughput(cpus))
        return Demand(cpus, cache_gib, self.process_gib)

    def to_document(self) -> Document:
        """As the store keeps it."""
        body = asdict(self.cpu)
        body["points"] = list(body["points"])
        body |= {"pinned": self.pinned, "dataset": None if self.dataset is None else asdict(self.dataset)}
        return Document(self.name, self.measured_at, {**body, "process_gib": self.process_gib})

    @classmethod
    def from_document(cls, document: Document) -> "SensitivityProfile":
        """Read what `to_document` made.

        Raises:
            SensitivityError: It is something else.
        """
        body = document.body
        try:
            cpu = CpuSensitivity(
                points=tuple(Point(**point) for point in body["points"]),
                saturating_cpus=int(body["saturating_cpus"]),
                undecided_cpus=int(body["undecided_cpus"]),
                measurements=int(body["measurements"]),
            )
            dataset = Dataset(**body["dataset"]) if body["dataset"] else None
            return cls(document.name, document.measured_at, cpu, bool(body["pinned"]), dataset, body["process_gib"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SensitivityError(
                f"the stored sensitivity of {document.name!r} cannot be read ({error}); measure it again"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """The stored figures and what follows from them, for --json."""
        demand = self.demand
        known: dict[str, Any] = {"name": self.name, "measured_at": self.measured_at, **self.to_document().body}
        known["curve"] = list(self.cpu.curve)
        known["demand"] = {**asdict(demand), "mem_gib": demand.mem_gib}
        if self.dataset is not None:
            caches_gib = cache_sizes(self.dataset)
            known["memory"] = {"cache_gib": caches_gib, "throughput": matrix(self.dataset, self.cpu.curve, caches_gib)}
        return known


def stored(store: ProfileStore, name: str) -> SensitivityProfile | None:
    """Return the stored sensitivity of a job, None without one.

    Raises:
        SensitivityError: It cannot be read.
    """
    documents = (document for document in store.documents(SENSITIVITIES) if document.name == name)
    return next(map(SensitivityProfile.from_document, documents), None)
