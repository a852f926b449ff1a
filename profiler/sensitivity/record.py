"""A job's sensitivity as a document of the profile store."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from muri.profiler import figures
from muri.profiler.errors import SensitivityError
from muri.profiler.sensitivity.bisection import CpuSensitivity, Point
from muri.profiler.sensitivity.memory_axis import Dataset, cache_sizes, matrix, saturating_cache_gib
from muri.profiler.store import Document, ProfileStore

KIND: Final = "sensitivity"


@dataclass(frozen=True, slots=True)
class Demand:
    """The least that saturates a job's throughput (Synergy's demand vector).

    Attributes:
        cpus: Cores.
        cache_gib: Memory for a cache of the dataset; None where the dataset is not known.
        process_gib: Memory of the job's own processes; None where it was not measured.
    """

    cpus: int
    cache_gib: float | None = None
    process_gib: float | None = None

    @property
    def mem_gib(self) -> float | None:
        """Memory in all; None where nothing of it is known."""
        known = [part for part in (self.cache_gib, self.process_gib) if part is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class SensitivityProfile:
    """How a job's throughput depends on CPU and memory.

    Attributes:
        name: The job's name.
        measured_at: UTC time, ISO-8601.
        cpu: Throughput over the CPU count, measured.
        pinned: Whether the kernel enforced the counts; otherwise the script was only told them.
        dataset: What the memory axis is computed from; None where it is not known.
        process_gib: Peak memory of the job's own processes; None where it was not measured.
    """

    name: str
    measured_at: str
    cpu: CpuSensitivity
    pinned: bool = True
    dataset: Dataset | None = None
    process_gib: float | None = None

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give.

        Raises:
            SensitivityError: A figure is outside of what `muri.profiler.figures` allows.
        """
        for name, bounds, value in (
            ("saturating_cpus", figures.CPU_COUNT, self.cpu.saturating_cpus),
            ("process_gib", figures.HOST_MEM_GIB, self.process_gib or 0),
        ):
            if fault := bounds.fault(value):
                raise SensitivityError(f"sensitivity of {self.name!r}: {name} {fault}")

    @property
    def demand(self) -> Demand:
        """The least CPU count and memory that saturate."""
        cpus = self.cpu.saturating_cpus
        cache_gib = None
        if self.dataset is not None:
            cache_gib = saturating_cache_gib(self.dataset, self.cpu.throughput(cpus))
        return Demand(cpus, cache_gib, self.process_gib)

    def to_document(self) -> Document:
        """As the store keeps it."""
        body = {
            "points": [asdict(point) for point in self.cpu.points],
            "saturating_cpus": self.cpu.saturating_cpus,
            "undecided_cpus": self.cpu.undecided_cpus,
            "measurements": self.cpu.measurements,
            "pinned": self.pinned,
            "dataset": None if self.dataset is None else asdict(self.dataset),
            "process_gib": self.process_gib,
        }
        return Document(self.name, self.measured_at, body)

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
    documents = (document for document in store.documents(KIND) if document.name == name)
    return next(map(SensitivityProfile.from_document, documents), None)
