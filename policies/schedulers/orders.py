"""Policies of the common cycle: Muri's, and those under which every job has its GPUs to itself."""

from bisect import bisect_right
from types import MappingProxyType
from typing import Final

from muri.policies import priority
from muri.policies.cycle.planner import plan_queue
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, EXCLUSIVE_TO_THE_END, FixedOrder, OptionValues, QueuePolicy
from muri.policies.types import Plan, PlanJob, PlanRequest, waited_s


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


PAPER: Final[OptionValues] = MappingProxyType(
    {"grouping": "rounds", "merge": "whole-rounds", "objective": "efficiency", "speed_model": "lockstep"}
)
"""Algorithm 1 as published: whole rounds of pairwise matching by γ of Eq. 3 and Eq. 4."""


class MuriS(FixedOrder):
    """The paper's Muri for known durations: SRSF, then Algorithm 1.

    Source: Muri (Zhao et al., SIGCOMM 2022), section 4.2 and section 5.
    """

    name = "muri-s"
    order = "remaining time × GPUs"
    fixed = PAPER
    ranking = priority.srsf


class MuriL(FixedOrder):
    """The paper's Muri for unknown durations: 2D-LAS, then Algorithm 1.

    Source: Muri (Zhao et al., SIGCOMM 2022), section 4.2 and section 5.
    """

    name = "muri-l"
    order = "attained time × GPUs"
    fixed = PAPER
    ranking = priority.two_dimensional_las


class SrsfOrLas(QueuePolicy):
    """A policy that goes by remaining GPU-seconds when all durations are known, else by attained ones."""

    order = "as muri-s or muri-l"

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining or by attained GPU-seconds."""
        return priority.srsf_or_las(request)


class Auto(SrsfOrLas):
    """Follows Slurm's priorities where PriorityType=priority/multifactor (Slurm's default since 23.11), else SRSF if
    all durations are stated, else 2D-LAS.

    On a cluster of that PriorityType the controller takes `MuriSlurm` instead of this class. Only the durations of jobs
    that may be grouped count. Groups merge only as needed, and every option is honored.
    """

    name = "auto"
    order = "Slurm's, or as muri-s or muri-l"

    def plan_by(self, request: PlanRequest, key: priority.PriorityKey) -> Plan:
        """Decide; the plan carries the name of the policy whose order was chosen."""
        name = MuriS.name if key is priority.srsf else MuriL.name
        return plan_queue(request, name, key, self.rules)


class MuriJct(SrsfOrLas):
    """Muri for the average JCT: short jobs are not slowed for long ones.

    What a member's speed is worth falls with the service that the job still needs (or has received,
    where durations are unknown), groups are chosen all at once, and the speed model is the
    work-conserving one. Method and speed model can be set otherwise; the objective can't.
    """

    name = "muri-jct"
    defaults = MappingProxyType({"grouping": "optimal", "speed_model": "fair"})
    fixed = MappingProxyType({"objective": "jct"})


class MuriSlurm(FixedOrder):
    """Slurm's priority says who goes first, Muri says with whom.

    For sites whose priorities (age, fair share, QOS) must hold. Groups cost no job its turn: a less urgent one goes
    ahead only by sharing with a job that has its turn, or where a larger one cannot start yet (backfill, until
    `max_wait_s`). Jobs are grouped as under `auto`, and every option is honored.
    """

    name = "muri-slurm"
    order = "Slurm's priority"
    ranking = priority.slurm
    in_order = True
