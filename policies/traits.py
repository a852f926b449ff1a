"""What sibling systems know of a job beyond its stage profile: appetite for CPUs, memory and batch size. Pure."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from muri.errors import UsageError


class TraitError(UsageError):
    """A trait holds figures that cannot be true."""


class Demand(NamedTuple):
    """CPUs and GiB of host memory, for each GPU of a job or for a whole job."""

    cpus: float
    mem_gib: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Throughput of a job over the CPUs and the host memory that it has for each of its GPUs.

    Source: Synergy (Mohan et al., OSDI 2022), section 3.1: the resource sensitivity matrix.

    Attributes:
        cpus: CPUs per GPU, ascending.
        mem_gib: Host memory per GPU, ascending.
        throughput: Rows by `cpus`, columns by `mem_gib`, in any unit; more resources never give less.
        demand: The least CPUs and memory per GPU that saturate the throughput, where they are known better
            than from the matrix.
    """

    cpus: tuple[float, ...]
    mem_gib: tuple[float, ...]
    throughput: tuple[tuple[float, ...], ...]
    demand: Demand

    def __post_init__(self) -> None:
        """Refuse a matrix that doesn't fit its axes.

        Raises:
            TraitError: Says which axis or figure is wrong.
        """
        for name, axis in (("cpus", self.cpus), ("mem_gib", self.mem_gib)):
            if not axis or axis[0] < 0 or not all(low < high for low, high in pairwise((*axis, math.inf))):
                raise TraitError(f"{name} of a sensitivity is {axis}; it must be ascending, finite and ≥ 0")
        shape = {len(row) for row in self.throughput}
        if len(self.throughput) != len(self.cpus) or shape != {len(self.mem_gib)}:
            raise TraitError(f"a sensitivity needs {len(self.cpus)} rows of {len(self.mem_gib)} throughputs")
        if not all(0 <= value < math.inf for row in self.throughput for value in row):
            raise TraitError("a throughput of a sensitivity is negative or not finite")
        if not (0 < self.demand.cpus < math.inf and 0 <= self.demand.mem_gib < math.inf):
            raise TraitError(f"the demand of a sensitivity is {self.demand}; it must be finite, its CPUs above 0")

    def throughput_at(self, cpus: float, mem_gib: float) -> float:
        """Throughput with so many CPUs and GiB per GPU; linear between the points, constant beyond them."""
        row, row_share = _place(self.cpus, cpus)
        column, column_share = _place(self.mem_gib, mem_gib)
        below = _between(self.throughput[row], column, column_share)
        if not row_share:
            return below
        return below + row_share * (_between(self.throughput[row + 1], column, column_share) - below)


def _place(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The point at or below a value, and how far the value lies on the way to the next."""
    index = bisect_right(axis, value) - 1
    if index < 0:
        return 0, 0.0
    if index == len(axis) - 1:
        return index, 0.0
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def _between(values: tuple[float, ...], index: int, share: float) -> float:
    return values[index] + share * (values[index + 1] - values[index]) if share else values[index]


@dataclass(frozen=True, slots=True)
class BatchModel:
    """How a job's iteration time and GPU memory follow from its batch size.

    With s accumulation steps an iteration takes (s − 1)·t_comp(B/s) + (t_comp(B/s)^δ + t_comm^δ)^(1/δ), where
    t_comp(B) = α + βB.

    Source: SJF-BSBF ("wise resource sharing"), its performance model.

    Attributes:
        batch_size: B, samples per GPU and iteration.
        compute_fixed_s: α.
        compute_per_sample_s: β.
        communicate_s: t_comm of one iteration; 0 on one GPU.
        overlap_exponent: δ ≥ 1: 1 adds computing and communicating up, infinity hides the shorter one.
        fixed_mem_gib: GPU memory that doesn't depend on the batch: weights, gradients, optimizer, context.
        mem_gib_per_sample: GPU memory of each sample in flight.
        max_accumulate_steps: Most steps that the job's script can be split into; 1: it can't accumulate.
    """

    batch_size: int
    compute_fixed_s: float
    compute_per_sample_s: float
    communicate_s: float = 0.0
    overlap_exponent: float = 1.0
    fixed_mem_gib: float = 0.0
    mem_gib_per_sample: float = 0.0
    max_accumulate_steps: int = 1

    def __post_init__(self) -> None:
        """Refuse figures that cannot be true.

        Raises:
            TraitError: Names the figure.
        """
        for name in ("compute_fixed_s", "compute_per_sample_s", "communicate_s", "fixed_mem_gib", "mem_gib_per_sample"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TraitError(f"{name} of a batch model is {getattr(self, name)}; it must be finite and ≥ 0")
        if self.batch_size < 1 or self.max_accumulate_steps < 1:
            raise TraitError("batch_size and max_accumulate_steps of a batch model must be ≥ 1")
        if not self.overlap_exponent >= 1:
            raise TraitError(f"overlap_exponent of a batch model is {self.overlap_exponent}; it must be ≥ 1")

    def iteration_s(self, steps: int = 1) -> float:
        """Seconds of an iteration of the whole batch in `steps` accumulation steps."""
        compute_s = self.compute_fixed_s + self.compute_per_sample_s * self.batch_size / steps
        return (steps - 1) * compute_s + _overlapped(compute_s, self.communicate_s, self.overlap_exponent)

    def mem_gib(self, steps: int = 1) -> float:
        """GPU memory with `steps` accumulation steps."""
        return self.fixed_mem_gib + self.mem_gib_per_sample * math.ceil(self.batch_size / steps)

    def speed(self, steps: int) -> float:
        """Iterations per second with `steps` accumulation steps, relative to the undivided batch.

        1 where iterations take no time at all: such a model says nothing.
        """
        divided_s = self.iteration_s(steps)
        return self.iteration_s() / divided_s if divided_s > 0 else 1.0


def _overlapped(compute_s: float, communicate_s: float, exponent: float) -> float:
    longer_s, shorter_s = max(compute_s, communicate_s), min(compute_s, communicate_s)
    if longer_s <= 0 or math.isinf(exponent):
        return longer_s
    # Scaled by the longer one, so that no power overflows.
    return float(longer_s * (1.0 + (shorter_s / longer_s) ** exponent) ** (1.0 / exponent))
