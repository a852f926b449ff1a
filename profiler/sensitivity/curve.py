"""Throughput over the CPU count, from measurements that scatter."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muri.profiler.sensitivity.errors import SensitivityError

GAIN: Final = 0.10
"""A count saturates when the most CPUs would give less than this on top (Synergy, section 3.1)."""

LEAST_SPREAD: Final = 1e-4
"""No mean of a few iterations is known better than this; it keeps weights finite."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement says.

    Attributes:
        throughput: Iterations per second.
        spread: Standard error of the throughput as a share of it.
    """

    throughput: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no measurement can give.

        Raises:
            SensitivityError: The throughput is not above 0, or the spread is negative.
        """
        if not (math.isfinite(self.throughput) and self.throughput > 0):
            raise SensitivityError(f"a throughput of {self.throughput} iterations/s was measured; it must be > 0")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise SensitivityError(f"a throughput's spread is {self.spread}; it must be ≥ 0")

    @property
    def weight(self) -> float:
        """How much it counts in a mean: the inverse of its variance."""
        return 1 / (max(self.spread, LEAST_SPREAD) * self.throughput) ** 2


@dataclass(frozen=True, slots=True)
class Point:
    """What is known of one CPU count.

    Attributes:
        cpus: The count.
        throughput: Iterations per second.
        spread: Standard error of the throughput as a share of it.
        measurements: How many measurements went into it.
    """

    cpus: int
    throughput: float
    spread: float = 0.0
    measurements: int = 1


def combined(cpus: int, measured: Sequence[Measured]) -> Point:
    """Several measurements of one count as one point, each weighted by what it is worth.

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
    """The nearest curve that never falls: more CPUs do no harm, what looks like it is noise.

    Pools neighbours that are the wrong way round into their weighted mean (pool adjacent violators).
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
    """Throughput at any count: straight between measured ones, in proportion below the first.

    Args:
        points: By ascending CPU count, none of them falling; see `monotone`.
        cpus: The count, at least 1.
    """
    if cpus <= points[0].cpus:
        return points[0].throughput * cpus / points[0].cpus
    for left, right in itertools.pairwise(points):
        if cpus <= right.cpus:
            share = (cpus - left.cpus) / (right.cpus - left.cpus)
            return left.throughput + share * (right.throughput - left.throughput)
    return points[-1].throughput


def saturates(points: Sequence[Point], point: Point, gain: float = GAIN) -> bool:
    """Whether the most CPUs would give less than `gain` on top of what the point's give."""
    return points[-1].throughput < (1 + gain) * point.throughput


def saturating_cpus(points: Iterable[Point], gain: float = GAIN) -> int:
    """The least measured count that saturates."""
    repaired = monotone(points)
    return next(point.cpus for point in repaired if saturates(repaired, point, gain))
