"""Synergy: CPUs and memory by what jobs make of them; a mechanism for each way to share out, a class for each order."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

from muri.policies import priority
from muri.policies.allocation.demand import Wish, proportional_wish, saturating_wish
from muri.policies.allocation.greedy import greedy
from muri.policies.allocation.names import MECHANISMS, ORDERS, SynergyName
from muri.policies.allocation.optimal import optimal
from muri.policies.allocation.proportional import proportional
from muri.policies.allocation.tune import tune
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, QueuePolicy
from muri.policies.schedulers.synergy_cycle import Mechanism, plan_allocation
from muri.policies.schedulers.themis import finish_time_fairness
from muri.policies.types import Plan, PlanJob, PlanRequest


class _Way(NamedTuple):
    """A mechanism, what jobs ask for under it, and a sentence on it."""

    mechanism: Mechanism
    wish: Wish
    summary: str


_WAYS: Final[Mapping[str, _Way]] = {
    "proportional": _Way(proportional, proportional_wish, "CPUs and memory follow the GPUs."),
    "greedy": _Way(greedy, saturating_wish, "Each job's whole demand of CPUs and memory, or it waits."),
    "tune": _Way(tune, saturating_wish, "CPUs and memory by demand; nobody below the GPUs' share."),
    "opt": _Way(optimal, saturating_wish, "CPUs and memory by an integer program: slow, with a bound."),
}


def _fairness(request: PlanRequest) -> PriorityKey:
    def worst_first(job: PlanJob) -> tuple[float, ...]:
        return (-finish_time_fairness(job, request.now_s, request.interval_s),)

    return worst_first


_ORDERS: Final[Mapping[str, tuple[str, Callable[[PlanRequest], PriorityKey]]]] = {
    "fifo": ("submit time", lambda _: priority.fifo),
    "srtf": ("remaining time", lambda _: priority.srtf),
    "las": ("attained time", lambda _: priority.las),
    "ftf": ("worst slowdown ρ", _fairness),
}


class SynergyPolicy(QueuePolicy):
    """One mechanism with one order; a subclass for each pair is in `POLICIES`.

    Every job has its GPUs to itself. What runs keeps its nodes, CPUs and memory from round to round (lease renewal).
    FTF serves the worst ρ first, as Themis and the paper do; the key of the paper's public simulator is the reverse.

    Source: Synergy (Mohan et al., OSDI 2022).
    """

    fixed = EXCLUSIVE
    gives_cpus = True
    way: ClassVar[SynergyName]

    def key(self, request: PlanRequest) -> PriorityKey:
        """By the order that the name says."""
        return _ORDERS[self.way.order][1](request)

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        way = _WAYS[self.way.mechanism]
        return plan_allocation(request, self.name, self.key(request), self.rules, way.mechanism, way.wish)


def _policy(way: SynergyName) -> type[SynergyPolicy]:
    members = {
        "name": str(way),
        "order": _ORDERS[way.order][0],
        "way": way,
        "__doc__": _WAYS[way.mechanism].summary,
        "__module__": __name__,
    }
    return type(f"Synergy{way.mechanism.capitalize()}{way.order.capitalize()}", (SynergyPolicy,), members)


POLICIES: Final[Mapping[str, type[SynergyPolicy]]] = MappingProxyType(
    {str(way): _policy(way) for way in (SynergyName(mechanism, order) for mechanism in MECHANISMS for order in ORDERS)}
)
"""Every policy of Synergy by its name in full."""
