"""Muri-S and Muri-L as the paper has them, and the choice between their orders."""

from types import MappingProxyType
from typing import Final

from muri.policies import priority
from muri.policies.cycle.planner import plan_queue
from muri.policies.schedulers.base import OptionValues, QueuePolicy
from muri.policies.types import Plan, PlanRequest

PAPER: Final[OptionValues] = MappingProxyType(
    {"grouping": "rounds", "merge": "whole-rounds", "objective": "efficiency", "speed_model": "lockstep"}
)
"""Algorithm 1 as published: whole rounds of pairwise matching by γ of Eq. 3 and Eq. 4."""


class MuriS(QueuePolicy):
    """The paper's Muri for known durations: SRSF, then Algorithm 1.

    Source: Muri (Zhao et al., SIGCOMM 2022), section 4.2 and section 5.
    """

    name = "muri-s"
    order = "remaining time × GPUs"
    fixed = PAPER

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining GPU-seconds."""
        return priority.srsf


class MuriL(QueuePolicy):
    """The paper's Muri for unknown durations: 2D-LAS, then Algorithm 1.

    Source: Muri (Zhao et al., SIGCOMM 2022), section 4.2 and section 5.
    """

    name = "muri-l"
    order = "attained time × GPUs"
    fixed = PAPER

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By attained GPU-seconds."""
        return priority.two_dimensional_las


class Auto(QueuePolicy):
    """Muri-S when every job tells its duration, else Muri-L; merges only as needed.

    Only jobs that may be grouped have a say. Every option is honoured.
    """

    name = "auto"
    order = "as muri-s or muri-l"

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining or by attained GPU-seconds."""
        return priority.srsf_or_las(request)

    def plan(self, request: PlanRequest) -> Plan:
        """Decide; the plan carries the name of the policy whose order was chosen."""
        key = self.key(request)
        name = MuriS.name if key is priority.srsf else MuriL.name
        return plan_queue(request, name, key, self.rules)
