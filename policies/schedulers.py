"""Policies of the common cycle: their base class, Muri's own, and those under which every job has its own GPUs."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final

from muri.policies.cycle.planner import plan_queue
from muri.policies.options import PolicyOptions
from muri.policies.types import Plan, PlanJob, PlanRequest, Policy, PriorityKey, ProfileUse, all_jobs, waited_s

OptionValues = Mapping[str, Any]  # Values of `PolicyOptions` by field name
EXCLUSIVE: Final[OptionValues] = MappingProxyType({"max_group_size": 1})  # Every job has its GPUs to itself
TO_THE_END: Final[OptionValues] = MappingProxyType({"preemption": False})  # Nothing is stopped for another job
EXCLUSIVE_TO_THE_END: Final[OptionValues] = MappingProxyType({"max_group_size": 1, "preemption": False})  # Both


@dataclass(frozen=True)
class QueuePolicy(Policy):
    """A policy that ranks the queue and leaves sharing and placement to the planner.

    A subclass gives `name`, `order`, `key` and a docstring, whose first line `muri policies` shows.

    Attributes:
        options: The user's options; None stands for the policy's own defaults.
        order: Who goes first, in a few words.
        defaults: Options in which the policy differs from `PolicyOptions` unless the user says otherwise.
        fixed: Options that define the policy and override the user's.
        in_order: Whether groups never cost a job its turn; see `plan_queue`.
    """

    options: PolicyOptions | None = None
    order: ClassVar[str]
    defaults: ClassVar[OptionValues] = MappingProxyType({})
    fixed: ClassVar[OptionValues] = MappingProxyType({})
    in_order: ClassVar[bool] = False

    @abstractmethod
    def key(self, request: PlanRequest) -> PriorityKey:
        """The order of priority for this request: the smaller key is the more urgent job."""

    @cached_property
    def rules(self) -> PolicyOptions:
        """The options in force: the fixed ones, then the user's, then the policy's defaults."""
        wanted = PolicyOptions(**self.defaults) if self.options is None else self.options
        return replace(wanted, **self.fixed)

    @property
    def profile_use(self) -> ProfileUse:
        """All profiles where CPUs are given out; those of jobs that may share where jobs share GPUs."""
        if self.allocates_cpus:
            return "all"
        return "sharing" if self.supports_packing or self.rules.max_group_size > 1 else "none"

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job by `key`."""
        return self.plan_by(request, self.key(request))

    def plan_by(self, request: PlanRequest, key: PriorityKey) -> Plan:
        """Decide on every job by this order of priority; see `plan_queue`."""
        return plan_queue(request, self.name, key, self.rules, in_order=self.in_order)


class FixedOrder(QueuePolicy):
    """A queue policy whose order is the same for every request: a subclass gives `ranking` in place of `key`."""

    ranking: ClassVar[PriorityKey]

    def key(self, request: PlanRequest) -> PriorityKey:
        """The order that the class names."""
        return type(self).ranking


def fifo(job: PlanJob) -> tuple[float, ...]:
    """First in, first out."""
    return (job.submit_s,)


def slurm(job: PlanJob) -> tuple[float, ...]:
    """Slurm's own priority, the highest first; where it is unknown all are equal, so in order of submission."""
    return (-job.priority,)


def sjf(job: PlanJob) -> tuple[float, ...]:
    """Shortest job first: by the whole expected duration; jobs of unknown duration follow in order of submission."""
    return (1.0,) if job.remaining_s is None else (0.0, job.attained_s + job.remaining_s)


def srtf(job: PlanJob) -> tuple[float, ...]:
    """Shortest remaining time first, r; jobs of unknown duration follow by attained service."""
    return (1.0, job.attained_s) if job.remaining_s is None else (0.0, job.remaining_s)


def srsf(job: PlanJob) -> tuple[float, ...]:
    """Shortest remaining service first, r·g; jobs of unknown duration follow by attained service.

    Source: Muri, section 4.2 (Muri-S), after Tiresias.
    """
    return (1.0, job.attained_gpu_s) if job.remaining_s is None else (0.0, job.remaining_s * job.gpu_count)


def las(job: PlanJob) -> tuple[float, ...]:
    """Least attained service first, a: the seconds of service received so far, whatever the GPU count."""
    return (job.attained_s,)


def two_dimensional_las(job: PlanJob) -> tuple[float, ...]:
    """Least attained service first, a·g: the GPU-seconds received so far (2D-LAS).

    Source: Muri, section 4.2 (Muri-L), after Tiresias; continuous, without its discrete queues.
    """
    return (job.attained_gpu_s,)


class Fifo(FixedOrder):
    """First in, first out; smaller jobs may pass a larger one (backfill)."""

    name = "fifo"
    order = "submit time"
    fixed = EXCLUSIVE_TO_THE_END
    ranking = fifo


class Sjf(FixedOrder):
    """Shortest job first, by the whole duration; what runs is left to finish."""

    name = "sjf"
    order = "whole duration"
    fixed = EXCLUSIVE_TO_THE_END
    ranking = sjf


class Srtf(FixedOrder):
    """Shortest remaining time first: the job that is done soonest."""

    name = "srtf"
    order = "remaining time"
    fixed = EXCLUSIVE
    ranking = srtf


class Srsf(FixedOrder):
    """Shortest remaining service first: the job that needs the fewest GPU-seconds."""

    name = "srsf"
    order = "remaining time × GPUs"
    fixed = EXCLUSIVE
    ranking = srsf


class TwoDimensionalLas(FixedOrder):
    """Least attained GPU-seconds first, compared continuously.

    Source: Tiresias (Gu et al., NSDI 2019), 2D-LAS, without its discrete queues.
    """

    name = "2d-las"
    order = "attained time × GPUs"
    fixed = EXCLUSIVE
    ranking = two_dimensional_las


def worst_fairness_first(request: PlanRequest) -> PriorityKey:
    """The order of finish-time fairness: the largest ρ first."""
    return lambda job: (-finish_time_fairness(job, request.now_s, request.interval_s),)


def finish_time_fairness(job: PlanJob, now_s: float, interval_s: float) -> float:
    """Expected ρ of a job that ran at full speed from now on; 1 for one that never waits.

    A job of unknown duration is expected to need as much service again as it has attained, and at least `interval_s`.
    """
    remaining_s = max(job.attained_s, interval_s) if job.remaining_s is None else job.remaining_s
    alone_s = job.attained_s + remaining_s
    return (max(0.0, now_s - job.submit_s) + remaining_s) / alone_s if alone_s > 0 else float("inf")


class Tiresias(QueuePolicy):
    """Discretized 2D-LAS: queues by attained GPU-seconds, FIFO in each.

    The queues keep jobs of like size from stopping each other again and again. A job that has waited more than
    `promote_after` times the service it has received is in the first queue until it runs.

    Source: Tiresias (Gu et al., NSDI 2019), with the thresholds of Muri's published simulator.
    """

    name = "tiresias"
    order = "queue, submit time"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By queue; the planner breaks ties by submit time."""
        queues = DiscreteQueues(request, self.rules)
        return lambda job: (float(queues.number(job)),)


class DiscreteQueues:
    """Tiresias' queues for one request."""

    def __init__(self, request: PlanRequest, options: PolicyOptions) -> None:
        self._running = {job.job_id for unit in request.running for job in unit.members}
        self._now_s = request.now_s
        self._limits_gpu_s, self._promote_after = options.queue_limits_gpu_s, options.promote_after

    def number(self, job: PlanJob) -> int:
        """Number of a job's queue, 0 for the most urgent."""
        waited = 0.0 if job.job_id in self._running else max(0.0, waited_s(job, self._now_s))
        promoted = waited > self._promote_after * job.attained_s
        return 0 if promoted else bisect_right(self._limits_gpu_s, job.attained_gpu_s)


# Algorithm 1 as published: whole rounds of pairwise matching by γ of Eq. 3 and Eq. 4. Source: Muri (Zhao et al.,
# SIGCOMM 2022), sections 4.2 and 5.
PAPER: Final[OptionValues] = MappingProxyType(
    {"grouping": "rounds", "merge": "whole-rounds", "objective": "efficiency", "speed_model": "lockstep"}
)


class MuriS(FixedOrder):
    """The paper's Muri for known durations: SRSF, then Algorithm 1."""

    name = "muri-s"
    order = "remaining time × GPUs"
    fixed = PAPER
    ranking = srsf


class MuriL(FixedOrder):
    """The paper's Muri for unknown durations: 2D-LAS, then Algorithm 1."""

    name = "muri-l"
    order = "attained time × GPUs"
    fixed = PAPER
    ranking = two_dimensional_las


class SrsfOrLas(QueuePolicy):
    """A policy by SRSF where all durations of jobs that may be grouped are known, else by 2D-LAS: they don't mix."""

    order = "as muri-s or muri-l"

    def key(self, request: PlanRequest) -> PriorityKey:
        """By remaining or by attained GPU-seconds."""
        known = all(job.remaining_s is not None for job in all_jobs(request) if job.may_share)
        return srsf if known else two_dimensional_las


class Auto(SrsfOrLas):
    """Follows Slurm's priorities where PriorityType=priority/multifactor (Slurm's default since 23.11), else SRSF if
    all durations are stated, else 2D-LAS.

    On a cluster of that PriorityType the controller takes `MuriSlurm` instead of this class. Only the durations of jobs
    that may be grouped count. Groups merge only as needed, and every option is honored.
    """

    name = "auto"
    order = "Slurm's, or as muri-s or muri-l"

    def plan_by(self, request: PlanRequest, key: PriorityKey) -> Plan:
        """Decide; the plan carries the name of the policy whose order was chosen."""
        name = MuriS.name if key is srsf else MuriL.name
        return plan_queue(request, name, key, self.rules)


class MuriJct(SrsfOrLas):
    """Muri for the average JCT: short jobs are not slowed for long ones.

    A member's speed is weighed by the inverse of the service that the job still needs (or has received, where durations
    are unknown). Grouping method and speed model can be set otherwise; the objective can't.
    """

    name = "muri-jct"
    defaults = MappingProxyType({"grouping": "optimal", "speed_model": "fair"})
    fixed = MappingProxyType({"objective": "jct"})


class MuriSlurm(FixedOrder):
    """Slurm's priority says who goes first, Muri chooses the partners.

    For sites whose priorities (age, fair share, QOS) must hold. Groups cost no job its turn: a less urgent one goes
    ahead only by sharing with a job that has its turn, or where a larger one cannot start yet (backfill, until
    `max_wait_s`). Jobs are grouped as under `auto`, and every option is honored.
    """

    name = "muri-slurm"
    order = "Slurm's priority"
    ranking = slurm
    in_order = True
