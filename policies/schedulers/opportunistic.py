"""What Horus compares itself with: packing by memory alone, with and without taking it back."""

from types import MappingProxyType
from typing import Final

from muri.policies.cycle.validation import check_request
from muri.policies.horus import reasons
from muri.policies.horus.cycle import PackingCycle
from muri.policies.horus.rules import ByMemory
from muri.policies.priority import PriorityKey, fifo
from muri.policies.schedulers.base import QueuePolicy
from muri.policies.types import Plan, PlanJob, PlanRequest, Waiting

_LEAST_SPEED: Final = 0.5
"""PAB takes a job off GPUs on which it gets on more slowly than this, relative to its speed alone."""


class OpportunisticBinPacking(QueuePolicy):
    """Jobs share GPUs wherever memory allows, blind to how busy they are.

    First come, first served: idle GPUs, else those that memory fills best. Nothing is stopped.

    Source: Horus (Yeung et al., TPDS 2021), its baseline OBP.
    """

    name = "obp"
    order = "submit time"
    fixed = MappingProxyType({"preemption": False})
    packs = True

    def key(self, request: PlanRequest) -> PriorityKey:
        """First come, first served."""
        return fifo

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packs=True)
        cycle = PackingCycle(request, self.rules, ByMemory())
        stopped = self.stop(cycle)
        aged, ready = cycle.sort_out(request.jobs)
        cycle.seat_aged(aged)
        for job in ready:
            cycle.seat(job, idle_only=self.keeps_apart(job))
        return cycle.result(self.name, stopped)

    def stop(self, cycle: PackingCycle) -> tuple[Waiting, ...]:
        """Running jobs to put back."""
        return ()

    def keeps_apart(self, job: PlanJob) -> bool:
        """Whether a waiting job may share with nobody."""
        return False


class PutBack(OpportunisticBinPacking):
    """Packs by memory as obp does, and puts back a job that sharing slows down to less than half.

    The latest comer goes first, if it can be stopped, until the others are fast enough. What was stopped once then
    waits for GPUs of its own, for packing it again would stop it again.

    Source: Horus (Yeung et al., TPDS 2021), its baseline PAB. The speed is not measured here but follows from the
    utilisations and Horus's fit.
    """

    name = "pab"
    fixed = MappingProxyType({"preemption": True})

    def stop(self, cycle: PackingCycle) -> tuple[Waiting, ...]:
        """Running jobs to put back: the latest comers of GPUs on which somebody is too slow."""
        stopped = []
        latest = sorted(cycle.packed.holdings.values(), key=lambda item: (-item.job.submit_s, -item.job.job_id))
        for holding in latest:
            speed = cycle.speed(holding)
            if speed < _LEAST_SPEED and holding.job.preemptible:
                why = reasons.too_slow(speed, holding.partners)
                stopped.append(cycle.stop(holding.job.job_id, why))
        return tuple(stopped)

    def keeps_apart(self, job: PlanJob) -> bool:
        """It was stopped before if it waits although it has received service."""
        return job.attained_gpu_s > 0
