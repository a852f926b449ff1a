"""What runs now, as a policy sees it, and what a plan means for it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from muri.policies.types import (
    CpuMemShare,
    CpuMemShares,
    Group,
    NodeShare,
    Plan,
    PlanJob,
    PlanRequest,
    Running,
    Solo,
    Waiting,
    sentences,
)
from muri.slurm_plugin.planning.actions import Preempt
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.model_traits import with_derived
from muri.slurm_plugin.planning.request import plan_job
from muri.slurm_plugin.planning.starts import as_asked
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.comment_tags import Mode
from muri.slurm_plugin.records.host_lists import names_in
from muri.slurm_plugin.records.roles import ManagedJob, Role, View
from muri.units import MIB_PER_GIB


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A running group.

    Attributes:
        pilot: Its pilot job.
        members: Members that still wait or run, by job id.
    """

    pilot: ManagedJob
    members: tuple[ManagedJob, ...]

    @property
    def mode(self) -> Mode:
        """How they share, as in `Group.mode`."""
        return self.pilot.mode


def running_groups(view: View) -> tuple[RunningGroup, ...]:
    """Return the groups whose pilot job runs, in the order of their pilots."""
    members: dict[int, list[ManagedJob]] = {}
    for job in view.having(Role.MEMBER):
        if job.membership is not None:
            members.setdefault(job.membership.pilot, []).append(job)
    return tuple(
        RunningGroup(pilot, tuple(members[pilot.job_id]))
        for pilot in view.having(Role.PILOT)
        if pilot.state is JobState.RUNNING and pilot.job_id in members
    )


def as_submitted(job: ManagedJob, pilot: Job) -> ManagedJob:
    """A member with the request that it had before it was grouped."""
    if job.membership is None:
        return job
    return replace(job, gpu_count=pilot.gpu_count, gpu_request=job.membership.original.gpu_request)


def running_units(cycle: CycleInput) -> tuple[Running, ...]:
    """Return what runs and belongs to Muri: groups, and jobs that were released alone."""
    known = {node.name for node in cycle.nodes if node.usable and node.gpu_count}
    units = [*_groups(cycle), *_solos(cycle)]
    return tuple(unit for unit in units if unit.gpus and all(share.node in known for share in unit.gpus))


def _groups(cycle: CycleInput) -> Iterator[Running]:
    for group in running_groups(cycle.view):
        if any(job.state is not JobState.RUNNING for job in group.members):
            continue  # it is starting or ending: Slurm settles that first
        members = tuple(_plan_job(as_submitted(job, group.pilot), cycle) for job in group.members)
        yield Running(members, _shares(group.pilot), _member_shares(group), mode=group.mode)


def _solos(cycle: CycleInput) -> Iterator[Running]:
    for job in cycle.view.having(Role.RELEASED):
        if job.state is JobState.RUNNING and job.gpu_count and not (job.array or job.het):
            asked = as_asked(job)
            yield Running((_plan_job(asked, cycle),), _shares(job), {job.job_id: _held_shares(job)})


def _held_shares(job: Job, part: float = 1.0) -> tuple[CpuMemShare, ...]:
    """A part of the CPUs and memory that a job holds on each of its nodes."""
    names = sorted(names_in(job.nodes))
    mem_gib = part * job.mem_per_node_mib / MIB_PER_GIB
    return tuple(CpuMemShare(name, part * job.cpu_count / len(names), mem_gib) for name in names)


def _member_shares(group: RunningGroup) -> CpuMemShares:
    """What a group's pilot holds, the same part of it for each member."""
    shares = _held_shares(group.pilot, 1 / len(group.members))
    return {member.job_id: shares for member in group.members}


def _shares(job: Job) -> tuple[NodeShare, ...]:
    names = sorted(names_in(job.nodes))
    if not names or job.gpu_count % len(names):
        return ()
    return tuple(NodeShare(name, job.gpu_count // len(names)) for name in names)


def _plan_job(job: ManagedJob, cycle: CycleInput) -> PlanJob:
    key = cycle.key_of(job)
    planned = with_derived(plan_job(job, key, cycle), job, cycle.nodes)
    ran_s = max(0.0, cycle.now_s - job.start_s)
    left_s = None if planned.remaining_s is None else max(1.0, planned.remaining_s - ran_s)
    settled = ran_s >= cycle.config.preemption.least_run_s
    return replace(
        planned,
        remaining_s=left_s,
        attained_gpu_s=planned.attained_gpu_s + ran_s * job.gpu_count,
        restart_s=cycle.config.preemption.restart_s,
        preemptible=settled and not why_not_preemptible(job),
    )


def stop_actions(stops: tuple[Waiting, ...], request: PlanRequest, view: View) -> tuple[Preempt, ...]:
    """Return the actions that stop running jobs, each with the service that the job has had in this run."""
    ran_s = {job_id: request.now_s - view.jobs[job_id].start_s for job_id in (item.job_id for item in stops)}
    gpus = {job.job_id: job.gpu_count for unit in request.running for job in unit.members}
    return tuple(
        Preempt(
            item.job_id,
            view.jobs[item.job_id].restart_count,
            sentences(item.reasons),
            served_gpu_s=max(0.0, ran_s[item.job_id]) * gpus[item.job_id],
        )
        for item in stops
    )


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan, split into what can be done now.

    Attributes:
        plan: Starts that need no running job to stop first.
        stops: Running jobs that have to stop, with the reasons; what was planned for their GPUs is
            planned anew when these are free.
    """

    plan: Plan
    stops: tuple[Waiting, ...]


def settle(plan: Plan, request: PlanRequest) -> Settled:
    """Take out of a plan what runs already, and what has to wait until running jobs have stopped."""
    at_work = {job.job_id for unit in request.running for job in unit.members}
    stops = [item for item in plan.waiting if item.job_id in at_work and item.preempted]
    for group in plan.groups:
        stops += [Waiting(job, group.reasons, True) for job in group.members if job in at_work and not group.kept]
    stops += [Waiting(solo.job_id, solo.reasons, True) for solo in plan.solo if _moves(solo, at_work)]
    free = {node.name: node.free_gpus for node in request.nodes}
    groups = [group for group in plan.groups if not at_work & set(group.members) and _fits(group, free)]
    solo = [item for item in plan.solo if item.job_id not in at_work and _fits(item, free)]
    started = {job for group in groups for job in group.members} | {item.job_id for item in solo}
    waiting = [item for item in plan.waiting if item.job_id not in at_work]
    waiting += _postponed(plan, started | at_work)
    return Settled(replace(plan, groups=tuple(groups), solo=tuple(solo), waiting=tuple(waiting)), tuple(stops))


def _moves(solo: Solo, at_work: set[int]) -> bool:
    return solo.job_id in at_work and not solo.kept


def _fits(item: Group | Solo, free: dict[str, int]) -> bool:
    """Take a start's GPUs out of what is free now; False when running jobs still hold them."""
    if any(share.gpu_count > free.get(share.node, 0) for share in item.gpus):
        return False
    for share in item.gpus:
        free[share.node] -= share.gpu_count
    return True


def _postponed(plan: Plan, settled: set[int]) -> Iterator[Waiting]:
    for group in plan.groups:
        yield from (Waiting(job, group.reasons) for job in group.members if job not in settled)
    yield from (Waiting(item.job_id, item.reasons) for item in plan.solo if item.job_id not in settled)


def why_not_preemptible(job: ManagedJob) -> str:
    """Return why a job must not be stopped, "" when it may be.

    Two things are needed: the user's consent at submission, and a script that has declared its checkpoint in this run.
    """
    if job.role not in {Role.MEMBER, Role.RELEASED}:
        return "it was not submitted with --muri, or Muri has not started it"
    checks = (
        (job.state is not JobState.RUNNING, f"it does not run ({job.state})"),
        (not job.request.checkpoint, "it was not submitted with --muri=checkpoint=1"),
        (not job.can_requeue, "it was submitted with --no-requeue"),
        (job.array or job.het, "job arrays and heterogeneous jobs are not stopped"),
        (
            job.reports.checkpoint_run != job.restart_count,
            "its script has not called muri.checkpoint in this run",
        ),
    )
    return next((reason for applies, reason in checks if applies), "")
