"""What it costs to put a job on a GPU: memory that fills up, and jobs that slow each other down."""

from collections.abc import Iterable
from dataclasses import dataclass

from muri.policies.cycle.packed import mem_gib_of
from muri.policies.horus.slowdown import slowdown
from muri.policies.types import PlanJob


@dataclass(frozen=True, slots=True)
class Load:
    """The jobs of one GPU.

    Attributes:
        count: How many they are.
        used_gib: Memory that they need, added up.
        utilization: Their utilisations alone, added up; 1 is one GPU's worth.
    """

    count: int = 0
    used_gib: float = 0.0
    utilization: float = 0.0

    def plus(self, job: PlanJob) -> "Load":
        """The same GPU with one more job on it."""
        return Load(self.count + 1, self.used_gib + mem_gib_of(job), self.utilization + utilization_of(job))

    @staticmethod
    def of(jobs: Iterable[PlanJob]) -> "Load":
        """A GPU with these jobs on it."""
        load = Load()
        for job in jobs:
            load = load.plus(job)
        return load

    def speed(self, gpu_type: str = "") -> float:
        """Speed of each of the GPU's jobs, 1 = as fast as alone."""
        return 1.0 if self.count < 2 else 1.0 / slowdown(100 * self.utilization, gpu_type)


def utilization_of(job: PlanJob) -> float:
    """Share of its GPUs' time that a job computes on them alone, 0 to 1.

    Measured or predicted where the request tells, else the propagate share of the profile's iteration; all of it
    where there is nothing to go by, so that nobody is taken for idle.
    """
    if job.gpu_utilization is not None:
        return job.gpu_utilization
    if job.profile is None or job.profile.iteration_s <= 0:
        return 1.0
    return min(1.0, job.profile.propagate_s / job.profile.iteration_s)


def gpu_type_of(job: PlanJob) -> str:
    """The type of GPU that a job's profile is for; empty while it has none."""
    return "" if job.profile is None else job.profile.key.gpu_type


def knows_utilization(job: PlanJob) -> bool:
    """Whether a job's utilisation is measured, predicted or follows from its profile."""
    return job.gpu_utilization is not None or job.profile is not None


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of a placement.

    f of a job alone is 1, for nobody slows it down: an idle GPU is always cheaper than the same one in use.

    Source: Horus (TPDS 2021): ω1·(used memory + M_j)/capacity + ω2·f(cumulative utilisation).

    Attributes:
        memory_weight: ω1.
        slowdown_weight: ω2.
    """

    memory_weight: float
    slowdown_weight: float

    def of(self, load: Load, capacity_gib: float, gpu_type: str = "") -> float:
        """Cost of one GPU with a job already added to it.

        Args:
            load: The GPU's jobs, the new one among them.
            capacity_gib: Memory of the GPU; infinite when unknown, which makes its memory cost nothing.
            gpu_type: Chooses f; empty: unknown.
        """
        memory = load.used_gib / capacity_gib
        return self.memory_weight * memory + self.slowdown_weight / load.speed(gpu_type)


def pays(before: Load, after: Load, min_speedup: float, gpu_type: str = "") -> bool:
    """Whether a GPU's jobs get at least as much done together with a newcomer as without it.

    Not in the paper, whose only limit is memory; without it jobs pile up on a full GPU until all of them together
    are slower than one after the other.

    Args:
        before: The GPU's jobs without the newcomer.
        after: And with it.
        min_speedup: How many times as much they must get done, ≥ 1.
        gpu_type: Chooses f; empty: unknown.
    """
    if not before.count:
        return True
    return after.count * after.speed(gpu_type) >= min_speedup * before.count * before.speed(gpu_type)
