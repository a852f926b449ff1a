"""Waiting jobs that join a group at work instead of waiting for GPUs of their own. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import numpy as np

from muri.policies.speed.model import SpeedModel, shape_of
from muri.policies.speed.registry import speed_model
from muri.policies.types import Plan
from muri.profiler.estimates import why_estimated
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Abandon, Action, Join, MemberPlan
from muri.slurm_plugin.planning.cycle_input import Knowledge
from muri.slurm_plugin.planning.request import alone_reason
from muri.slurm_plugin.planning.running import RunningGroup, as_submitted, running_groups
from muri.slurm_plugin.planning.starts import asked_by
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.roles import Role, View, profile_key

_LEAST_GAIN = 0.2
"""What a join must add to the group's total speed, in jobs running alone at full speed: below that the
new member would mostly take from the others."""

_HOST_EXTRA_S = 600


def begun_joins(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the newest join of each job, closed ones included, by job id."""
    return {int(intent.payload["member"]["job_id"]): intent for intent in intents if intent.kind == JOIN}


def groups_by_host(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the group starts by host job, their members and those that joined later together."""
    groups = {intent.host_job: intent for intent in intents if intent.kind == GROUP and intent.host_job}
    for intent in begun_joins(intents).values():
        group = groups.get(int(intent.payload["host"]))
        if group is not None and group.host_job is not None and intent.state == "done":
            members = [*group.payload["members"], intent.payload["member"]]
            groups[group.host_job] = replace(group, payload={**group.payload, "members": members})
    return groups


def resume_joins(view: View, intents: tuple[Intent, ...]) -> Iterator[Action]:
    """Carry on with joins that a killed controller left half done."""
    for job_id, intent in begun_joins(intents).items():
        if intent.state != "begun":
            continue
        job, host = view.active(job_id), view.active(int(intent.payload["host"]))
        if job is None or job.state is not JobState.PENDING or not job.held:
            yield Abandon(intent.token, f"job {job_id} is not waiting to join any more")
        elif host is None or host.state is not JobState.RUNNING:
            yield Abandon(intent.token, f"the group that job {job_id} was to join has ended")
        else:
            yield join_of(intent)


def join_of(intent: Intent) -> Join:
    """Return the join that an intent describes."""
    fields = intent.payload["member"]
    member = MemberPlan(**{**fields, "original": tags.Original(**fields["original"])})
    others = tuple((int(job_id), int(limit_s)) for job_id, limit_s in intent.payload["others"])
    payload = intent.payload
    return Join(
        payload["host"], payload["node"], member, others, payload["host_limit_s"], tuple(payload["reasons"]),
        intent.token,
    )  # fmt: skip


def payload_of(join: Join) -> dict[str, object]:
    """Return what the journal keeps of a join."""
    return {name: value for name, value in asdict(join).items() if name != "token"}


def find_joins(view: View, plan: Plan, know: Knowledge, config: Config, now_s: float) -> tuple[Join, ...]:
    """Return the joins of a cycle: waiting jobs in the plan's order, each to the group that gains most.

    A group takes one new member in a cycle, so that the next decision rests on what is true then.
    """
    if not config.grouping.join or config.grouping.discipline == "lockstep" or config.grouping.max_group_size < 2:
        return ()
    groups = {group.host.job_id: group for group in running_groups(view)}
    model = speed_model("fair" if config.grouping.speed_model == "default" else config.grouping.speed_model)
    joins: list[Join] = []
    for waiting in plan.waiting:
        job = view.jobs[waiting.job_id]
        if view.roles[job.job_id] is not Role.CANDIDATE or alone_reason(job, view.snapshot.slurm_version, know, config):
            continue
        gains = {host: _gain(job, group, view, know, config, model) for host, group in groups.items()}
        best = max(gains, key=lambda host: (gains[host][0], -host), default=None)
        if best is None or gains[best][0] < _LEAST_GAIN:
            continue
        group, (gain, speed) = groups.pop(best), gains[best]
        joins.append(join_to(job, group, speed, view, know, now_s, (_why(group, gain),)))
    return tuple(joins)


def _gain(
    job: Job, group: RunningGroup, view: View, know: Knowledge, config: Config, model: SpeedModel
) -> tuple[float, float]:
    """What a join adds to a group's total speed, and the new member's own speed; (0, 0) when it cannot join."""
    profiles = [_profile(member, group.host, view, know.profiles) for member in group.members]
    own = know.profile_for(job, profile_key(job, view.snapshot.nodes))
    if own is None or None in profiles or why_no_room(job, group, view, config):
        return 0.0, 0.0
    shapes = [shape_of(profile) for profile in (*profiles, own) if profile is not None]
    gpu_mem_gib = _gpu_mem_gib(group, view, config)
    if gpu_mem_gib and sum(shape.gpu_mem_gib for shape in shapes) > gpu_mem_gib:
        return 0.0, 0.0
    count = len(shapes)
    before = float(model.evaluate(shapes[:-1], np.arange(count - 1).reshape(1, -1)).speed.sum())
    after = model.evaluate(shapes, np.arange(count).reshape(1, -1)).speed[0]
    return float(after.sum()) - before, float(after[-1])


def _profile(member: Job, host: Job, view: View, profiles: Mapping[ProfileKey, StageProfile]) -> StageProfile | None:
    return profiles.get(profile_key(as_submitted(member, host), view.snapshot.nodes))


def why_no_room(job: Job, group: RunningGroup, view: View, config: Config) -> str:
    """Return why a job cannot join a group now, "" when it can.

    Args:
        job: The job.
        group: The group.
        view: The snapshot by roles.
        config: Limits.
    """
    host, node = group.host, next((node for node in view.snapshot.nodes if node.name == group.host.nodes), None)
    # A group on its way in or out is left alone, and one of several nodes or GPUs has one runtime for each.
    checks = (
        (any(member.state is not JobState.RUNNING for member in group.members), "a member of the group is not at work"),
        ((job.uid, job.partition) != (host.uid, host.partition), "the group is of another user or partition"),
        (job.gpu_count != host.gpu_count or host.gpu_count != 1, "only jobs on one GPU are joined"),
        (group.mode == "plain", "the group's members share without turns, and only they were measured to get on so"),
        (len(group.members) >= config.grouping.max_group_size, "the group is full (grouping.max_group_size)"),
        (node is None or not node.usable, "the group's node takes no new work"),
        (node is not None and node.cpu_count <= node.cpus_allocated, "the group's node has no CPU left for its script"),
        (not _memory_fits(job, group), "the group's job has not asked for enough host memory for both"),
    )
    return next((why for applies, why in checks if applies), "")


def _gpu_mem_gib(group: RunningGroup, view: View, config: Config) -> float:
    """Memory of the group's GPU, 0 when unknown."""
    types = (node.gpu_type for node in view.snapshot.nodes if node.name == group.host.nodes)
    return next((config.gpu_mem_gib.get(kind, 0.0) for kind in types), 0.0)


def _memory_fits(job: Job, group: RunningGroup) -> bool:
    states = [tags.parse_state(member.admin_comment) for member in group.members]
    present = sum(state.original.mem_per_node_mib for state in states if state is not None)
    return job.mem_per_node_mib == 0 or present + job.mem_per_node_mib <= group.host.mem_per_node_mib


def join_to(
    job: Job, group: RunningGroup, speed: float, view: View, know: Knowledge, now_s: float, reasons: tuple[str, ...]
) -> Join:
    """Return the join of a job to a group.

    Args:
        job: The job; its model has a profile.
        group: The group.
        speed: The job's speed there, 1 = as fast as alone.
        view: The snapshot by roles.
        know: Profiles.
        now_s: The cycle's time.
        reasons: Why, for people.
    """
    host, size = group.host, len(group.members) + 1
    profile = know.profiles[profile_key(job, view.snapshot.nodes)]
    member = MemberPlan(
        job_id=job.job_id,
        original=asked_by(job),
        solo_iteration_s=profile.iteration_s,
        speed=speed,
        time_limit_s=job.time_limit_s * size,
        gpu_mem_gib=know.needed_gib(job.job_id, profile),
        estimated=profile.is_estimate,
    )
    others = tuple((other.job_id, _limit_beside(other, size)) for other in group.members)
    why = (*reasons, *filter(None, (why_estimated(profile),)))
    return Join(host.job_id, host.nodes, member, others, _host_limit_s(host, member, others, now_s), why)


def _why(group: RunningGroup, gain: float) -> str:
    partners = ", ".join(str(other.job_id) for other in group.members)
    return f"it joins jobs {partners}, which have resources to spare: together they do {gain:.2f} jobs' work more"


def _limit_beside(member: Job, size: int) -> int:
    """A member's time limit in a group of that size, never less than it has."""
    state = tags.parse_state(member.admin_comment)
    original_s = state.original.time_limit_s if state is not None else 0
    return max(member.time_limit_s, original_s * size) if original_s else 0


def _host_limit_s(host: Job, member: MemberPlan, others: tuple[tuple[int, int], ...], now_s: float) -> int:
    """The time limit with which the host outlives all of its members; 0 leaves it as it is."""
    ran_s = int(max(0.0, now_s - host.start_s))
    needed_s = max([ran_s + member.time_limit_s, *(limit_s for _, limit_s in others)]) + _HOST_EXTRA_S
    return needed_s if host.time_limit_s and needed_s > host.time_limit_s else 0
