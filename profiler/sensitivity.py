"""A job's sensitivity to CPUs and memory, as a document of the profile store.

The CPU axis is measured at a few counts only (optimistic profiling). At full memory the throughput rises with the CPU
count until something else limits it. Where it stops rising is found by bisection (Synergy, section 3.1). Bisection
presumes monotony alone: published curves jump (a job may need six cores for its sixth worker), so the shape between two
points does not say which counts to skip.

The memory axis is computed. Each item is read once per epoch, in random order. A cache that replaces its items
evicts items before they come round again; one that keeps a fixed set (MinIO) hits for that set in every epoch, so that
the hit rate is its size over the dataset's (Synergy, section 3.1; Mohan et al., "Analyzing and Mitigating Data Stalls
in DNN Training", VLDB 2021, section 5.1). The rest comes from storage, whose bandwidth is measured once.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from muri.clock import MIB_PER_GIB
from muri.profiler.errors import SensitivityError
from muri.profiler.records import (
    BANDWIDTH_MIB_PER_S,
    BATCH_MIB,
    CPU_COUNT,
    DATASET_GIB,
    HOST_MEM_GIB,
    PER_SECOND,
    SHARE,
    VARIATION,
    Bounds,
    Document,
    first_fault,
)

Check = tuple[str, Bounds, float]

MOST_POINTS: Final = 8
"""No job is measured more often than this (Synergy, section 3.1: 8 points instead of 24 × 10)."""

FEW_CPUS: Final = 6
"""Below this many counts half a sweep cannot tell them apart."""

DOUBT: Final = 2.0
"""A count nearer to the threshold than this many standard errors is measured a second time."""

RUN_SPREAD: Final = 0.02
"""Throughput differs by about this share from one run to the next, however steady each run is."""

GAIN: Final = 0.10
"""A count saturates when the most CPUs would give less than this on top (Synergy, section 3.1)."""

LEAST_SPREAD: Final = 1e-4
"""No mean of a few iterations is known better than this; it keeps weights finite."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one measurement."""

    throughput: float  # Iterations per second
    spread: float = 0.0  # Standard error of the throughput as a share of it

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give."""
        _refuse(_of_throughput(self.throughput, self.spread))

    @property
    def weight(self) -> float:
        """How much it counts in a mean: the inverse of its variance."""
        return 1 / (max(self.spread, LEAST_SPREAD) * self.throughput) ** 2


@dataclass(frozen=True, slots=True)
class Point:
    """The throughput on one CPU count."""

    cpus: int
    throughput: float  # Iterations per second
    spread: float = 0.0  # Standard error of the throughput as a share of it
    measurements: int = 1  # How many measurements went into it

    def __post_init__(self) -> None:
        """Refuse what no measurement can give, such as an old file's nonsense."""
        _refuse((("a number of CPUs", CPU_COUNT, self.cpus), *_of_throughput(self.throughput, self.spread)))


def _of_throughput(throughput: float, spread: float) -> tuple[Check, Check]:
    return ("a throughput (iterations/s)", PER_SECOND, throughput), ("a throughput's spread", VARIATION, spread)


def _refuse(checks: Iterable[Check], of: str = "") -> None:
    if fault := first_fault(checks):
        raise SensitivityError(of + fault)


def combined(cpus: int, measured: Sequence[Measured]) -> Point:
    """Several measurements of one count as one point, each weighted by its certainty.

    The spread is at least what the scatter among them says: measurements that disagree more than
    they claim are worth less than they claim.
    """
    total = sum(item.weight for item in measured)
    mean = sum(item.weight * item.throughput for item in measured) / total
    claimed = 1 / math.sqrt(total) / mean
    if len(measured) == 1:
        return Point(cpus, mean, measured[0].spread)
    scatter = math.sqrt(sum((item.throughput - mean) ** 2 for item in measured) / (len(measured) - 1)) / mean
    return Point(cpus, mean, max(claimed, scatter / math.sqrt(len(measured))), len(measured))


def monotone(points: Iterable[Point]) -> tuple[Point, ...]:
    """The nearest curve that never falls: more CPUs do no harm, so a fall is noise.

    It pools neighbors in the wrong order into their weighted mean (pool adjacent violators).
    """
    pools: list[list[Point]] = []
    for point in sorted(points, key=lambda item: item.cpus):
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1].extend(last)
    return tuple(Point(point.cpus, _mean(pool), point.spread, point.measurements) for pool in pools for point in pool)


def _mean(pool: Sequence[Point]) -> float:
    if len(pool) == 1:
        return pool[0].throughput
    weights = [Measured(point.throughput, point.spread).weight for point in pool]
    return sum(weight * point.throughput for weight, point in zip(weights, pool, strict=True)) / sum(weights)


def interpolated(points: Sequence[Point], cpus: int) -> float:
    """Throughput at any count, of points by ascending count: straight between them, in proportion below the first."""
    if cpus <= points[0].cpus:
        return points[0].throughput * cpus / points[0].cpus
    for left, right in itertools.pairwise(points):
        if cpus <= right.cpus:
            share = (cpus - left.cpus) / (right.cpus - left.cpus)
            return left.throughput + share * (right.throughput - left.throughput)
    return points[-1].throughput


def saturating_cpus(points: Iterable[Point]) -> int:
    """The least measured count from which the most CPUs would give less than `GAIN` on top."""
    repaired = monotone(points)
    return next(point.cpus for point in repaired if repaired[-1].throughput < (1 + GAIN) * point.throughput)


Measure = Callable[[int], Measured]


@dataclass(frozen=True, slots=True)
class CpuSensitivity:
    """How a job's throughput follows its CPU count at full memory."""

    points: tuple[Point, ...]  # What was measured, by CPU count, repaired so that it never falls
    saturating_cpus: int  # The least count from which the most CPUs give less than the gain on top
    # How many counts below that one were neither measured nor ruled out; 0 unless the measurements ran out
    undecided_cpus: int
    measurements: int  # How many there were

    @property
    def max_cpus(self) -> int:
        """The greatest count."""
        return self.points[-1].cpus

    def throughput(self, cpus: int) -> float:
        """Iterations per second at any count, interpolated where it was not measured."""
        return interpolated(self.points, cpus)

    @property
    def curve(self) -> tuple[float, ...]:
        """Iterations per second at 1, 2, … `max_cpus` CPUs."""
        return tuple(self.throughput(cpus) for cpus in range(1, self.max_cpus + 1))


def bisect(measure: Measure, max_cpus: int) -> CpuSensitivity:
    """Find the least CPU count that saturates a job.

    The greatest count is measured first, then the middle of the undecided range, until the least
    saturating count and its lower neighbor are known: 1 + ⌈log2(max_cpus)⌉ measurements. There are
    never more than half of a full sweep's, which leaves one count undecided where the maximum is 6, 7
    or 9; the greater one counts then. Measurements that are left over repeat counts so near to the
    threshold that scatter could have decided.

    Raises:
        SensitivityError: The greatest count or a measurement makes no sense.
    """
    if max_cpus < 1:
        raise SensitivityError(f"max_cpus is {max_cpus}; it must be ≥ 1")
    # Half a sweep; for few counts, where half would be off by more than one, all that bisection needs.
    exact = 1 + math.ceil(math.log2(max_cpus))
    budget = min(MOST_POINTS, exact if max_cpus < FEW_CPUS else max_cpus // 2)
    taken: dict[int, list[Measured]] = {}
    used = 0
    while used < budget and (cpus := _next_count(taken, max_cpus)) is not None:
        taken.setdefault(cpus, []).append(measure(cpus))
        used += 1
    points = _points(taken)
    below, least = _bounds(points)
    return CpuSensitivity(points, least, max(0, least - below - 1), used)


def _points(taken: Mapping[int, list[Measured]]) -> tuple[Point, ...]:
    return monotone(combined(cpus, measured) for cpus, measured in taken.items())


def _bounds(points: tuple[Point, ...]) -> tuple[int, int]:
    """The greatest count that does not saturate (0 if all do) and the least that does."""
    least = saturating_cpus(points)
    return max((point.cpus for point in points if point.cpus < least), default=0), least


def _next_count(taken: Mapping[int, list[Measured]], max_cpus: int) -> int | None:
    """The count to measure next, None when all is decided."""
    if not taken:
        return max_cpus
    points = _points(taken)
    below, least = _bounds(points)
    if least - below > 1:
        return (below + least) // 2
    doubtful = [point for point in points if point.measurements == 1 and _in_doubt(points, point)]
    if not doubtful:
        return None
    nearest = min(doubtful, key=lambda point: _distance(points, point))
    greatest = points[-1]  # what all are compared with
    return max_cpus if greatest.measurements == 1 and greatest.spread > nearest.spread else nearest.cpus


def _distance(points: tuple[Point, ...], point: Point) -> float:
    """How far a point is from the threshold, as a share of it."""
    return abs((1 + GAIN) * point.throughput / points[-1].throughput - 1)


def _in_doubt(points: tuple[Point, ...], point: Point) -> bool:
    spreads = (point.spread, points[-1].spread)
    if point is points[-1] or not any(spreads):
        return False
    return _distance(points, point) < DOUBT * math.hypot(*(max(spread, RUN_SPREAD) for spread in spreads))


SENSITIVITIES: Final = "sensitivity"
"""Kind of the store's documents that hold sensitivities."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset, and how fast it is read."""

    dataset_gib: float  # Size of the whole dataset
    batch_mib: float  # What one iteration reads of it
    storage_mib_per_s: float  # Measured bandwidth of its storage
    # Share of the shorter of reading and the rest of the iteration that is hidden behind the other: 1 where batches are
    # prefetched, 0 where the loop waits for each
    overlap: float = 1.0

    def __post_init__(self) -> None:
        """Refuse figures that no dataset has."""
        _refuse(
            (
                ("dataset_gib", DATASET_GIB, self.dataset_gib),
                ("batch_mib", BATCH_MIB, self.batch_mib),
                ("storage_mib_per_s", BANDWIDTH_MIB_PER_S, self.storage_mib_per_s),
                ("overlap", SHARE, self.overlap),
            )
        )
        if self.batch_mib > self.dataset_gib * MIB_PER_GIB:
            raise SensitivityError(
                f"an iteration reads {self.batch_mib:g} MiB of a dataset of only {self.dataset_gib:g} GiB"
            )


def throughput(dataset: Dataset, cpu_throughput: float, cache_gib: float) -> float:
    """Iterations per second with so much cache, on CPUs that give `cpu_throughput` at full memory.

    Where batches are prefetched, reading runs beside everything else and the slower of the two sets
    the pace: the least of the CPU curve and the storage curve. Where the loop waits for each batch,
    their times add up. The measured overlap lies in between, and so does the result.
    """
    hit_rate = min(1.0, max(0.0, cache_gib) / dataset.dataset_gib)
    compute_s, read_s = 1 / cpu_throughput, (1 - hit_rate) * dataset.batch_mib / dataset.storage_mib_per_s
    return 1 / (max(compute_s, read_s) + (1 - dataset.overlap) * min(compute_s, read_s))


def matrix(dataset: Dataset, cpu_curve: Sequence[float], caches_gib: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Throughput for each CPU count (rows) and cache size (columns): one measured axis, one computed."""
    return tuple(tuple(throughput(dataset, at_full, gib) for gib in caches_gib) for at_full in cpu_curve)


def saturating_cache_gib(dataset: Dataset, cpu_throughput: float) -> float:
    """The least cache from which a cache of the whole dataset gives less than `GAIN` on top, in GiB.

    The model solved for the cache: the iteration may take (1 + GAIN) × its time at full memory.
    """
    compute_s = 1 / cpu_throughput
    read_s = (1 + GAIN) * compute_s - (1 - dataset.overlap) * compute_s  # when reading is the longer one
    if dataset.overlap < 1 and GAIN * compute_s / (1 - dataset.overlap) <= compute_s:
        read_s = GAIN * compute_s / (1 - dataset.overlap)
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


def cache_sizes(dataset: Dataset) -> tuple[float, ...]:
    """Five evenly spaced cache sizes from nothing to the whole dataset, in GiB."""
    return tuple(dataset.dataset_gib * index / 4 for index in range(5))


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
        cpus = ("saturating_cpus", CPU_COUNT, self.cpu.saturating_cpus)
        _refuse((cpus, ("process_gib", HOST_MEM_GIB, self.process_gib or 0)), f"sensitivity of {self.name!r}: ")

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
        """Read what `to_document` made (SensitivityError: it is something else)."""
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
