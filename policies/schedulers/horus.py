"""Horus: jobs share GPUs where predicted memory and utilisation make it cheap."""

from types import MappingProxyType
from typing import ClassVar

from muri.policies.cycle.validation import check_request
from muri.policies.horus import reasons
from muri.policies.horus.cost import CostModel
from muri.policies.horus.cycle import PackingCycle
from muri.policies.horus.queueing import JobQueue, pick, queues_of
from muri.policies.horus.rules import ByCost
from muri.policies.priority import PriorityKey, fifo
from muri.policies.reason import Reason
from muri.policies.schedulers.base import QueuePolicy
from muri.policies.types import Plan, PlanRequest


class Horus(QueuePolicy):
    """Jobs join GPUs where predicted memory and use cost least, first come, first served.

    A round looks at the first β jobs. Each gets the GPUs with the least ω1·(used memory + its own)/capacity +
    ω2·f(cumulative utilisation) that have the memory for it, idle or not, f being the slow-down fitted per GPU type.
    Nothing is stopped. A job whose model has neither a profile nor a prediction waits for one.

    Source: Horus (Yeung et al., TPDS 2021). Added here: nobody joins a GPU whose jobs would get less done with it
    than without (`min_speedup`); a GPU's limit of jobs is `max_group_size`.
    """

    name = "horus"
    order = "submit time"
    fixed = MappingProxyType({"preemption": False})
    packs = True
    queue_count: ClassVar[int] = 1

    def key(self, request: PlanRequest) -> PriorityKey:
        """First come, first served within a queue."""
        return fifo

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packs=True)
        rules = self.rules
        cost = CostModel(rules.horus_memory_weight, rules.horus_slowdown_weight)
        cycle = PackingCycle(request, rules, ByCost(cost, rules.min_speedup), rules.horus_candidates)
        aged, ready = cycle.sort_out(request.jobs)
        cycle.seat_aged(aged)
        for partition in sorted({job.partition for job in ready}):
            jobs = [job for job in ready if job.partition == partition]
            self._round(cycle, queues_of(jobs, self.queue_count, request.now_s, request.interval_s))
        return cycle.result(self.name)

    def _round(self, cycle: PackingCycle, queues: tuple[JobQueue, ...]) -> None:
        """Place the jobs that weighted fair queueing picks; the others wait."""
        per_round = self.rules.horus_jobs_per_round
        order = pick(queues, sum(len(queue.jobs) for queue in queues))
        for job in order[:per_round]:
            cycle.seat(job)
        notes = _queue_reasons(queues)
        for position, job in enumerate(order[per_round:], per_round):
            cycle.wait(job, reasons.not_picked(position, per_round), *notes.get(job.job_id, ()))


class HorusFair(Horus):
    """Horus with three queues of like jobs, found by k-means, that take turns by length and wait.

    Jobs are alike by tasks, predicted utilisation, GPUs and memory. A round's β picks go to the queues by weighted
    fair queueing, a queue's weight being max(length, median wait in rounds × length).

    Source: Horus (Yeung et al., TPDS 2021), Horus-F.
    """

    name = "horus-f"
    order = "queues by weight, submit time"
    queue_count = 3


def _queue_reasons(queues: tuple[JobQueue, ...]) -> dict[int, tuple[Reason, ...]]:
    """What a job that waits is told of its queue, by job id; nothing where there is one queue."""
    if len(queues) < 2:
        return {}
    found: dict[int, tuple[Reason, ...]] = {}
    for number, queue in enumerate(queues, 1):
        reason = reasons.queue_of(queue, number, len(queues))
        found |= {job.job_id: (reason,) for job in queue.jobs}
    return found
