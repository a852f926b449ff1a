"""What all policies inherit: an order of priority, capabilities, and options that are theirs alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final

from muri.policies.cycle.planner import plan_queue
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.types import Plan, PlanRequest, ProfileUse

OptionValues = Mapping[str, Any]
"""Values of `PolicyOptions` by field name."""

NONE: Final[OptionValues] = MappingProxyType({})

EXCLUSIVE: Final[OptionValues] = MappingProxyType({"max_group_size": 1})
"""Every job has its GPUs to itself."""
TO_THE_END: Final[OptionValues] = MappingProxyType({"preemption": False})
"""Whatever runs is never stopped for another job."""

EXCLUSIVE_TO_THE_END: Final[OptionValues] = MappingProxyType({"max_group_size": 1, "preemption": False})
"""Both."""


@dataclass(frozen=True)
class QueuePolicy(ABC):
    """A policy that ranks the queue; who shares, and where, is the planner's part.

    A subclass gives `name`, `order`, `key` and a docstring, whose first line `muri policies` shows. A policy of another
    distribution does best to inherit this class, too: all capabilities that `muri.policies.types.Policy` asks for then
    have the values of a plain queue policy, and the subclass names those in which it differs.

    Attributes:
        options: What the user wants; None stands for the policy's own defaults.
        name: The name by which the configuration and the commands select it.
        order: Who goes first, in a few words.
        defaults: Options in which the policy differs from `PolicyOptions` unless the user says otherwise.
        fixed: Options that make the policy what it is, whatever the user says.
        in_order: Whether groups never cost a job its turn; see `plan_queue`.
        supports_packing, elastic, plain_groups, allocates_cpus, retries_out_of_memory: See `Policy`.
    """

    options: PolicyOptions | None = None
    name: ClassVar[str]
    order: ClassVar[str]
    defaults: ClassVar[OptionValues] = NONE
    fixed: ClassVar[OptionValues] = NONE
    in_order: ClassVar[bool] = False
    supports_packing: ClassVar[bool] = False
    elastic: ClassVar[bool] = False
    plain_groups: ClassVar[bool] = False
    allocates_cpus: ClassVar[bool] = False
    retries_out_of_memory: ClassVar[bool] = False

    @abstractmethod
    def key(self, request: PlanRequest) -> PriorityKey:
        """The order of priority for this request: the smaller key is the more urgent job."""

    @cached_property
    def rules(self) -> PolicyOptions:
        """The options in force."""
        # What makes the policy what it is goes last, so that no option can turn it into another one.
        wanted = PolicyOptions(**self.defaults) if self.options is None else self.options
        return replace(wanted, **self.fixed)

    @property
    def profile_use(self) -> ProfileUse:
        """All profiles where CPUs are given out; those of jobs that may share where jobs share GPUs."""
        if self.allocates_cpus:
            return "all"
        return "sharing" if self.supports_packing or self.rules.max_group_size > 1 else "none"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        return self.plan_by(request, self.key(request))

    def plan_by(self, request: PlanRequest, key: PriorityKey) -> Plan:
        """Decide by an order of priority, from the front of the queue alone as `plan_queue` does."""
        return plan_queue(request, self.name, key, self.rules, in_order=self.in_order)


class FixedOrder(QueuePolicy):
    """A queue policy whose order is the same for every request: a subclass gives `ranking` in place of `key`."""

    ranking: ClassVar[PriorityKey]

    def key(self, request: PlanRequest) -> PriorityKey:
        """The order that the class names."""
        return type(self).ranking
