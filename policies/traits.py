"""What policies know of a job beyond its stage profile: CPUs and memory, batch size, goodput, speeds of pairs.

Hosts that plan nothing import it with the records of a plan, so it does without NumPy.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

from muri.errors import UsageError
from muri.profiler.records import StageProfile

# Gradient noise scale φ, in batches of the size that the job asked for. Pollux measures φ while a job trains; here it
# is the same for all jobs: at φ = 4 a batch twice as large makes 83 % of the progress per sample.
NOISE_SCALE: Final = 4.0
# Time that synchronizing 2 GPUs adds to a job measured on one, over its iteration there: the median of the eight
# measured models in Muri's table of profiles.
FIRST_SYNC_SHARE: Final = 0.1
_MOST_SYNC_SHARE: Final = 0.9  # Upper limit, or one GPU would look infinitely fast
_LEAST_GAIN: Final = 0.10  # Synergy's profiler stops where one more CPU gains less (OSDI 2022, section 3.1)
_MOST_POINTS: Final = 64
_FRACTIONS: Final = (0.25, 0.5, 0.75)
_BATCH_SCALES: Final = 8  # Batch sizes that are tried between the one asked for and the largest


class TraitError(UsageError):
    """A trait has an impossible figure."""


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
        demand: The least CPUs and memory per GPU that saturate the throughput.
    """

    cpus: tuple[float, ...]
    mem_gib: tuple[float, ...]
    throughput: tuple[tuple[float, ...], ...]
    demand: Demand

    def __post_init__(self) -> None:
        """Refuse a matrix that doesn't fit its axes."""
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
        """Throughput with these CPUs and GiB per GPU; linear between the points, constant beyond them."""
        row, row_share = _place(self.cpus, cpus)
        column, share = _place(self.mem_gib, mem_gib)
        rows = self.throughput[row : row + 2] if row_share else (self.throughput[row],)
        reached = [each[column] + share * (each[column + 1] - each[column]) if share else each[column] for each in rows]
        return reached[0] + row_share * (reached[1] - reached[0]) if row_share else reached[0]


def _place(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The index of the point at or below a value, and how far the value lies on the way to the next."""
    index = max(0, bisect_right(axis, value) - 1)
    if value <= axis[0] or index == len(axis) - 1:
        return index, 0.0
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def derived_sensitivity(profile: StageProfile, fair: Demand, most_cpus: float) -> Sensitivity | None:
    """The sensitivity of a model without a measured one; None where the number of CPUs is unknown or unlimited.

    The time of the preprocess stage is taken to be inversely proportional to the CPUs, and independent of host memory.

    Args:
        profile: Measured with the GPU-proportional share.
        fair: That share, per GPU.
        most_cpus: CPUs per GPU of a job that has its nodes' CPUs to itself.
    """
    if not 0 < fair.cpus < math.inf:
        return None
    most = max(fair.cpus, most_cpus)
    step = max(1, math.ceil(most / _MOST_POINTS))
    whole = [float(count) for count in range(step, math.floor(most) + 1, step)]
    axis = tuple(sorted({*(share for share in _FRACTIONS if share < most), *whole, fair.cpus, most}))
    total_s, preprocess_s = profile.iteration_s, min(profile.preprocess_s, profile.iteration_s)
    throughput = [total_s / (total_s - preprocess_s + preprocess_s * fair.cpus / cpus) for cpus in axis]
    needs_gib = (profile.detail.host_mem_gib or 0.0) / profile.key.gpu_count
    mem_gib = min(needs_gib, fair.mem_gib) or fair.mem_gib
    demand = Demand(_saturating_cpus(axis, throughput), mem_gib if mem_gib < math.inf else 0.0)
    return Sensitivity(axis, (0.0,), tuple((value,) for value in throughput), demand)


def _saturating_cpus(axis: tuple[float, ...], throughput: list[float]) -> float:
    """The least CPUs from which on one more gains less than 10 %."""
    for (cpus, value), (more, better) in pairwise(zip(axis, throughput, strict=True)):
        if cpus >= 1 and better / value - 1 < _LEAST_GAIN * (more - cpus):
            return cpus
    return axis[-1]


@dataclass(frozen=True, slots=True)
class BatchModel:
    """How a job's iteration time and GPU memory follow from its batch size.

    With s accumulation steps an iteration takes (s − 1)·t_comp(B/s) + (t_comp(B/s)^δ + t_comm^δ)^(1/δ), where t_comp(B)
    = α + βB.

    Source: SJF-BSBF ("wise resource sharing"), its performance model.

    Attributes:
        batch_size: B, samples per GPU and iteration.
        compute_fixed_s: α.
        compute_per_sample_s: β.
        communicate_s: t_comm of one iteration; 0 on one GPU.
        overlap_exponent: δ ≥ 1: 1 adds computing and communicating up, infinity hides the shorter one.
        fixed_mem_gib: GPU memory independent of the batch: weights, gradients, optimizer, context.
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
        """Refuse impossible figures."""
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
        """Iterations per second relative to the undivided batch; 1 where iterations take no time."""
        divided_s = self.iteration_s(steps)
        return self.iteration_s() / divided_s if divided_s > 0 else 1.0


def _overlapped(compute_s: float, communicate_s: float, exponent: float) -> float:
    longer_s, shorter_s = max(compute_s, communicate_s), min(compute_s, communicate_s)
    if longer_s <= 0 or math.isinf(exponent):
        return longer_s
    # Scaled by the longer one, so that no power overflows.
    return float(longer_s * (1.0 + (shorter_s / longer_s) ** exponent) ** (1.0 / exponent))


def ring_share(gpu_count: int) -> float:
    """Data that every GPU sends in a ring all-reduce, over the size of the gradients: 2(n − 1)/n."""
    return 2.0 * (gpu_count - 1) / gpu_count


def statistical_efficiency(batch_scale: float) -> float:
    """Progress per sample relative to the batch asked for: (φ + 1)/(φ + scale) (Pollux, section 3.1, eq. 7)."""
    return (NOISE_SCALE + 1.0) / (NOISE_SCALE + batch_scale)


def model_of(batch: BatchModel | None, profile: StageProfile | None) -> BatchModel | None:
    """A job's iterations on its GPUs; None where neither a usable batch model nor a profile is known."""
    if batch is not None and batch.compute_fixed_s + batch.compute_per_sample_s > 0:
        return batch
    return None if profile is None else iteration_model(profile)


@lru_cache(maxsize=4096)
def iteration_model(profile: StageProfile) -> BatchModel:
    """The model of a stage profile; input and preprocessing count as computing, which scales with the GPUs."""
    total_s = sum(profile.stage_s)
    known = profile.key.gpu_count > 1 and total_s > 0
    share = min(_MOST_SYNC_SHARE, profile.synchronize_s / total_s) if known else 0.0
    return BatchModel(1, 0.0, profile.iteration_s * (1.0 - share), communicate_s=profile.iteration_s * share)


@lru_cache(maxsize=65_536)
def goodput(model: BatchModel, asked: int, gpu_count: int) -> float:
    """Iterations per second of the batch asked for, discounted by the loss of a larger batch; the best batch counts.

    A batch is divided among the GPUs. With more GPUs than asked for it may grow, so that they synchronize less often;
    with fewer, each GPU computes its part in several accumulation steps.

    Source: Pollux (Qiao et al., OSDI 2021), section 3.
    """
    largest = max(1.0, gpu_count / asked)
    scales = {math.pow(largest, step / _BATCH_SCALES) for step in range(_BATCH_SCALES + 1)}
    return max(scale * statistical_efficiency(scale) / _iteration_s(model, asked, gpu_count, scale) for scale in scales)


def relative_goodput(model: BatchModel, asked: int, gpu_count: int) -> float:
    """Goodput relative to that on the GPUs asked for: exactly 1 there."""
    return goodput(model, asked, gpu_count) / goodput(model, asked, asked)


def _iteration_s(model: BatchModel, asked: int, gpu_count: int, scale: float) -> float:
    """Seconds of an iteration of a scaled batch."""
    if asked == 1 < gpu_count:
        communicate_s = FIRST_SYNC_SHARE * replace(model, communicate_s=0.0).iteration_s() * ring_share(gpu_count)
    else:
        communicate_s = model.communicate_s * ring_share(gpu_count) / ring_share(asked) if gpu_count > 1 else 0.0
    per_sample_s = model.compute_per_sample_s * scale * asked / gpu_count
    scaled = replace(model, compute_per_sample_s=per_sample_s, communicate_s=communicate_s)
    return scaled.iteration_s(math.ceil(asked / gpu_count))


_MEASURING_ERROR: Final = 0.05  # How far above 1 a measured speed may lie, since measurements scatter


class InterferenceError(UsageError):
    """A table of measured interference has an impossible entry."""


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """Two models that share a GPU, and their speeds, 1 = as fast as alone."""

    model_a: str
    model_b: str
    speed_a: float
    speed_b: float

    def __post_init__(self) -> None:
        """Refuse nameless models and impossible speeds."""
        if not self.model_a or not self.model_b:
            raise InterferenceError(f"a pair needs the names of two models, not {self.model_a!r} and {self.model_b!r}")
        for model, speed in ((self.model_a, self.speed_a), (self.model_b, self.speed_b)):
            if not math.isfinite(speed) or not 0 < speed <= 1 + _MEASURING_ERROR:
                raise InterferenceError(
                    f"{self.model_a} with {self.model_b}: speed of {model} is {speed}; "
                    f"it must be above 0 and at most {1 + _MEASURING_ERROR:g} of its speed alone"
                )

    @property
    def key(self) -> tuple[str, str]:
        """Both names, in alphabetical order."""
        return (self.model_a, self.model_b) if self.model_a <= self.model_b else (self.model_b, self.model_a)

    @property
    def speeds(self) -> tuple[float, float]:
        """Both speeds in the order of `key`, at most 1; their mean where both are the same model."""
        speed_a, speed_b = min(1.0, self.speed_a), min(1.0, self.speed_b)
        if self.model_a == self.model_b:
            return ((speed_a + speed_b) / 2,) * 2
        return (speed_a, speed_b) if self.model_a < self.model_b else (speed_b, speed_a)


@dataclass(frozen=True, slots=True)
class InterferenceTable:
    """Measured pairs, found in either order.

    Two jobs of one model both get the mean of their speeds: nothing tells them apart.

    Attributes:
        rows: The measurements; repeated pairs must agree.
        pairs: Speeds by (model_a, model_b), model_a ≤ model_b, none above 1.
    """

    rows: tuple[PairSpeed, ...]
    pairs: Mapping[tuple[str, str], tuple[float, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the rows; refuse contradictions."""
        pairs: dict[tuple[str, str], tuple[float, float]] = {}
        for row in self.rows:
            found = pairs.setdefault(row.key, row.speeds)
            if found != row.speeds:
                raise InterferenceError(
                    f"{row.model_a} with {row.model_b} is there twice and differs: {found} and {row.speeds}; keep one"
                )
        object.__setattr__(self, "pairs", MappingProxyType(pairs))

    @property
    def models(self) -> frozenset[str]:
        """Names of all models."""
        return frozenset(model for pair in self.pairs for model in pair)

    def speeds(self, model_a: str, model_b: str) -> tuple[float, float] | None:
        """Speeds of two models with each other, in the order given; None when not measured."""
        if model_a <= model_b:
            return self.pairs.get((model_a, model_b))
        found = self.pairs.get((model_b, model_a))
        return None if found is None else (found[1], found[0])
