"""What Horus compares itself with: packing by memory alone, with and without taking it back."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from muri.policies.cycle.reasons import blanks
from muri.policies.cycle.validation import check_request
from muri.policies.schedulers import TO_THE_END, FixedOrder, fifo
from muri.policies.siblings.horus import PackingCycle, needed_memory
from muri.policies.siblings.horus_cost import Load
from muri.policies.siblings.packed import with_promises
from muri.policies.types import Plan, PlanJob, PlanRequest, Reason, Waiting
from muri.profiler.slowdown import Slowdown

_LEAST_SPEED: Final = 0.5
"""PAB takes a job off GPUs on which it gets on more slowly than this, relative to its speed alone."""


@dataclass(frozen=True, slots=True)
class ByMemory:
    """Opportunistic bin packing: an idle GPU, else the one that memory fills best, however busy it is."""

    def price(self, before: Load, after: Load, capacity_gib: float, slowdown: Slowdown) -> float | None:
        """See `muri.policies.siblings.horus.Rule`."""
        return 2.0 - after.used_gib / capacity_gib if before.count else 0.0

    def why(self, price: float, load: Load, capacity_gib: float, slowdown: Slowdown) -> Reason:
        """See `muri.policies.siblings.horus.Rule`."""
        if load.count < 2:
            return Reason("these GPUs are idle")
        return Reason("too few GPUs are idle, and here memory fits best: {}", (needed_memory(load, capacity_gib),))

    def why_no_partner(self, mem_gib: float) -> Reason:
        """See `muri.policies.siblings.horus.Rule`."""
        return Reason("beside jobs that may share with it, no GPU has {:.1f} GiB left", (mem_gib,))


class OpportunisticBinPacking(FixedOrder):
    """Jobs share GPUs wherever memory allows, blind to how busy they are.

    First come, first served: idle GPUs, else those that memory fills best. Nothing is stopped.

    Source: Horus (Yeung et al., TPDS 2021), its baseline OBP.
    """

    name = "obp"
    order = "submit time"
    fixed = TO_THE_END
    ranking = fifo
    supports_packing = True
    retries_out_of_memory = True

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packed=True)
        request = with_promises(request, self.rules.min_speed)
        cycle = PackingCycle(request, self.rules, ByMemory())
        stopped = self.stop(cycle, request)
        aged, ready = cycle.sort_out(request.jobs)
        cycle.seat_aged(aged)
        for job in ready:
            cycle.seat(job, idle_only=self.keeps_apart(job))
        return cycle.result(self.name, stopped)

    def stop(self, cycle: PackingCycle, request: PlanRequest) -> tuple[Waiting, ...]:
        """Running jobs to put back."""
        return ()

    def keeps_apart(self, job: PlanJob) -> bool:
        """Return whether a waiting job must run alone."""
        return False


class PutBack(OpportunisticBinPacking):
    """Packs by memory as obp does, and puts back a job that sharing slows down to less than half.

    The job that was submitted last goes first, if it can be stopped, until the others are fast enough. A job that was
    stopped once then waits for GPUs of its own, since packing it again would stop it again.

    Source: Horus (Yeung et al., TPDS 2021), its baseline PAB, section 6: "if performance drops by 50 percent, the job
    is simply re-queued". On a cluster speeds are measured; in a simulation they follow from Horus's fit.
    """

    name = "pab"
    fixed = MappingProxyType({"preemption": True})

    def stop(self, cycle: PackingCycle, request: PlanRequest) -> tuple[Waiting, ...]:
        """Return running jobs to put back: the latest comers of GPUs with a member that is too slow."""
        stopped = []
        measured = {job.job_id: unit.measured for unit in request.running for job in unit.members}
        relieved: set[int] = set()
        latest = sorted(cycle.packed.holdings.values(), key=lambda item: (-item.job.submit_s, -item.job.job_id))
        for holding in latest:
            job, partners = holding.job, holding.partners
            known = measured[job.job_id]
            if known is not None and (not partners or job.job_id in relieved):
                continue  # what was measured beside a job that stops now says nothing any more
            speed = cycle.speed(holding) if known is None else known.get(job.job_id, 1.0)
            if speed < _LEAST_SPEED and job.preemptible:
                relieved |= {other.job_id for other in partners}
                stopped.append(cycle.stop(job.job_id, _too_slow(speed, partners)))
        return tuple(stopped)

    def keeps_apart(self, job: PlanJob) -> bool:
        """It ran before if it waits although it has received service: it was put back here, or Slurm requeued it."""
        return job.attained_gpu_s > 0


def _too_slow(speed: float, partners: Sequence[PlanJob]) -> Reason:
    """Why a running job stops."""
    ids = tuple(other.job_id for other in partners)
    return Reason(
        f"stopped: beside {blanks(len(ids))} it gets on at {{:.2f}} of its speed alone, less than half", (*ids, speed)
    )
