"""The sentences that tell people why a job was grouped, started or kept waiting."""

from collections.abc import Sequence

from muri.policies.grouping.algorithm1 import Unit
from muri.policies.placement import FreeGpus
from muri.policies.speed.lockstep import Interleaving
from muri.policies.types import PlanJob

NEEDS_PROFILE = "waits for a profile of its model"
QUEUES_IN_SLURM = "Slurm's own queue takes it on with its original request"


def plural(count: int, noun: str) -> str:
    """A number and its noun: "1 GPU", "2 GPUs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listing(job_ids: Sequence[int]) -> str:
    """Job ids as people write them: "102, 103 and 104"."""
    *first, last = [str(job_id) for job_id in job_ids]
    return f"{', '.join(first)} and {last}" if first else last


def grouped(unit: Unit, interleaving: Interleaving, node: str) -> tuple[str, ...]:
    """Why these jobs share GPUs."""
    job_ids = [member.job.job_id for member in unit.members]
    held = "; ".join(
        f"{member.job.job_id} mostly uses the {member.job.profile.bottleneck}"
        for member in unit.members
        if member.job.profile is not None
    )
    return (
        f"{listing(job_ids)} are grouped: interleaving efficiency γ = {interleaving.efficiency:.2f}, expected "
        f"{sum(interleaving.speed):.2f} iterations' worth of work in the time of one",
        held,
        f"too few GPUs are free for them to run apart; they share {plural(unit.head.gpu_count, 'GPU')} of {node}",
    )


def alone(job: PlanJob, partners: int, *, sharing: bool, room_for_all: bool) -> tuple[str, ...]:
    """Why a job starts by itself.

    Args:
        job: The job.
        partners: How many others it might have shared with.
        sharing: Whether the policy lets jobs share at all.
        room_for_all: Whether every job found GPUs of its own.
    """
    free = f"{plural(job.gpu_count, 'GPU')} of partition {job.partition} can be given to it"
    if not sharing:
        return (free,)
    if not job.groupable:
        return (free, job.alone_reason or "it must run alone")
    if job.profile is not None and sum(job.profile.stage_s) == 0:
        return (free, "its profile shows no stage times, so nothing is known about sharing")
    if room_for_all:
        return (free, "there is room for every job, so nobody has to share")
    if partners == 0:
        return (free, f"no other job that may share with it waits ({_bucket(job)})")
    return (
        free,
        f"of the {plural(partners, 'job')} that may share with it, none is a better use of these GPUs",
    )


def waiting(job: PlanJob, ahead: int, free: FreeGpus) -> tuple[str, ...]:
    """Why a job stays held.

    Args:
        job: The job.
        ahead: Waiting jobs of its partition with a higher priority.
        free: What is left after everything else was placed.
    """
    queue = f"{plural(ahead, 'job')} {'is' if ahead == 1 else 'are'} ahead of it" if ahead else "it is next in line"
    most = free.most_on_one_node(job.partition)
    if not free.has_nodes(job.partition):
        return (f"{queue} and no node of partition {job.partition} can be used now",)
    if most == 0:
        return (f"{queue} and no GPU is free in partition {job.partition}",)
    return (
        f"{queue}; it needs {plural(job.gpu_count, 'GPU')} on one node, "
        f"and the most that is free on one node of partition {job.partition} is {most}",
    )


def larger_than_a_node(job: PlanJob, largest: int) -> tuple[str, ...]:
    """Why a job of several nodes is left to Slurm."""
    return (
        f"larger than a node: it asks for {plural(job.gpu_count, 'GPU')}, and the largest node of partition "
        f"{job.partition} has {largest}",
        QUEUES_IN_SLURM,
    )


def aged(waited_s: float, max_wait_s: float) -> tuple[str, ...]:
    """Why a job is no longer held back."""
    return (
        f"it has waited {duration(waited_s)}, longer than max_wait_s allows ({duration(max_wait_s)})",
        QUEUES_IN_SLURM,
    )


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def _bucket(job: PlanJob) -> str:
    return f"user {job.user}, partition {job.partition}, {plural(job.gpu_count, 'GPU')}"
