"""Baselines that share out CPUs and memory by demands that nothing changes: DRF and Tetris."""

from typing import ClassVar

from muri.policies import priority
from muri.policies.allocation.demand import saturating_wish
from muri.policies.allocation.drf import fill_order
from muri.policies.allocation.greedy import greedy
from muri.policies.allocation.tetris import tetris
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE_TO_THE_END, QueuePolicy
from muri.policies.schedulers.synergy_cycle import Mechanism, plan_allocation
from muri.policies.types import Plan, PlanJob, PlanRequest


class StaticDemands(QueuePolicy):
    """Jobs ask for what saturates their throughput, and wait where that is not free; nobody is stopped for another."""

    fixed = EXCLUSIVE_TO_THE_END
    gives_cpus = True
    mechanism: ClassVar[Mechanism]

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        mechanism = type(self).mechanism
        return plan_allocation(request, self.name, self.key(request), self.rules, mechanism, saturating_wish)


class Drf(StaticDemands):
    """Dominant resource fairness: the user with the smallest share goes first.

    Source: DRF (Ghodsi et al., NSDI 2011), as a baseline of Synergy (OSDI 2022).
    """

    name = "drf"
    order = "dominant share"
    mechanism = greedy

    def key(self, request: PlanRequest) -> PriorityKey:
        """By the dominant share of the job's user when its turn comes."""
        share = fill_order(request)

        def smallest_first(job: PlanJob) -> tuple[float, ...]:
            return (share[job.job_id],)

        return smallest_first


class Tetris(StaticDemands):
    """Packs GPUs, CPUs and memory: the best match of demand and node first.

    Source: Tetris (Grandl et al., SIGCOMM 2014), as a baseline of Synergy (OSDI 2022).
    """

    name = "tetris"
    order = "best match, submit time"
    mechanism = tetris

    def key(self, request: PlanRequest) -> PriorityKey:
        """By submit time, between jobs that match equally well."""
        return priority.fifo
