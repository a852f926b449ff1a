"""Muri made for the average job completion time."""

from types import MappingProxyType

from muri.policies import priority
from muri.policies.schedulers.base import QueuePolicy
from muri.policies.types import PlanRequest


class MuriJct(QueuePolicy):
    """Muri for the average JCT: short jobs are not slowed for long ones.

    What a member's speed is worth falls with the service that the job still needs (or has received,
    where durations are unknown), groups are chosen all at once, and the speed model is the
    work-conserving one. Method and speed model can be set otherwise; the objective can't.
    """

    name = "muri-jct"
    order = "as muri-s or muri-l"
    defaults = MappingProxyType({"grouping": "optimal", "speed_model": "fair"})
    fixed = MappingProxyType({"objective": "jct"})

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining GPU-seconds when all durations are known, else by attained ones."""
        return priority.srsf_or_las(request)
