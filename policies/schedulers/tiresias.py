"""Tiresias with discrete queues: attained service decides the queue, not the place in it."""

from bisect import bisect_right

from muri.policies.cycle import queue
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, QueuePolicy
from muri.policies.types import PlanJob, PlanRequest


class Tiresias(QueuePolicy):
    """Discretised 2D-LAS: queues by attained GPU-seconds, FIFO in each.

    The queues keep jobs of like size from stopping each other time and again. A job that has waited
    for more than `promote_after` times the service it has received is promoted to the first queue
    until it runs; then its queue is that of its attained service again.

    Source: Tiresias (Gu et al., NSDI 2019), Discretized 2D-LAS and its starvation knob. The
    thresholds are those of Muri's published simulator.
    """

    name = "tiresias"
    order = "queue, submit time"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By queue; the planner breaks ties by submit time."""
        rules, running = self.rules, running_ids(request)

        def by_queue(job: PlanJob) -> tuple[float, ...]:
            waited_s = 0.0 if job.job_id in running else waited(job, request.now_s)
            return (float(queue_of(job, waited_s, rules)),)

        return by_queue


def running_ids(request: PlanRequest) -> frozenset[int]:
    """Ids of the jobs that run now."""
    return frozenset(job.job_id for running in request.running for job in running.members)


def waited(job: PlanJob, now_s: float) -> float:
    """Seconds since a waiting job last received service, or since its submission."""
    return max(0.0, queue.waited_s(job, now_s))


def queue_of(job: PlanJob, waited_s: float, options: PolicyOptions) -> int:
    """Number of the job's queue, 0 for the most urgent.

    Args:
        job: The job.
        waited_s: Seconds that it has been waiting; 0 while it runs.
        options: Limits of the queues, and when to promote.
    """
    if waited_s > options.promote_after * job.attained_s:
        return 0
    return bisect_right(options.queue_limits_gpu_s, job.attained_gpu_s)
