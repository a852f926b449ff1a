"""Least attained service first: short jobs finish soon although nobody knows which ones are short."""

from muri.policies import priority
from muri.policies.schedulers.base import EXCLUSIVE, QueuePolicy
from muri.policies.types import PlanRequest


class Las(QueuePolicy):
    """Least attained service first: whoever has run for the shortest time."""

    name = "las"
    order = "attained time"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By attained seconds."""
        return priority.las


class TwoDimensionalLas(QueuePolicy):
    """Least attained GPU-seconds first, compared continuously.

    Source: Tiresias (Gu et al., NSDI 2019), 2D-LAS, without its discrete queues.
    """

    name = "2d-las"
    order = "attained time × GPUs"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By attained GPU-seconds."""
        return priority.two_dimensional_las
