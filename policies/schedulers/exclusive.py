"""Policies under which every job has its GPUs to itself; they differ in who goes first."""

from bisect import bisect_right

from muri.policies import priority
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, EXCLUSIVE_TO_THE_END, FixedOrder, QueuePolicy
from muri.policies.types import PlanJob, PlanRequest, waited_s


class Fifo(FixedOrder):
    """First in, first out; smaller jobs may pass a larger one (backfill)."""

    name = "fifo"
    order = "submit time"
    fixed = EXCLUSIVE_TO_THE_END
    ranking = priority.fifo


class Sjf(FixedOrder):
    """Shortest job first, by the whole duration; what runs is left to finish."""

    name = "sjf"
    order = "whole duration"
    fixed = EXCLUSIVE_TO_THE_END
    ranking = priority.sjf


class Srtf(FixedOrder):
    """Shortest remaining time first: the job that is done soonest."""

    name = "srtf"
    order = "remaining time"
    fixed = EXCLUSIVE
    ranking = priority.srtf


class Srsf(FixedOrder):
    """Shortest remaining service first: the job that needs the fewest GPU-seconds."""

    name = "srsf"
    order = "remaining time × GPUs"
    fixed = EXCLUSIVE
    ranking = priority.srsf


class TwoDimensionalLas(FixedOrder):
    """Least attained GPU-seconds first, compared continuously.

    Source: Tiresias (Gu et al., NSDI 2019), 2D-LAS, without its discrete queues.
    """

    name = "2d-las"
    order = "attained time × GPUs"
    fixed = EXCLUSIVE
    ranking = priority.two_dimensional_las


def worst_fairness_first(request: PlanRequest) -> PriorityKey:
    """The order of finish-time fairness: the largest ρ first."""

    def worst_first(job: PlanJob) -> tuple[float, ...]:
        return (-finish_time_fairness(job, request.now_s, request.interval_s),)

    return worst_first


def finish_time_fairness(job: PlanJob, now_s: float, interval_s: float) -> float:
    """Expected ρ of a job that ran at full speed from now on; 1 for one that never waits.

    A job of unknown duration is taken to need as much service again as it has attained, and at least
    until the next plan.

    Args:
        job: The job.
        now_s: Now, seconds since the epoch.
        interval_s: Seconds until the next plan.
    """
    remaining_s = max(job.attained_s, interval_s) if job.remaining_s is None else job.remaining_s
    alone_s = job.attained_s + remaining_s
    elapsed_s = max(0.0, now_s - job.submit_s)
    return (elapsed_s + remaining_s) / alone_s if alone_s > 0 else float("inf")


class Tiresias(QueuePolicy):
    """Discretized 2D-LAS: queues by attained GPU-seconds, FIFO in each.

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
        queues = DiscreteQueues(request, self.rules)
        return lambda job: (float(queues.number(job)),)


class DiscreteQueues:
    """Tiresias' queues of one request.

    Args:
        request: What runs, and the time.
        options: Limits of the queues, and when to promote.
    """

    def __init__(self, request: PlanRequest, options: PolicyOptions) -> None:
        self._running = {job.job_id for unit in request.running for job in unit.members}
        self._now_s = request.now_s
        self._limits_gpu_s, self._promote_after = options.queue_limits_gpu_s, options.promote_after

    def number(self, job: PlanJob) -> int:
        """Number of a job's queue, 0 for the most urgent."""
        waited = 0.0 if job.job_id in self._running else max(0.0, waited_s(job, self._now_s))
        if waited > self._promote_after * job.attained_s:
            return 0
        return bisect_right(self._limits_gpu_s, job.attained_gpu_s)
