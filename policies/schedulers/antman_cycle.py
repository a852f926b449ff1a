"""One cycle of AntMan: who gets free GPUs, who joins whom, who waits."""

from collections import Counter
from collections.abc import Iterator

from muri.policies.cycle import reasons
from muri.policies.cycle.placement import FreeGpus, Shares
from muri.policies.cycle.queue import waited_s
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
        self._request, self._max_wait_s = request, rules.max_wait_s
        self._sharing = min(rules.max_group_size, request.max_group_size) > 1
        self._whole_nodes = request.larger_than_a_node != "slurm"
        self._free = FreeGpus(request.nodes, whole_nodes=self._whole_nodes)
        memory = {node.name: node.gpu_mem_gib for node in request.nodes}
        self._open = OpenSeats(request.same_user, rules.min_speedup, memory)
        self._seats: list[Seat] = []
        self._released: list[Solo] = []
        self._waiting: list[PlanJob] = []

    def seat(self, seat: Seat) -> None:
        """Put jobs on GPUs of their own, or keep them there."""
        self._seats.append(seat)
        if self._sharing:
            self._open.offer(seat)

    def decide(self, job: PlanJob) -> None:
        """Free GPUs, else somebody's leftovers, else Slurm's own queue after `max_wait_s`, else waiting."""
        if self._is_slurms(job):
            return
        gpus = self._take(job)
        if gpus is not None:
            self.seat(Seat([job], gpus))
            return
        seat = self._open.take(job)
        if seat is not None:
            seat.join(job)
        elif not self._whole_nodes and waited_s(job, self._request.now_s) > self._max_wait_s:
            why = reasons.aged(waited_s(job, self._request.now_s), self._max_wait_s)
            self._released.append(Solo(job.job_id, (why, reasons.QUEUES_IN_SLURM)))
        else:
            self._waiting.append(job)

    def result(self, name: str) -> Plan:
        """The plan."""
        shared = tuple(decisions.group(seat) for seat in self._seats if len(seat.jobs) > 1)
        alone = tuple(decisions.solo(seat) for seat in self._seats if len(seat.jobs) == 1)
        return Plan(name, shared, (*alone, *self._released), tuple(self._explain_waiting()))

    def _explain_waiting(self) -> Iterator[Waiting]:
        why = reasons.WaitingReasons(self._free, whole_nodes=self._whole_nodes)
        ahead: Counter[str] = Counter()
        for job in self._waiting:
            yield decisions.waiting(job, why.of(job, ahead[job.partition]), sharing=self._sharing)
            ahead[job.partition] += 1

    def _take(self, job: PlanJob) -> Shares | None:
        gpus = self._free.take(job.partition, job.gpu_count)
        if gpus is None and not self._whole_nodes and not job.groupable and not self._free.largest_node(job.partition):
            # Nobody said how large the nodes are: the job may be one for several of them.
            return () if self._free.take_spanning(job.partition, job.gpu_count) else None
        return gpus

    def _is_slurms(self, job: PlanJob) -> bool:
        largest = self._free.largest_node(job.partition)
        if self._whole_nodes or largest is None or job.gpu_count <= largest:
            return False
        self._free.take_spanning(job.partition, job.gpu_count)
        why = (reasons.larger_than_a_node(job, largest), reasons.QUEUES_IN_SLURM)
        self._released.append(Solo(job.job_id, why))
        return True
