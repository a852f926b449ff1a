"""What planning takes and gives: plain frozen records, no I/O, no clock."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.traits import BatchModel, InterferenceTable, Sensitivity
from muri.profiler.records import StageProfile
from muri.profiler.slowdown import Parabola


class Reason(NamedTuple):
    """A template and its values; the sentence is made on demand, since people read few of a plan's reasons."""

    template: str
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        """The sentence."""
        return self.template.format(*self.values) if self.values else self.template


def sentences(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """The sentences of a decision."""
    return tuple(str(reason) for reason in reasons)


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A job that waits for GPUs or runs.

    Attributes:
        job_id: Slurm's job id.
        user: Owner.
        partition: Name of the set of nodes that it may run on: a Slurm partition, or a part of one such as "gpu
            (--constraint=v100)". Equal names mean the same nodes.
        gpu_count: GPUs of the whole job.
        submit_s: Submit time, seconds since the epoch.
        profile: Stage profile; None while the model is unknown.
        remaining_s: Expected seconds of service still needed alone; None when unknown.
        attained_gpu_s: GPU-seconds of service received so far.
        groupable: False for a job that must run alone.
        alone_reason: Why it must run alone; empty when groupable.
        waiting_since_s: When it last received service, seconds since the epoch; None: never.
        restart_s: Seconds that stopping and restarting it would cost.
        preemptible: Whether it may be stopped once it runs, because it can resume from a checkpoint.
        opportunistic: Whether it only uses what others leave over (AntMan's second class of jobs).
        node_count: Nodes that it must have, each with the same share of its GPUs; 1 leaves them to placement.
        sensitivity: Throughput over CPUs and host memory; None while unknown.
        batch: How iteration time and memory follow from the batch size; None while unknown.
        gpu_utilization: Share of its GPUs' time that it computes on them alone, 0 to 1; None while unknown.
        gpu_mem_request_gib: GPU memory that it asks for since an out-of-memory error; None before one.
        domain: Other properties that members of a group must have in common, such as "account hep, QOS normal".
        largest_group: Largest group that it may be in; with 1 it runs alone.
        priority: Slurm's own priority; higher goes first under the order of Slurm.
        min_speed: Minimum speed in a group, 1 = as fast as alone; 0: none.
        mem_gib: Host memory that it asks for on each node; 0 when unknown.
    """

    job_id: int
    user: str
    partition: str
    gpu_count: int
    submit_s: float
    profile: StageProfile | None = None
    remaining_s: float | None = None
    attained_gpu_s: float = 0.0
    groupable: bool = True
    alone_reason: str = ""
    waiting_since_s: float | None = None
    restart_s: float = 0.0
    preemptible: bool = False
    opportunistic: bool = False
    node_count: int = 1
    sensitivity: Sensitivity | None = None
    batch: BatchModel | None = None
    gpu_utilization: float | None = None
    gpu_mem_request_gib: float | None = None
    domain: str = ""
    largest_group: int = MAX_GROUP_SIZE
    priority: int = 0
    min_speed: float = 0.0
    mem_gib: float = 0.0

    @property
    def may_share(self) -> bool:
        """Whether it may be in any group."""
        return self.groupable and self.largest_group > 1

    @property
    def gpu_mem_gib(self) -> float:
        """Memory needed on each of its GPUs; 0 while unknown."""
        if self.gpu_mem_request_gib is not None:
            return self.gpu_mem_request_gib
        return 0.0 if self.profile is None else self.profile.gpu_mem_gib

    @property
    def attained_s(self) -> float:
        """Seconds of service received so far, as if all of its GPUs had always run at full speed."""
        return self.attained_gpu_s / self.gpu_count


# Who goes first: a smaller key is more urgent; ties go to the earlier, then to the lower job id.
PriorityKey = Callable[[PlanJob], tuple[float, ...]]


def waited_s(job: PlanJob, now_s: float) -> float:
    """Seconds since a job last received service, or since its submission."""
    return now_s - (job.submit_s if job.waiting_since_s is None else job.waiting_since_s)


def may_share_gpus(jobs: Sequence[PlanJob]) -> bool:
    """Whether the jobs' own limits allow a group of all of them: one domain, and no job's largest group exceeded."""
    return all(job.domain == jobs[0].domain and job.largest_group >= len(jobs) for job in jobs)


@dataclass(frozen=True, slots=True)
class FreeNode:
    """A node and its free GPUs.

    Attributes:
        name: Node name.
        partitions: Partitions that the node belongs to.
        free_gpus: GPUs that can be given out now.
        gpu_mem_gib: Memory of one GPU; 0 when unknown, which admits any group.
        gpu_count: GPUs of the node, free or not; 0 when unknown.
        islands: Indices of the free GPUs by island (one NVLink domain or one socket); empty when the topology is
            unknown.
        topology: Indices of all its GPUs by island, free or not; empty when unknown.
        in_order: Whether GPUs are given out in the order of their indices, as Slurm does, and not by best fit of
            islands.
        cpu_count: CPUs of the node; 0 when unknown, which limits nothing.
        mem_gib: Host memory of the node; 0 when unknown, which limits nothing.
        free_cpus: CPUs that can be given out now.
        free_mem_gib: Host memory that can be given out now.
    """

    name: str
    partitions: tuple[str, ...]
    free_gpus: int
    gpu_mem_gib: float = 0.0
    gpu_count: int = 0
    islands: tuple[tuple[int, ...], ...] = ()
    topology: tuple[tuple[int, ...], ...] = ()
    in_order: bool = False
    cpu_count: float = 0.0
    mem_gib: float = 0.0
    free_cpus: float = 0.0
    free_mem_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class CpuMemShare:
    """CPUs and host memory of one node that a job holds."""

    node: str
    cpus: float
    mem_gib: float


CpuMemShares = Mapping[int, tuple[CpuMemShare, ...]]  # Shares of each node, by job id


@dataclass(frozen=True, slots=True)
class NodeShare:
    """GPUs of one node that a job or group holds; `gpu_ids` is empty when the node's topology is unknown."""

    node: str
    gpu_count: int
    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Running:
    """A running job, or several that share GPUs.

    Attributes:
        members: The jobs, in the ordering in which they interleave.
        gpus: GPUs that they hold; not among the nodes' free ones.
        cpu_mem_shares: CPUs and memory of members; a job without an entry has its GPU-proportional share.
        accumulate_steps: Steps in which each iteration's batch is computed.
        mode: How members share, as in `Group.mode`.
        joinable: Whether waiting jobs may join it.
        spare_mem_gib: Host memory on each of its nodes for new members together; infinite when unknown.
        closed_to: Why waiting jobs must not join it, such as for lack of time, by job id.
        measured: Measured speeds by job id, 1 = as fast as alone; None in a simulation, where nothing is measured.
    """

    members: tuple[PlanJob, ...]
    gpus: tuple[NodeShare, ...]
    cpu_mem_shares: CpuMemShares = field(default_factory=dict)
    accumulate_steps: int = 1
    mode: Literal["interleave", "plain"] = "interleave"
    joinable: bool = True
    spare_mem_gib: float = float("inf")
    closed_to: Mapping[int, str] = field(default_factory=dict)
    measured: Mapping[int, float] | None = None

    @property
    def preemptible(self) -> bool:
        """Whether all members may be stopped."""
        return all(job.preemptible for job in self.members)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything that a plan depends on.

    Attributes:
        jobs: Waiting jobs, in any order.
        nodes: Nodes with their free GPUs, in any order; the busy ones too, with 0 free.
        now_s: The cycle's time, seconds since the epoch.
        max_group_size: Largest group, 1 to 4.
        same_user: Whether all members of a group must have one owner.
        running: The policy's running units, in any order.
        interval_s: Seconds until the next plan, within which a regrouping must pay for its restarts.
        larger_than_a_node: Jobs that need more GPUs than any node has: "slurm" leaves them to Slurm's own queue,
            "whole-nodes" gives them idle nodes.
        interference: Speeds of pairs, for the speed model "measured" and for policies that pack.
        slowdowns: Horus's f by type of GPU, where it was fitted on this site.
        whole_sets_only: Whether a job may share GPUs only with jobs that hold exactly the same ones.
        trusted: Whether its maker guarantees that it is valid, so that policies need not check it.
        explained: Whether decisions carry their reasons, which a simulation of many plans does without.
    """

    jobs: tuple[PlanJob, ...]
    nodes: tuple[FreeNode, ...]
    now_s: float
    max_group_size: int = 4
    same_user: bool = True
    running: tuple[Running, ...] = ()
    interval_s: float = 360.0
    larger_than_a_node: Literal["slurm", "whole-nodes"] = "slurm"
    interference: InterferenceTable | None = None
    slowdowns: Mapping[str, Parabola] = field(default_factory=dict)
    whole_sets_only: bool = False
    trusted: bool = False
    explained: bool = True


def all_jobs(request: PlanRequest) -> Iterable[PlanJob]:
    """The waiting jobs, then the running ones."""
    yield from request.jobs
    for running in request.running:
        yield from running.members


@dataclass(frozen=True, slots=True)
class Group:
    """Two or more jobs that will share the same GPUs.

    Attributes:
        members: Job ids in the planned ordering (position i starts with stage i; Eq. 3).
        gpus: Where the group runs.
        gpu_count: GPUs that the group holds.
        period_s: T of Eq. 3, seconds per interleaved iteration; 0 where the speed model has no period.
        efficiency: Interleaving efficiency γ of Eq. 4.
        speed: Predicted speed of each member by job id, 1 = as fast as alone.
        reasons: Why these jobs.
        kept: Whether exactly this group runs on these GPUs already.
        joining: Members that join the others, which already run on these GPUs; empty for a new or unchanged group.
        mode: "interleave": stages take turns on resources (Muri); "plain": members run side by side without turns.
    """

    members: tuple[int, ...]
    gpus: tuple[NodeShare, ...]
    gpu_count: int
    period_s: float
    efficiency: float
    speed: Mapping[int, float]
    reasons: tuple[Reason, ...] = ()
    kept: bool = False
    mode: Literal["interleave", "plain"] = "interleave"
    joining: tuple[int, ...] = ()

    @property
    def node(self) -> str:
        """Name of the first node."""
        return self.gpus[0].node


@dataclass(frozen=True, slots=True)
class Solo:
    """A job to start with its own request; Slurm chooses the node.

    Attributes:
        job_id: The job.
        reasons: Why it runs alone.
        gpus: Where the plan counted its GPUs; empty when it must queue in Slurm.
        kept: Whether it runs there already.
    """

    job_id: int
    reasons: tuple[Reason, ...] = ()
    gpus: tuple[NodeShare, ...] = ()
    kept: bool = False

    @property
    def node(self) -> str:
        """Name of its node; empty when it spans nodes or must queue in Slurm."""
        return self.gpus[0].node if len(self.gpus) == 1 else ""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A job on GPUs of its own choice, which other jobs may hold as well.

    Attributes:
        job_id: The job.
        gpus: Its GPUs, with `gpu_ids`; as many as it asked for, except under an elastic policy.
        speed: Predicted speed, 1 = as fast as alone with its own GPU count and undivided batch.
        accumulate_steps: Steps in which each iteration's batch is computed.
        reasons: Why here.
        kept: Whether it runs there already, in as many steps.
    """

    job_id: int
    gpus: tuple[NodeShare, ...]
    speed: float = 1.0
    accumulate_steps: int = 1
    reasons: tuple[Reason, ...] = ()
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that gets no GPUs in this cycle; `preempted`: it runs now and must stop."""

    job_id: int
    reasons: tuple[Reason, ...] = ()
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class Certificate:
    """The value of a grouping, and a proven bound on the value of any grouping of the same jobs."""

    value: float = 0.0
    upper_bound: float = 0.0

    @property
    def gap(self) -> float:
        """Share of the bound by which the value may fall short of the optimum; 0: proven optimal."""
        return max(0.0, 1.0 - self.value / self.upper_bound) if self.upper_bound > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for every job of the request, waiting or running: each appears exactly once.

    Attributes:
        policy: Name of the policy that decided.
        groups: Groups to start or keep, in the order in which they got GPUs.
        solo: Jobs to start or keep alone.
        waiting: Jobs to hold or to stop, most urgent first.
        certificate: How far the grouping can be from the optimum.
        sharers: Jobs to start or keep on GPUs of their own choice, by a policy that packs.
        cpu_mem_shares: CPUs and host memory by job id; a job without an entry keeps its GPU-proportional share.
        promises: Minimum speeds of jobs once they run, 1 = as fast as alone, 0: none; a job without an entry has the
            larger of the site's and its own.
    """

    policy: str
    groups: tuple[Group, ...] = ()
    solo: tuple[Solo, ...] = ()
    waiting: tuple[Waiting, ...] = field(default=())
    certificate: Certificate = Certificate()
    sharers: tuple[Sharer, ...] = ()
    cpu_mem_shares: CpuMemShares = field(default_factory=dict)
    promises: Mapping[int, float] = field(default_factory=dict)


ProfileUse = Literal["none", "sharing", "all"]  # Jobs whose stage profiles matter to a policy


class Policy(ABC):
    """The base of all policies: which jobs run when and together, and facts for the controller and the simulator.

    Attributes:
        name: The name by which the configuration and the commands select the policy.
        supports_packing: Whether its plans put jobs on GPUs one by one (`Plan.sharers`), not in groups (`Plan.groups`).
        elastic: Whether a job may get another number of GPUs than it asked for; `muri simulate` only.
        plain_groups: Whether members of its groups may run without turns, so that it needs `PlanRequest.interference`.
        allocates_cpus: Whether its plans give out CPUs and host memory (`Plan.cpu_mem_shares`) according to profiles.
        retries_out_of_memory: Whether a job that ran out of GPU memory in a group asks for more, instead of running
            alone next time.
    """

    name: ClassVar[str]
    supports_packing: ClassVar[bool] = False
    elastic: ClassVar[bool] = False
    plain_groups: ClassVar[bool] = False
    allocates_cpus: ClassVar[bool] = False
    retries_out_of_memory: ClassVar[bool] = False

    @property
    def profile_use(self) -> ProfileUse:
        """Jobs whose stage profiles change its plans: only their models are worth a dry run on Slurm."""
        return "all" if self.allocates_cpus else "sharing"

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job. A pure function: the same request gives the same plan, byte for byte."""
