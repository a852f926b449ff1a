"""What all policies inherit: an order of priority, capabilities, and options that are theirs alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from muri.policies.cycle.planner import plan_queue
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.types import Plan, PlanRequest

OptionValues = Mapping[str, Any]
"""Values of `PolicyOptions` by field name."""

NONE: Final[OptionValues] = MappingProxyType({})

EXCLUSIVE: Final[OptionValues] = MappingProxyType({"max_group_size": 1})
"""Every job has its GPUs to itself."""
TO_THE_END: Final[OptionValues] = MappingProxyType({"preemption": False})
"""Whatever runs is never stopped for another job."""

EXCLUSIVE_TO_THE_END: Final[OptionValues] = MappingProxyType({"max_group_size": 1, "preemption": False})
"""Both."""

ProfileUse = Literal["none", "sharing", "all"]
"""Whose stage profiles matter to a policy: nobody's, those of jobs that may share GPUs, or all jobs'."""


@dataclass(frozen=True)
class QueuePolicy(ABC):
    """A policy that ranks the queue; who shares, and where, is the planner's part.

    A subclass gives `name`, `order`, `key` and a docstring, whose first line `muri policies` shows.

    Attributes:
        options: What the user wants; None stands for the policy's own defaults.
        name: The name by which the configuration and the commands select it.
        order: Who goes first, in a few words.
        defaults: Options in which the policy differs from `PolicyOptions` unless the user says otherwise.
        fixed: Options that make the policy what it is, whatever the user says.
        packs: Whether its plans put jobs on GPUs one by one (`Plan.sharers`) instead of in groups.
        elastic: Whether a job may get another number of GPUs than it asked for.
        plain_groups: Whether members of its groups may run side by side without turns, so that it needs the speeds of
            pairs (`PlanRequest.interference`).
        simulated_only: Whether it exists for comparisons in the simulator; Slurm is not run by it.
        gives_cpus: Whether it gives out CPUs and host memory, too, by what profiles say of jobs.
    """

    options: PolicyOptions | None = None
    name: ClassVar[str]
    order: ClassVar[str]
    defaults: ClassVar[OptionValues] = NONE
    fixed: ClassVar[OptionValues] = NONE
    packs: ClassVar[bool] = False
    elastic: ClassVar[bool] = False
    plain_groups: ClassVar[bool] = False
    simulated_only: ClassVar[bool] = False
    gives_cpus: ClassVar[bool] = False

    @abstractmethod
    def key(self, request: PlanRequest) -> PriorityKey:
        """The order of priority for this request: the smaller key is the more urgent job."""

    @property
    def rules(self) -> PolicyOptions:
        """The options in force."""
        wanted = PolicyOptions(**self.defaults) if self.options is None else self.options
        return replace(wanted, **self.fixed)

    @property
    def profile_use(self) -> ProfileUse:
        """Whose stage profiles change what it decides; a model of nobody else is worth a dry run on Slurm."""
        if self.gives_cpus:
            return "all"
        return "sharing" if self.packs or self.rules.max_group_size > 1 else "none"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        return plan_queue(request, self.name, self.key(request), self.rules)


class FixedOrder(QueuePolicy):
    """A queue policy whose order is the same for every request: a subclass gives `ranking` in place of `key`."""

    ranking: ClassVar[PriorityKey]

    def key(self, request: PlanRequest) -> PriorityKey:
        """The order that the class names."""
        return type(self).ranking
