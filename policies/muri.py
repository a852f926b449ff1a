"""The policies: Muri-S, Muri-L, the choice between them, and two that let nobody share."""

from dataclasses import dataclass, field, replace

from muri.policies import priority
from muri.policies.options import PolicyOptions
from muri.policies.planner import plan_queue
from muri.policies.types import Plan, PlanRequest


@dataclass(frozen=True, slots=True)
class MuriS:
    """Muri for known durations: shortest remaining service first, then Algorithm 1."""

    options: PolicyOptions = field(default_factory=PolicyOptions)
    name: str = "muri-s"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide; see `muri.policies.types.Policy`."""
        return plan_queue(request, self.name, priority.srsf, self.options)


@dataclass(frozen=True, slots=True)
class MuriL:
    """Muri for unknown durations: least attained service first, then Algorithm 1."""

    options: PolicyOptions = field(default_factory=PolicyOptions)
    name: str = "muri-l"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide; see `muri.policies.types.Policy`."""
        return plan_queue(request, self.name, priority.two_dimensional_las, self.options)


@dataclass(frozen=True, slots=True)
class Auto:
    """Muri-S when every job that may be grouped tells its duration, else Muri-L."""

    options: PolicyOptions = field(default_factory=PolicyOptions)
    name: str = "auto"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide; the plan carries the name of the policy that was chosen."""
        known = all(job.remaining_s is not None for job in request.jobs if job.groupable)
        chosen = MuriS(self.options) if known else MuriL(self.options)
        return chosen.plan(request)


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out, every job alone on its GPUs; smaller jobs may pass (backfill)."""

    options: PolicyOptions = field(default_factory=PolicyOptions)
    name: str = "fifo"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide; see `muri.policies.types.Policy`."""
        return plan_queue(request, self.name, priority.fifo, replace(self.options, max_group_size=1))


@dataclass(frozen=True, slots=True)
class Srsf:
    """Shortest remaining service first, every job alone on its GPUs."""

    options: PolicyOptions = field(default_factory=PolicyOptions)
    name: str = "srsf"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide; see `muri.policies.types.Policy`."""
        return plan_queue(request, self.name, priority.srsf, replace(self.options, max_group_size=1))
