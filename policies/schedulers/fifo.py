"""First in, first out."""

from muri.policies import priority
from muri.policies.schedulers.base import EXCLUSIVE_TO_THE_END, QueuePolicy
from muri.policies.types import PlanRequest


class Fifo(QueuePolicy):
    """First in, first out; smaller jobs may pass a larger one (backfill)."""

    name = "fifo"
    order = "submit time"
    fixed = EXCLUSIVE_TO_THE_END

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By submit time."""
        return priority.fifo
