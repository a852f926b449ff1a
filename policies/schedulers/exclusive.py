"""Policies under which every job has its GPUs to itself; they differ in who goes first."""

from bisect import bisect_right

import numpy as np

from muri.policies import priority
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, EXCLUSIVE_TO_THE_END, FixedOrder, QueuePolicy
from muri.policies.speed.model import Floats
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


class Las(FixedOrder):
    """Least attained service first: the job that has run for the shortest time."""

    name = "las"
    order = "attained time"
    fixed = EXCLUSIVE
    ranking = priority.las


class TwoDimensionalLas(FixedOrder):
    """Least attained GPU-seconds first, compared continuously.

    Source: Tiresias (Gu et al., NSDI 2019), 2D-LAS, without its discrete queues.
    """

    name = "2d-las"
    order = "attained time × GPUs"
    fixed = EXCLUSIVE
    ranking = priority.two_dimensional_las


class Themis(QueuePolicy):
    """Worst finish-time fairness ρ first: elapsed plus remaining, over alone.

    A simplification of the paper, which auctions GPUs among the apps with the worst ρ and lets them
    bid what each allocation would do for them. Here each job asks for all of its GPUs or none,
    so the auction comes down to ranking by ρ; "alone" is the job's own service time, not its share
    of a divided cluster.

    Source: Themis (Mahajan et al., NSDI 2020), section 3.1: ρ = T_shared / T_independent.
    """

    name = "themis"
    order = "worst slowdown ρ"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By ρ, the largest first."""
        return worst_fairness_first(request)


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
        queues = _DiscreteQueues(request, self.rules)
        return lambda job: (float(queues.number(job)),)


class TiresiasGittins(QueuePolicy):
    """Tiresias' queues, in each the greatest Gittins index of past service first.

    Without `service_history_gpu_s` nothing is known to compute an index from, and the order within a queue
    is that of attained GPU-seconds (2D-LAS). The same order holds among jobs that have outlived every past job.

    Source: Tiresias (Gu et al., NSDI 2019), 2D-Gittins index, with the same discrete queues as 2D-LAS.
    """

    name = "tiresias-gittins"
    order = "queue, Gittins index"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By queue, then index, then attained GPU-seconds."""
        queues, index = _DiscreteQueues(request, self.rules), GittinsIndex(self.rules.service_history_gpu_s)
        return lambda job: (float(queues.number(job)), -index.at(job.attained_gpu_s), job.attained_gpu_s)


class _DiscreteQueues:
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


class GittinsIndex:
    """The Gittins index of an empirical distribution of total service.

    For a job that has attained a, and S the total service of a job:

        G(a) = sup over Δ > 0 of  P(S - a ≤ Δ | S > a) / E[min(S - a, Δ) | S > a]

    the chance to finish within Δ more, for each second spent trying. Only a Δ that ends at one of the
    samples can be the best one.

    Args:
        history_gpu_s: Total service of jobs that have ended, in any order.
    """

    def __init__(self, history_gpu_s: tuple[float, ...]) -> None:
        self._totals: Floats = np.sort(np.asarray(history_gpu_s, dtype=np.float64))
        self._known: dict[float, float] = {}  # most jobs of a long queue have attained the same: nothing

    def at(self, attained_gpu_s: float) -> float:
        """The index, in finished jobs per GPU-second; 0 when no past job needed more than this."""
        if attained_gpu_s not in self._known:
            self._known[attained_gpu_s] = self._best_rate(attained_gpu_s)
        return self._known[attained_gpu_s]

    def _best_rate(self, attained_gpu_s: float) -> float:
        needed = self._totals[np.searchsorted(self._totals, attained_gpu_s, side="right") :] - attained_gpu_s
        if needed.size == 0:
            return 0.0
        finished = np.arange(1, needed.size + 1)
        spent = np.cumsum(needed) + (needed.size - finished) * needed
        return float(np.max(finished / spent))
