"""CPUs and memory of a plan: what a job is given of them, and how it gets its own request back. Pure."""

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from ClusterShell.NodeSet import NodeSet

from muri.policies.types import HostShare
from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import GivenShare, ResetRequest
from muri.slurm_plugin.config import Allocation, Config
from muri.slurm_plugin.model import Job, JobChange, JobState
from muri.slurm_plugin.view import Role, View

OPTIONS_PER_GPU: Final = ("--cpus-per-gpu", "--mem-per-gpu")
_MIB_PER_GIB: Final = 1024
# Absorbs the rounding of figures such as 3 × 16 / 3 before they are cut to whole CPUs.
_SLACK: Final = 1e-6


def asked_by(job: Job) -> tags.Original:
    """Return a job's request as it stands in Slurm now."""
    return tags.Original(
        gpu_request=job.gpu_request,
        required_nodes=job.required_nodes,
        cpu_count=job.cpu_count,
        cpus_per_task=job.cpus_per_task,
        mem_per_node_mib=job.mem_per_node_mib,
        time_limit_s=job.time_limit_s,
        mem_per_cpu_mib=job.mem_per_cpu_mib,
    )


def as_asked(job: Job) -> Job:
    """A job with the CPUs, memory and nodes that its user asked for, whatever it was given."""
    given = tags.parse_given(job.admin_comment)
    if given is None:
        return job
    original = given.original
    return replace(
        job,
        required_nodes=original.required_nodes,
        cpu_count=original.cpu_count,
        cpus_per_task=original.cpus_per_task,
        mem_per_node_mib=original.mem_per_node_mib,
        mem_per_cpu_mib=original.mem_per_cpu_mib,
    )


def share_of(
    job: Job, planned: Sequence[HostShare], allocation: Allocation, *, measured: bool, threads_per_core: int = 1
) -> GivenShare | None:
    """Return what a job is given when it starts, None where its own request stays as it is.

    Args:
        job: A held job with its own request.
        planned: What the plan gives it of each of its nodes.
        allocation: What may be changed.
        measured: Whether it was measured what CPUs do to the job: only then it may get fewer than it asked for.
        threads_per_core: CPUs of a core on the planned nodes. Slurm gives out whole cores; half of one would be
            taken from a share planned for another job.
    """
    # What Slurm would lay out differently from the plan is left alone.
    if not planned or len(planned) != max(1, job.node_count) or job.array or job.het or _per_gpu(job):
        return None
    cpus = min(share.cpus for share in planned)
    cpus_per_task = _cpus_per_task(job, cpus, threads_per_core, allocation, measured=measured)
    mem_mib = _mem_mib(job, min(share.mem_gib for share in planned), allocation)
    if allocation.cpus == allocation.memory == "off":
        return None
    names = job.required_nodes or str(NodeSet.fromlist(sorted(share.node for share in planned)))
    return GivenShare(cpus_per_task * job.task_count, cpus_per_task, mem_mib, names, asked_by(job))


def _per_gpu(job: Job) -> bool:
    """Whether CPUs or memory were asked for per GPU, as far as the submit line tells.

    A changed count does not reach such a job's steps, and srun refuses memory both per GPU and per node.
    """
    return any(option in job.submit_line for option in OPTIONS_PER_GPU)


def _cpus_per_task(job: Job, cpus: float, threads_per_core: int, allocation: Allocation, *, measured: bool) -> int:
    tasks_per_node = -(-job.task_count // max(1, job.node_count))
    wanted = max(1, math.floor((cpus + _SLACK) / tasks_per_node))
    if wanted >= threads_per_core:
        wanted -= wanted % threads_per_core
    if allocation.cpus == "off" or not cpus:
        return job.cpus_per_task
    if allocation.cpus == "raise-only" or not measured:
        return max(job.cpus_per_task, wanted)
    return wanted


def _mem_mib(job: Job, mem_gib: float, allocation: Allocation) -> int:
    """Memory per node: never less than the job asked for; 0 leaves it alone, for then it may mean all of the node's."""
    if not job.mem_per_node_mib or allocation.memory == "off":
        return job.mem_per_node_mib
    return max(job.mem_per_node_mib, math.floor(mem_gib * _MIB_PER_GIB + _SLACK))


def group_cpus(shares: Sequence[Sequence[HostShare]], allocation: Allocation) -> int:
    """Return the CPUs on each node that a plan gives a group's members together, 0 where it does not say."""
    if allocation.cpus == "off" or not all(shares):
        return 0
    return math.floor(sum(min(share.cpus for share in planned) for planned in shares) + _SLACK)


def group_mem_mib(jobs: Sequence[Job], shares: Sequence[Sequence[HostShare]], allocation: Allocation) -> int:
    """Return the memory on each node for a group: what its members asked for, or the plan's if that is more."""
    asked_mib = sum(job.mem_per_node_mib for job in jobs)
    if allocation.memory == "off" or not asked_mib or not all(shares):
        return asked_mib
    planned_gib = sum(min(share.mem_gib for share in planned) for planned in shares)
    return max(asked_mib, math.floor(planned_gib * _MIB_PER_GIB + _SLACK))


def share_text(share: GivenShare) -> str:
    """Say for people what a job is given."""
    original = share.original
    return "it gets " + given_text(
        original.cpu_count, share.cpu_count, original.mem_per_node_mib, share.mem_per_node_mib
    )


def given_text(asked_cpus: int, cpus: int, asked_mem_mib: int, mem_mib: int) -> str:
    """Say what a job has, and what it had asked for where that differs; memory is per node, 0 where nothing is set."""
    text = f"{asked_cpus} → {cpus} CPUs" if cpus != asked_cpus else f"{cpus} CPUs"
    if not mem_mib:
        return text
    asked_gib, gib = asked_mem_mib / _MIB_PER_GIB, mem_mib / _MIB_PER_GIB
    memory = f"{asked_gib:.1f} → {gib:.1f}" if mem_mib != asked_mem_mib else f"{gib:.1f}"
    return f"{text} and {memory} GiB of memory on each node"


def given_change(share: GivenShare) -> JobChange:
    """Return the change that gives a held job its share.

    Memory is always said per node: a request per CPU would grow and shrink with the CPUs.
    """
    return JobChange(
        required_nodes=share.nodes,
        cpu_count=share.cpu_count,
        cpus_per_task=share.cpus_per_task,
        mem_per_node_mib=share.mem_per_node_mib or None,
    )


def reset_change(job: Job, original: tags.Original) -> JobChange:
    """Return the change that gives a pending job its own CPUs, memory and nodes back, and drops the tag."""
    per_cpu = original.mem_per_cpu_mib
    return JobChange(
        required_nodes=original.required_nodes,
        cpu_count=original.cpu_count,
        cpus_per_task=original.cpus_per_task,
        mem_per_node_mib=None if per_cpu else original.mem_per_node_mib or None,
        mem_per_cpu_mib=per_cpu or None,
        admin_comment=tags.with_token(job.admin_comment, tags.GIVEN_PREFIX, None),
    )


def resets(view: View, config: Config, now_s: float, settled: AbstractSet[int]) -> Iterator[ResetRequest]:
    """Give back their own request to jobs that were given another and do not start with it.

    A held one was left behind by a controller that died before it released the job, or was stopped or held again.
    A released one waits for a share that turned out not to be there: Slurm's queue decides with its own request.

    Args:
        view: The snapshot by roles.
        config: How long a start may take.
        now_s: The cycle's time.
        settled: Jobs that other actions look after.
    """
    for role in (Role.CANDIDATE, Role.NOT_OURS, Role.USER_HELD, Role.RELEASED):
        for job in view.having(role):
            given = tags.parse_given(job.admin_comment)
            if given is None or job.state is not JobState.PENDING or job.job_id in settled:
                continue
            if role is not Role.RELEASED:
                yield ResetRequest(job.job_id, "it was not started with the CPUs and memory that it was given")
            elif now_s - given.given_s > config.host.start_timeout_s:
                yield ResetRequest(job.job_id, "the CPUs and memory that it was given are not free")
