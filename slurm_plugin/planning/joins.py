"""Waiting jobs that join a running group instead of waiting for GPUs of their own. Pure."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from muri.policies.speed.model import SpeedModel, shape_of
from muri.policies.speed.registry import speed_model
from muri.policies.types import Plan
from muri.profiler.estimates import why_estimated
from muri.profiler.records import StageProfile
from muri.slurm_plugin.planning.actions import Abandon, Action, Join, MemberPlan, join_in
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.placement import Places, domain_of
from muri.slurm_plugin.planning.request import alone_reason
from muri.slurm_plugin.planning.running import RunningGroup, as_submitted, running_groups
from muri.slurm_plugin.planning.site_limits import PILOT_EXTRA_S, SiteRoom
from muri.slurm_plugin.planning.starts import member_plan
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_LEAST_GAIN = 0.2
"""What a join must add to the group's total speed, in jobs running alone at full speed: below that the
new member would mostly take from the others."""


def begun_joins(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the newest join of each job, closed ones included, by job id."""
    return {int(intent.payload["member"]["job_id"]): intent for intent in intents if intent.kind == JOIN}


def groups_by_pilot(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the group starts by pilot job, their members and those that joined later together."""
    groups = {intent.submitted_job: intent for intent in intents if intent.kind == GROUP and intent.submitted_job}
    for intent in begun_joins(intents).values():
        group = groups.get(int(intent.payload["host"]))
        if group is not None and group.submitted_job is not None and intent.state == "done":
            members = [*group.payload["members"], intent.payload["member"]]
            groups[group.submitted_job] = replace(group, payload={**group.payload, "members": members})
    return groups


def resume_joins(view: View, intents: tuple[Intent, ...]) -> Iterator[Action]:
    """Resume joins that a killed controller left unfinished."""
    for job_id, intent in begun_joins(intents).items():
        if intent.state != "begun":
            continue
        job, pilot = view.active(job_id), view.active(int(intent.payload["host"]))
        if job is None or not job.gated:
            yield Abandon(intent.token, f"job {job_id} is not waiting to join any more")
        elif pilot is None or pilot.state is not JobState.RUNNING:
            yield Abandon(intent.token, f"the group that job {job_id} was to join has ended")
        else:
            yield join_in(intent.payload, intent.token)


def find_joins(plan: Plan, cycle: CycleInput, room: SiteRoom) -> tuple[Join, ...]:
    """Return the joins of a cycle: waiting jobs in the plan's order, each to the group that gains most.

    A group takes one new member in a cycle, so that the next decision rests on what is true then.
    """
    grouping = cycle.config.grouping
    if not grouping.join or grouping.discipline == "lockstep" or grouping.max_group_size < 2:
        return ()
    groups = {group.pilot.job_id: group for group in running_groups(cycle.view)}
    model = speed_model("fair" if grouping.speed_model == "default" else grouping.speed_model)
    joins: list[Join] = []
    for waiting in plan.waiting:
        job = cycle.view.jobs[waiting.job_id]
        if job.role is not Role.CANDIDATE or alone_reason(job, cycle):
            continue
        gains = {pilot: _gain(job, group, cycle, model) for pilot, group in groups.items()}
        best = max(gains, key=lambda pilot: (gains[pilot][0], -pilot), default=None)
        if best is None or gains[best][0] < _LEAST_GAIN:
            continue
        group, (gain, speed) = groups.pop(best), gains[best]
        joins.append(join_to(job, group, speed, cycle, room, (_why(group, gain),)))
    return tuple(joins)


def _gain(job: ManagedJob, group: RunningGroup, cycle: CycleInput, model: SpeedModel) -> tuple[float, float]:
    """What a join adds to a group's total speed, and the new member's own speed; (0, 0) when it cannot join."""
    profiles = [_profile(member, group.pilot, cycle) for member in group.members]
    own = cycle.knowledge.profile_for(job, cycle.key_of(job))
    if own is None or None in profiles or why_no_room(job, group, cycle):
        return 0.0, 0.0
    shapes = [shape_of(profile) for profile in (*profiles, own) if profile is not None]
    gpu_mem_gib = _gpu_mem_gib(group, cycle)
    if gpu_mem_gib and sum(shape.gpu_mem_gib for shape in shapes) > gpu_mem_gib:
        return 0.0, 0.0
    count = len(shapes)
    before = float(model.evaluate(shapes[:-1], np.arange(count - 1).reshape(1, -1)).speed.sum())
    after = model.evaluate(shapes, np.arange(count).reshape(1, -1)).speed[0]
    return float(after.sum()) - before, float(after[-1])


def _profile(member: ManagedJob, pilot: Job, cycle: CycleInput) -> StageProfile | None:
    return cycle.knowledge.profile_of(cycle.key_of(as_submitted(member, pilot)))


def why_no_room(job: Job, group: RunningGroup, cycle: CycleInput) -> str:
    """Return why a job cannot join a group now, "" when it can.

    Args:
        job: The job.
        group: The group.
        cycle: What the cycle decides on.
    """
    pilot, node = group.pilot, next((node for node in cycle.nodes if node.name == group.pilot.nodes), None)
    # A group that is starting or ending is left alone, and a group on several GPUs has a runtime on each of them.
    checks = (
        (any(member.state is not JobState.RUNNING for member in group.members), "a member of the group is not at work"),
        ((job.uid, job.partition) != (pilot.uid, pilot.partition), "the group is of another user or partition"),
        (
            any(domain_of(as_submitted(member, pilot)) != domain_of(job) for member in group.members),
            f"the group is not of {domain_of(job)}",
        ),
        (pilot.nodes not in Places(cycle.view.snapshot).of(job).nodes, "the group's node is none that it may get"),
        (job.gpu_count != pilot.gpu_count or pilot.gpu_count != 1, "only jobs on one GPU are joined"),
        (group.mode == "plain", "the group's members share without turns, and only they were measured to get on so"),
        (len(group.members) >= cycle.config.grouping.max_group_size, "the group is full (grouping.max_group_size)"),
        (node is None or not node.usable, "the group's node takes no new work"),
        (node is not None and node.cpu_count <= node.cpus_allocated, "the group's node has no CPU left for its script"),
        (not _memory_fits(job, group), "the group's job has not asked for enough host memory for both"),
    )
    return next((why for applies, why in checks if applies), "")


def _gpu_mem_gib(group: RunningGroup, cycle: CycleInput) -> float:
    """Memory of the group's GPU, 0 when unknown."""
    types = (node.gpu_type for node in cycle.nodes if node.name == group.pilot.nodes)
    return next((cycle.config.gpu_mem_gib.get(kind, 0.0) for kind in types), 0.0)


def _memory_fits(job: Job, group: RunningGroup) -> bool:
    present = sum(
        member.membership.original.mem_per_node_mib for member in group.members if member.membership is not None
    )
    return job.mem_per_node_mib == 0 or present + job.mem_per_node_mib <= group.pilot.mem_per_node_mib


def join_to(
    job: ManagedJob, group: RunningGroup, speed: float, cycle: CycleInput, room: SiteRoom, reasons: tuple[str, ...]
) -> Join:
    """Return the join of a job to a group.

    Args:
        job: The job; its model has a profile.
        group: The group.
        speed: The job's speed there, 1 = as fast as alone.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
        reasons: Why, for people.
    """
    pilot, size = group.pilot, len(group.members) + 1
    profile = cycle.knowledge.known_profile(cycle.key_of(job))
    limit_s = room.member_limit_s(job, size, int(max(0.0, cycle.now_s - pilot.start_s)))
    member = member_plan(job, profile, speed, cycle.knowledge, limit_s)
    others = tuple((other.job_id, _limit_beside(other, pilot, size, room)) for other in group.members)
    why = (*reasons, *filter(None, (why_estimated(profile),)))
    return Join(pilot.job_id, pilot.nodes, member, others, _pilot_limit_s(pilot, member, others, cycle.now_s), why)


def _why(group: RunningGroup, gain: float) -> str:
    partners = ", ".join(str(other.job_id) for other in group.members)
    return f"it joins jobs {partners}, which have resources to spare: together they do {gain:.2f} jobs' work more"


def _limit_beside(member: ManagedJob, pilot: Job, size: int, room: SiteRoom) -> int:
    """A member's time limit in a group of that size, never less than it has."""
    original_s = member.membership.original.time_limit_s if member.membership is not None else 0
    if not original_s:
        return 0
    late_s = int(max(0.0, member.start_s - pilot.start_s))
    as_asked = replace(as_submitted(member, pilot), time_limit_s=original_s)
    return max(member.time_limit_s, room.member_limit_s(as_asked, size, late_s))


def _pilot_limit_s(pilot: Job, member: MemberPlan, others: tuple[tuple[int, int], ...], now_s: float) -> int:
    """The time limit with which the pilot outlives all of its members; 0 leaves it as it is."""
    ran_s = int(max(0.0, now_s - pilot.start_s))
    needed_s = max([ran_s + member.time_limit_s, *(limit_s for _, limit_s in others)]) + PILOT_EXTRA_S
    return needed_s if pilot.time_limit_s and needed_s > pilot.time_limit_s else 0
