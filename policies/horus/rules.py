"""What a GPU costs a job: by memory and predicted slow-down (Horus), or by memory alone (its baselines)."""

from dataclasses import dataclass
from math import isinf
from typing import Protocol

from muri.policies.horus.cost import CostModel, Load, pays
from muri.policies.reason import Reason


class Rule(Protocol):
    """One way of choosing among GPUs that have the memory."""

    def price(self, before: Load, after: Load, capacity_gib: float, gpu_type: str) -> float | None:
        """Price of a GPU, the lower the better; None where the job must not come.

        Args:
            before: The GPU's jobs without the new one.
            after: And with it.
            capacity_gib: Memory of the GPU; infinite when unknown.
            gpu_type: Chooses the fit of the slow-down; empty: unknown.
        """
        ...

    def why(self, price: float, load: Load, capacity_gib: float, gpu_type: str) -> Reason:
        """Why a place was taken, with the load of its fullest GPU."""
        ...

    def nobody_to_join(self, mem_gib: float) -> Reason:
        """Why a job that may share, and needs so much memory, finds nobody."""
        ...


@dataclass(frozen=True, slots=True)
class ByCost:
    """Horus's cost, where sharing gets at least as much done as waiting.

    Attributes:
        cost: The cost.
        min_speedup: How many times as much a GPU's jobs must get done with a newcomer as without it.
    """

    cost: CostModel
    min_speedup: float

    def price(self, before: Load, after: Load, capacity_gib: float, gpu_type: str) -> float | None:
        """See `Rule`."""
        if not pays(before, after, self.min_speedup, gpu_type):
            return None
        return self.cost.of(after, capacity_gib, gpu_type)

    def why(self, price: float, load: Load, capacity_gib: float, gpu_type: str) -> Reason:
        """See `Rule`."""
        return Reason(
            "the cheapest place: cost {:.2f} with {}, and {:.0f} % use (f = {:.2f})",
            (price, _memory(load, capacity_gib), 100 * load.utilization, 1 / load.speed(gpu_type)),
        )

    def nobody_to_join(self, mem_gib: float) -> Reason:
        """See `Rule`."""
        return Reason(
            "beside jobs that may share with it, no GPU has {:.1f} GiB left and gets more done with it than without",
            (mem_gib,),
        )


@dataclass(frozen=True, slots=True)
class ByMemory:
    """Opportunistic bin packing: an idle GPU, else the one that memory fills best, however busy it is."""

    def price(self, before: Load, after: Load, capacity_gib: float, gpu_type: str) -> float | None:
        """See `Rule`."""
        return 2.0 - after.used_gib / capacity_gib if before.count else 0.0

    def why(self, price: float, load: Load, capacity_gib: float, gpu_type: str) -> Reason:
        """See `Rule`."""
        if load.count < 2:
            return Reason("these GPUs are idle")
        return Reason("too few GPUs are idle, and here memory fits best: {}", (_memory(load, capacity_gib),))

    def nobody_to_join(self, mem_gib: float) -> Reason:
        """See `Rule`."""
        return Reason("beside jobs that may share with it, no GPU has {:.1f} GiB left", (mem_gib,))


def _memory(load: Load, capacity_gib: float) -> str:
    of = "" if isinf(capacity_gib) else f" of {capacity_gib:.1f}"
    return f"{load.used_gib:.1f}{of} GiB needed"
