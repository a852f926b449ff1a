"""One cycle of AntMan: who gets free GPUs, who joins whom, who waits."""

from collections import Counter
from collections.abc import Iterator

from muri.policies.cycle import reasons
from muri.policies.cycle.placement import FreeGpus, Shares
from muri.policies.cycle.slurms_queue import SlurmsQueue
from muri.policies.options import PolicyOptions
from muri.policies.schedulers import antman_decisions as decisions
from muri.policies.schedulers.antman_seats import OpenSeats, Seat
from muri.policies.types import Plan, PlanJob, PlanRequest, Solo, Waiting


class AntManCycle:
    """What is decided so far.

    Args:
        rules: The policy's options.
        request: Nodes, time and what sharing may do.
    """

    def __init__(self, rules: PolicyOptions, request: PlanRequest) -> None:
        self._sharing = min(rules.max_group_size, request.max_group_size) > 1
        self._free = FreeGpus(request.nodes, whole_nodes=request.larger_than_a_node != "slurm")
        memory = {node.name: node.gpu_mem_gib for node in request.nodes}
        self._open = OpenSeats(request.same_user, rules.min_speedup, memory)
        self._seats: list[Seat] = []
        self._released: list[Solo] = []
        self._slurm = SlurmsQueue(request, self._free, rules.max_wait_s, self._released, self._free.set_aside)
        self._waiting: list[PlanJob] = []

    def seat(self, seat: Seat) -> None:
        """Put jobs on GPUs of their own, or keep them there."""
        self._seats.append(seat)
        if self._sharing:
            self._open.offer(seat)

    def decide(self, job: PlanJob) -> None:
        """Free GPUs, else somebody's leftovers, else Slurm's own queue after `max_wait_s`, else waiting."""
        if self._slurm.takes_larger(job):
            return
        gpus = self._take(job)
        if gpus is not None:
            self.seat(Seat([job], gpus))
            return
        seat = self._open.take(job)
        if seat is not None:
            seat.join(job)
        elif not self._slurm.takes_overdue(job):
            self._waiting.append(job)

    def result(self, name: str) -> Plan:
        """The plan."""
        shared = tuple(decisions.group(seat) for seat in self._seats if len(seat.jobs) > 1)
        alone = tuple(decisions.solo(seat) for seat in self._seats if len(seat.jobs) == 1)
        return Plan(name, shared, (*alone, *self._released), tuple(self._explain_waiting()))

    def _explain_waiting(self) -> Iterator[Waiting]:
        why = reasons.WaitingReasons(self._free, whole_nodes=not self._slurm.is_there)
        ahead: Counter[str] = Counter()
        for job in self._waiting:
            yield decisions.waiting(job, why.of(job, ahead[job.partition]), sharing=self._sharing)
            ahead[job.partition] += 1

    def _take(self, job: PlanJob) -> Shares | None:
        gpus = self._free.take(job.partition, job.gpu_count, node_count=job.node_count)
        return () if gpus is None and self._slurm.takes_spanning(job) else gpus
