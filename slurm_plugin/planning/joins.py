"""Waiting jobs that join a running group instead of waiting for GPUs of their own. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from muri.policies.speed.model import Floats, Shape, SpeedModel, shape_of
from muri.policies.speed.registry import speed_model
from muri.policies.types import Plan
from muri.profiler.estimates import why_estimated
from muri.profiler.records import StageProfile
from muri.slurm_plugin.planning.actions import Abandon, Action, Join, MemberPlan, join_in
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.isolation import joins_later
from muri.slurm_plugin.planning.placement import Places, domain_of
from muri.slurm_plugin.planning.request import alone_reason
from muri.slurm_plugin.planning.running import RunningGroup, as_submitted, running_groups
from muri.slurm_plugin.planning.site_limits import PILOT_EXTRA_S, SiteRoom
from muri.slurm_plugin.planning.starts import member_plan, was_changed
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_LEAST_GAIN = 0.2
"""What a join must add to the group's total speed, in jobs running alone at full speed: below that the
new member would mostly take from the others."""

_ONE_GPU = "only jobs on one GPU are joined"


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
        elif was_changed(job, join_in(intent.payload, intent.token).member):
            yield Abandon(intent.token, f"the request of job {job_id} was changed meanwhile")
        elif pilot is None or pilot.state is not JobState.RUNNING:
            yield Abandon(intent.token, f"the group that job {job_id} was to join has ended")
        else:
            yield join_in(intent.payload, intent.token)


@dataclass(frozen=True, slots=True)
class _OpenGroup:
    """A running group that a job could join.

    Attributes:
        group: The group.
        others: Its members with the time limits that they need beside one more.
        shapes: Of its members' profiles.
        speed: Its members' total speed now, in jobs running alone at full speed.
        gpu_mem_gib: Memory of its GPU, 0 when unknown.
    """

    group: RunningGroup
    others: tuple[tuple[int, int], ...]
    shapes: tuple[Shape, ...]
    speed: float
    gpu_mem_gib: float


_Kind = tuple[int, str, str]
"""What a job and a group must have in common for a join: user, partition and domain."""


def find_joins(plan: Plan, cycle: CycleInput, room: SiteRoom) -> tuple[Join, ...]:
    """Return the joins of a cycle: waiting jobs in the plan's order, each to the group that gains most.

    A group takes one new member in a cycle, so that the next decision rests on what is true then. A job whose joins
    would all end too late has the best of them here, which the limits will refuse: that tells its user why.
    """
    grouping = cycle.config.grouping
    if not grouping.join or grouping.discipline == "lockstep" or grouping.max_group_size < 2:
        return ()
    gains = _Gains(speed_model("fair" if grouping.speed_model == "default" else grouping.speed_model))
    groups = _open_groups(cycle, gains.model, room)
    joins: list[Join] = []
    for waiting in plan.waiting if groups else ():
        job = cycle.view.jobs[waiting.job_id]
        possible = groups.get((job.uid, job.partition, domain_of(job)))
        if not possible or job.role is not Role.CANDIDATE or alone_reason(job, cycle):
            continue
        wanted = _joins_of(job, possible.values(), gains, cycle, room)
        best = next(wanted, None)
        if best is None:
            continue
        join = next((each for each in chain((best,), wanted) if not room.why_too_late(each)), None)
        if join is not None:
            del possible[join.pilot]  # other jobs may still have the group that refuses this one
        joins.append(join or best)
    return tuple(joins)


def _open_groups(cycle: CycleInput, model: SpeedModel, room: SiteRoom) -> dict[_Kind, dict[int, _OpenGroup]]:
    """The groups that a job could join, by what it must have in common with them and by their pilots' ids."""
    nodes = {node.name: node for node in cycle.nodes}
    found: dict[_Kind, dict[int, _OpenGroup]] = {}
    for group in running_groups(cycle.view):
        pilot, node = group.pilot, nodes.get(group.pilot.nodes)
        members = [as_submitted(member, pilot) for member in group.members]
        domains = {domain_of(member) for member in members}
        if node is None or len(domains) != 1 or _why_closed(group, node, cycle):
            continue
        profiles = [cycle.knowledge.profile_of(cycle.key_of(member)) for member in members]
        shapes = tuple(shape_of(profile) for profile in profiles if profile is not None)
        if len(shapes) < len(members):
            continue
        speed = float(_speeds(shapes, model).sum())
        gpu_mem_gib = cycle.config.gpu_mem_gib.get(node.gpu_type, 0.0)
        alike = found.setdefault((pilot.uid, pilot.partition, domains.pop()), {})
        alike[pilot.job_id] = _OpenGroup(group, limits_beside(group, room), shapes, speed, gpu_mem_gib)
    return found


def _speeds(shapes: Sequence[Shape], model: SpeedModel) -> Floats:
    together: Floats = model.evaluate(shapes, np.arange(len(shapes)).reshape(1, -1)).speed[0]
    return together


@dataclass(slots=True)
class _Gains:
    """What joins add to groups' total speed; equal jobs are computed once."""

    model: SpeedModel
    _known: dict[tuple[Shape, tuple[Shape, ...]], tuple[float, float]] = field(default_factory=dict)

    def of(self, own: Shape, target: _OpenGroup) -> tuple[float, float]:
        """Return what a join adds to a group's total speed, and the new member's own speed."""
        name = own, target.shapes
        if name not in self._known:
            after = _speeds((*target.shapes, own), self.model)
            self._known[name] = float(after.sum()) - target.speed, float(after[-1])
        return self._known[name]


def _joins_of(
    job: ManagedJob, groups: Iterable[_OpenGroup], gains: _Gains, cycle: CycleInput, room: SiteRoom
) -> Iterator[Join]:
    """A job's joins that would pay, to groups of its own kind, the best first."""
    profile = cycle.knowledge.profile_for(job, cycle.key_of(job))
    if profile is None:
        return
    own, nodes = shape_of(profile), room.places.of(job).nodes
    found: list[tuple[float, int, float, _OpenGroup]] = []
    for target in groups:
        mem_gib = sum(shape.gpu_mem_gib for shape in (*target.shapes, own))
        if _why_no_place(job, target.group, nodes) or 0 < target.gpu_mem_gib < mem_gib:
            continue
        gain, speed = gains.of(own, target)
        if gain >= _LEAST_GAIN:
            found.append((-gain, target.group.pilot.job_id, speed, target))
    for loss, _, speed, target in sorted(found, key=lambda item: item[:2]):
        joiner, why = Joiner(job, profile, speed), _why(target.group, -loss)
        yield join_to(joiner, target.group, target.others, cycle, room, (why,))


def why_no_room(job: ManagedJob, group: RunningGroup, cycle: CycleInput, places: Places) -> str:
    """Return why a job cannot join a group now, "" when it can.

    Args:
        job: The job.
        group: The group.
        cycle: What the cycle decides on.
        places: Where jobs may run.
    """
    pilot = group.pilot
    if (job.uid, job.partition) != (pilot.uid, pilot.partition):
        return "the group is of another user or partition"
    domain = domain_of(job)
    if any(domain_of(as_submitted(member, pilot)) != domain for member in group.members):
        return f"the group is not of {domain}"
    node = next((node for node in cycle.nodes if node.name == pilot.nodes), None)
    return _why_closed(group, node, cycle) or _why_no_place(job, group, places.of(job).nodes)


def _why_closed(group: RunningGroup, node: Node | None, cycle: CycleInput) -> str:
    """Why nobody can join a group now."""
    members, most = group.members, cycle.config.grouping.max_group_size
    # A group that is starting or ending is left alone, and a group on several GPUs has a runtime on each of them.
    checks = (
        (any(job.state is not JobState.RUNNING for job in members), "a member of the group is not at work"),
        (group.pilot.gpu_count != 1, _ONE_GPU),
        (group.mode == "plain", "the group's members share without turns, and only they were measured to get on so"),
        (len(members) >= most, "the group is full (grouping.max_group_size)"),
        (any(job.has_changed_limit for job in members), "somebody has changed a member's time limit"),
        (node is None or not node.usable, "the group's node takes no new work"),
        (node is not None and node.cpu_count <= node.cpus_allocated, "the group's node has no CPU left for its script"),
    )
    return next((why for applies, why in checks if applies), "")


def _why_no_place(job: Job, group: RunningGroup, nodes: AbstractSet[str]) -> str:
    """Why a job cannot be where a group is; `nodes` are those that it may get."""
    if job.gpu_count != 1:
        return _ONE_GPU
    if group.pilot.nodes not in nodes:
        return "the group's node is none that it may get"
    return "" if _memory_fits(job, group) else "the group's job has not asked for enough host memory for both"


def _memory_fits(job: Job, group: RunningGroup) -> bool:
    present = sum(
        member.membership.original.mem_per_node_mib for member in group.members if member.membership is not None
    )
    return job.mem_per_node_mib == 0 or present + job.mem_per_node_mib <= group.pilot.mem_per_node_mib


@dataclass(frozen=True, slots=True)
class Joiner:
    """A job that joins a group.

    Attributes:
        job: The job.
        profile: Its model's.
        speed: Its speed there, 1 = as fast as alone.
    """

    job: ManagedJob
    profile: StageProfile
    speed: float


def join_to(
    joiner: Joiner,
    group: RunningGroup,
    others: tuple[tuple[int, int], ...],
    cycle: CycleInput,
    room: SiteRoom,
    reasons: tuple[str, ...],
) -> Join:
    """Return the join of a job to a group.

    Args:
        joiner: The job.
        group: The group.
        others: Its members with the time limits that they need then, by `limits_beside`.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
        reasons: Why, for people.
    """
    pilot, size = group.pilot, len(group.members) + 1
    job, profile = joiner.job, joiner.profile
    limit_s = room.member_limit_s(job, size, int(max(0.0, cycle.now_s - pilot.start_s)))
    kind = joins_later(cycle)
    member = member_plan(job, profile, joiner.speed, cycle.knowledge, time_limit_s=limit_s, isolation=kind)
    why = (*reasons, *filter(None, (why_estimated(profile),)))
    return Join(pilot.job_id, pilot.nodes, member, others, _pilot_limit_s(pilot, member, others, cycle.now_s), why)


def limits_beside(group: RunningGroup, room: SiteRoom) -> tuple[tuple[int, int], ...]:
    """Return a group's members with the time limits that they need beside one more, 0 = unlimited."""
    size = len(group.members) + 1
    return tuple((other.job_id, _limit_beside(other, group.pilot, size, room)) for other in group.members)


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
