"""What planning takes and gives: plain frozen records, no I/O, no clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from muri.profiler.records import StageProfile


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job that waits for GPUs and whose fate Muri decides.

    Attributes:
        job_id: Slurm's job id.
        user: Owner; jobs of different owners never share a process.
        partition: Slurm partition.
        gpu_count: GPUs of the whole job.
        submit_s: Submit time, seconds since the epoch.
        profile: Stage profile, None while the model is unknown.
        remaining_s: Expected seconds of service still needed alone, None when unknown.
        attained_gpu_s: GPU-seconds of service received so far.
        groupable: False for a job that must run alone.
        alone_reason: Why it must run alone; empty when groupable.
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


@dataclass(frozen=True, slots=True)
class FreeNode:
    """A node and the GPUs on it that nobody holds now.

    Attributes:
        name: Node name.
        partitions: Partitions that the node belongs to.
        free_gpus: GPUs that can be given out now.
        gpu_mem_gib: Memory of one GPU; 0 when unknown, which admits any group.
        gpu_count: GPUs that the node has, free or not; 0 when unknown.
    """

    name: str
    partitions: tuple[str, ...]
    free_gpus: int
    gpu_mem_gib: float = 0.0
    gpu_count: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything that a plan depends on.

    Attributes:
        jobs: Jobs to decide on, in any order.
        nodes: Nodes with their free GPUs, in any order; the busy ones too, with 0 free.
        now_s: The cycle's time, seconds since the epoch.
        max_group_size: Most jobs per group, 1 to 4.
        same_user: Whether all members of a group must have one owner.
    """

    jobs: tuple[PendingJob, ...]
    nodes: tuple[FreeNode, ...]
    now_s: float
    max_group_size: int = 4
    same_user: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Two or more jobs that will share the same GPUs.

    Attributes:
        members: Job ids in the planned ordering (position i starts with stage i; Eq. 3).
        node: Where the group runs.
        gpu_count: GPUs that the group holds.
        period_s: T of Eq. 3, seconds per interleaved iteration.
        efficiency: Interleaving efficiency γ of Eq. 4.
        speed: Predicted speed of each member by job id, 1 = as fast as alone.
        reasons: Why these jobs, for people.
    """

    members: tuple[int, ...]
    node: str
    gpu_count: int
    period_s: float
    efficiency: float
    speed: Mapping[int, float]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Solo:
    """A job to start with its own request; Slurm chooses the node.

    Attributes:
        job_id: The job.
        reasons: Why it runs alone, for people.
        node: Where the plan counted its GPUs; empty when it spans nodes or must queue in Slurm.
    """

    job_id: int
    reasons: tuple[str, ...] = ()
    node: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that stays held in this cycle."""

    job_id: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for every job of the request: each appears exactly once.

    Attributes:
        policy: Name of the policy that decided.
        groups: Groups to start, in the order in which they got GPUs.
        solo: Jobs to start alone.
        waiting: Jobs to keep held, most urgent first.
    """

    policy: str
    groups: tuple[Group, ...] = ()
    solo: tuple[Solo, ...] = ()
    waiting: tuple[Waiting, ...] = field(default=())


class Policy(Protocol):
    """One way of deciding who runs when and with whom."""

    @property
    def name(self) -> str:
        """The name by which the configuration and the commands select the policy."""
        ...

    def plan(self, request: PlanRequest) -> Plan:
        """Decide. A pure function: the same request gives the same plan, byte for byte."""
        ...
