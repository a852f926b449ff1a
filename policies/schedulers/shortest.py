"""The shortest job first, three ways; all need to know durations."""

from muri.policies import priority
from muri.policies.schedulers.base import EXCLUSIVE, EXCLUSIVE_TO_THE_END, QueuePolicy
from muri.policies.types import PlanRequest


class Sjf(QueuePolicy):
    """Shortest job first: whoever is short in all; what runs is left to finish."""

    name = "sjf"
    order = "whole duration"
    fixed = EXCLUSIVE_TO_THE_END

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By attained plus remaining seconds."""
        return priority.sjf


class Srtf(QueuePolicy):
    """Shortest remaining time first: whoever is done soonest."""

    name = "srtf"
    order = "remaining time"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining seconds."""
        return priority.srtf


class Srsf(QueuePolicy):
    """Shortest remaining service first: whoever needs the fewest GPU-seconds."""

    name = "srsf"
    order = "remaining time × GPUs"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining GPU-seconds."""
        return priority.srsf
