"""Muri-S and Muri-L as the paper has them, and Muri with other aims: either order, the average job, Slurm's order."""

from types import MappingProxyType
from typing import Final

from muri.policies import priority
from muri.policies.cycle.planner import plan_queue
from muri.policies.schedulers.base import FixedOrder, OptionValues, QueuePolicy
from muri.policies.types import Plan, PlanRequest

PAPER: Final[OptionValues] = MappingProxyType(
    {"grouping": "rounds", "merge": "whole-rounds", "objective": "efficiency", "speed_model": "lockstep"}
)
"""Algorithm 1 as published: whole rounds of pairwise matching by γ of Eq. 3 and Eq. 4."""


class MuriS(FixedOrder):
    """The paper's Muri for known durations: SRSF, then Algorithm 1.

    Source: Muri (Zhao et al., SIGCOMM 2022), section 4.2 and section 5.
    """

    name = "muri-s"
    order = "remaining time × GPUs"
    fixed = PAPER
    ranking = priority.srsf


class MuriL(FixedOrder):
    """The paper's Muri for unknown durations: 2D-LAS, then Algorithm 1.

    Source: Muri (Zhao et al., SIGCOMM 2022), section 4.2 and section 5.
    """

    name = "muri-l"
    order = "attained time × GPUs"
    fixed = PAPER
    ranking = priority.two_dimensional_las


class SrsfOrLas(QueuePolicy):
    """A policy that goes by remaining GPU-seconds when all durations are known, else by attained ones."""

    order = "as muri-s or muri-l"

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining or by attained GPU-seconds."""
        return priority.srsf_or_las(request)


class Auto(SrsfOrLas):
    """Follows Slurm's priorities where PriorityType=priority/multifactor (Slurm's default since 23.11), else SRSF if
    all durations are stated, else 2D-LAS.

    On a cluster of that PriorityType the controller takes `MuriSlurm` instead of this class. Only the durations of jobs
    that may be grouped count. Groups merge only as needed, and every option is honored.
    """

    name = "auto"
    order = "Slurm's, or as muri-s or muri-l"

    def plan_by(self, request: PlanRequest, key: priority.PriorityKey) -> Plan:
        """Decide; the plan carries the name of the policy whose order was chosen."""
        name = MuriS.name if key is priority.srsf else MuriL.name
        return plan_queue(request, name, key, self.rules)


class MuriJct(SrsfOrLas):
    """Muri for the average JCT: short jobs are not slowed for long ones.

    What a member's speed is worth falls with the service that the job still needs (or has received,
    where durations are unknown), groups are chosen all at once, and the speed model is the
    work-conserving one. Method and speed model can be set otherwise; the objective can't.
    """

    name = "muri-jct"
    defaults = MappingProxyType({"grouping": "optimal", "speed_model": "fair"})
    fixed = MappingProxyType({"objective": "jct"})


class MuriSlurm(FixedOrder):
    """Slurm's priority says who goes first, Muri says with whom.

    For sites whose priorities (age, fair share, QOS) must hold. Groups cost no job its turn: a less urgent one goes
    ahead only by sharing with a job that has its turn, or where a larger one cannot start yet (backfill, until
    `max_wait_s`). Jobs are grouped as under `auto`, and every option is honored.
    """

    name = "muri-slurm"
    order = "Slurm's priority"
    ranking = priority.slurm
    in_order = True
