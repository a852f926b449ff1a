"""Waiting jobs that join what runs: what a plan's joins mean on Slurm, and which jobs may be joined. Pure.

A job alone that may be joined starts behind a pilot job of its own, with room for others. Where nobody may join, such a
pilot job still measures models of which nothing is known: without it no group would ever be worth while.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from muri.policies.types import Group, Plan, PlanJob, PlanRequest, Policy, Reason, Solo, sentences
from muri.profiler.estimates import why_estimated
from muri.profiler.records import StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Abandon, Action, Join, MemberPlan, ReleaseSolo, StartGroup, join_in
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.node_room import NodeRoom
from muri.slurm_plugin.planning.placement import Places, domain_of
from muri.slurm_plugin.planning.running import (
    Kind,
    as_submitted,
    homes,
    kind_of,
    may_join,
    spare_mem_mib,
    why_closed,
)
from muri.slurm_plugin.planning.site_limits import PILOT_EXTRA_S, SiteRoom, payer_of
from muri.slurm_plugin.planning.starts import joins_later, member_plan, release_solo, start_group, was_changed
from muri.slurm_plugin.records.cluster import Job, JobState, NodeIndex
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.roles import ManagedJob, RunningGroup, View


def begun_joins(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the newest join of each job, closed ones included, by job id."""
    return {int(intent.payload["member"]["job_id"]): intent for intent in intents if intent.kind == JOIN}


def groups_by_pilot(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the group starts by pilot job, their members and those that joined later together."""
    groups = {intent.submitted_job: intent for intent in intents if intent.kind == GROUP and intent.submitted_job}
    for intent in begun_joins(intents).values():
        group = groups.get(int(intent.payload["pilot"]))
        if group is not None and group.submitted_job is not None and intent.state == "done":
            members = [*group.payload["members"], intent.payload["member"]]
            groups[group.submitted_job] = replace(group, payload={**group.payload, "members": members})
    return groups


def resume_joins(view: View, intents: tuple[Intent, ...]) -> Iterator[Action]:
    """Resume joins that a killed controller left unfinished."""
    for job_id, intent in begun_joins(intents).items():
        if intent.state != "begun":
            continue
        job, pilot = view.active(job_id), view.active(int(intent.payload["pilot"]))
        if job is None or not job.gated:
            yield Abandon(intent.token, f"job {job_id} is not waiting to join any more")
        elif was_changed(job, join_in(intent.payload, intent.token).member):
            yield Abandon(intent.token, f"the request of job {job_id} was changed meanwhile")
        elif pilot is None or pilot.state is not JobState.RUNNING:
            yield Abandon(intent.token, f"the group that job {job_id} was to join has ended")
        else:
            yield join_in(intent.payload, intent.token)


def joins_of(group: Group, plan: Plan, cycle: CycleInput, room: SiteRoom) -> tuple[Join, ...]:
    """Return the joins that a plan's group with joining members means, one for each of them.

    Args:
        group: Those who run together, and those who come.
        plan: The plan.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
    """
    unit = cycle.view.group_of[next(job_id for job_id in group.members if job_id not in group.joining)]
    reasons = sentences(group.reasons)
    joiners = [
        Joiner(
            job,
            cycle.knowledge.known_profile(cycle.key_of(job)),
            group.speed[job.job_id],
            plan.promises.get(job.job_id),
        )
        for job in (cycle.view.jobs[job_id] for job_id in group.joining)
    ]
    return joins_together(joiners, unit, cycle, room, reasons)


def with_closed_units(request: PlanRequest, cycle: CycleInput, room: SiteRoom) -> PlanRequest:
    """Return a request that says who cannot join what runs, because somebody would get too little time."""
    open_kinds = {kind_of(unit.members[0]) for unit in request.running if unit.joinable}
    alike: dict[Kind, dict[tuple[object, ...], list[PlanJob]]] = {kind: {} for kind in open_kinds}
    for job in request.jobs:
        if job.may_share and job.profile is not None and (kind := kind_of(job)) in alike:
            managed = cycle.view.jobs[job.job_id]
            asked = payer_of(managed), managed.time_limit_s, managed.cpu_count, managed.mem_per_node_mib
            alike[kind].setdefault(asked, []).append(job)
    running = []
    for unit in request.running:
        classes = alike[kind_of(unit.members[0])].values() if unit.joinable else ()
        closed_to: dict[int, str] = {}
        for jobs in classes:
            if why := _why_too_late(jobs[0], cycle.view.group_of[unit.members[0].job_id], cycle, room):
                closed_to |= dict.fromkeys((job.job_id for job in jobs), why)
        running.append(replace(unit, closed_to=closed_to))
    return replace(request, running=tuple(running))


def _why_too_late(planned: PlanJob, group: RunningGroup, cycle: CycleInput, room: SiteRoom) -> str:
    """Why a job cannot join a group for want of time."""
    job = cycle.view.jobs[planned.job_id]
    joiner = Joiner(job, cycle.knowledge.known_profile(cycle.key_of(job)), 1.0)
    (join,) = joins_together([joiner], group, cycle, room, ())
    return room.why_too_late(join)


def why_no_room(job: ManagedJob, group: RunningGroup, config: Config, index: NodeIndex, places: Places) -> str:
    """Return why a job cannot join a group now, "" when it can.

    Args:
        job: The job.
        group: The group.
        config: The configuration.
        index: The nodes by name and by partition.
        places: Where jobs may run.
    """
    pilot = group.pilot
    if (job.uid, job.partition) != (pilot.uid, pilot.partition):
        return "the group belongs to another user or partition"
    domain = domain_of(job)
    if any(domain_of(as_submitted(member, pilot)) != domain for member in group.members):
        return f"the group does not belong to {domain}"
    return why_closed(group, index.by_name, config) or _why_no_place(job, group, places.of(job).nodes)


def _why_no_place(job: Job, group: RunningGroup, nodes: AbstractSet[str]) -> str:
    """Why a job cannot be where a group is; `nodes` are those that it may get."""
    if (job.gpu_count, max(1, job.node_count)) != (group.pilot.gpu_count, len(homes(group))):
        return "the group is not on as many GPUs and nodes"
    if not homes(group) <= nodes:
        return "the job may not run on the group's node"
    fits = job.mem_per_node_mib <= spare_mem_mib(group)
    return "" if fits else "the group's job has not asked for enough host memory for both"


@dataclass(frozen=True, slots=True)
class Joiner:
    """A job that joins a group.

    Attributes:
        job: The job.
        profile: Its model's.
        speed: Its speed there, 1 = as fast as alone.
        promised: As `member_plan` takes it.
    """

    job: ManagedJob
    profile: StageProfile
    speed: float
    promised: float | None = None


def joins_together(
    joiners: Sequence[Joiner], group: RunningGroup, cycle: CycleInput, room: SiteRoom, reasons: tuple[str, ...]
) -> tuple[Join, ...]:
    """Return the joins of jobs to a group in one cycle.

    Each of them says what all need together, so that they may be carried out one by one, in any order.

    Args:
        joiners: The jobs.
        group: The group.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
        reasons: Why, for people.
    """
    pilot, size = group.pilot, len(group.members) + len(joiners)
    others = tuple((other.job_id, _limit_beside(other, pilot, size, room)) for other in group.members)
    ran_s = int(max(0.0, cycle.now_s - pilot.start_s))
    members = [
        member_plan(
            joiner.job,
            joiner.profile,
            joiner.speed,
            cycle,
            time_limit_s=room.member_limit_s(joiner.job, size, ran_s),
            isolation=joins_later(cycle.config),
            promised=joiner.promised,
        )
        for joiner in joiners
    ]
    pilot_limit_s = _pilot_limit_s(pilot, members, others, ran_s)
    return tuple(
        Join(
            pilot.job_id,
            pilot.nodes,
            member,
            others,
            pilot_limit_s,
            (*reasons, *filter(None, (why_estimated(joiner.profile),))),
            joining=len(joiners),
        )
        for joiner, member in zip(joiners, members, strict=True)
    )


def _limit_beside(member: ManagedJob, pilot: Job, size: int, room: SiteRoom) -> int:
    """A member's time limit in a group of that size, never less than it has."""
    original_s = member.membership.original.time_limit_s if member.membership is not None else 0
    if not original_s:
        return 0
    late_s = int(max(0.0, member.start_s - pilot.start_s))
    return max(member.time_limit_s, room.member_limit_s(as_submitted(member, pilot), size, late_s))


def _pilot_limit_s(pilot: Job, members: Sequence[MemberPlan], others: tuple[tuple[int, int], ...], ran_s: int) -> int:
    """The time limit with which the pilot outlives all of its members; 0 leaves it as it is."""
    new_s = [ran_s + member.time_limit_s for member in members]
    needed_s = max([*new_s, *(limit_s for _, limit_s in others)]) + PILOT_EXTRA_S
    return needed_s if pilot.time_limit_s and needed_s > pilot.time_limit_s else 0


MAY_BE_JOINED: Final = "others may join it while it runs"
IS_MEASURED: Final = "its model is measured while it runs"


def jobs_with_pilots(jobs: Iterable[PlanJob], policy: Policy, view: View, config: Config) -> dict[int, PlanJob]:
    """Return the waiting jobs that get a pilot job of their own where they start alone, by job id.

    Args:
        jobs: The waiting jobs.
        policy: The policy in force.
        view: The queue.
        config: The configuration.
    """
    # Policies that give out GPUs one by one say themselves who may be joined.
    if policy.supports_packing or not shares_gpus(policy):
        return {}
    known = [job for job in jobs if job.may_share and job.profile is not None]
    fit = [job for job in known if job.gpu_count == 1 or has_a_task_per_gpu(job, view.jobs[job.job_id])]
    return {job.job_id: job for job in fit if may_join(config) or _is_to_be_measured(job, config)}


def has_a_task_per_gpu(planned: PlanJob, job: Job) -> bool:
    """Whether a job on several GPUs of one node surely has a rank for each of them.

    A script that has one process for all its GPUs would be refused by its runtimes, and go back to the queue.
    """
    measured = planned.profile is not None and not planned.profile.is_estimate
    return measured and planned.node_count == 1 and job.task_count == planned.gpu_count


def _is_to_be_measured(job: PlanJob, config: Config) -> bool:
    """Whether a job that nobody may join is measured, so that later jobs of its model can be grouped."""
    estimated = job.profile is not None and job.profile.is_estimate
    return estimated and config.profiling.in_place and config.grouping.max_group_size > 1


def shares_gpus(policy: Policy) -> bool:
    """Whether jobs ever share GPUs under a policy; one of a site's own may not tell its options."""
    rules = getattr(policy, "rules", None)
    return policy.profile_use == "sharing" if rules is None else rules.max_group_size > 1


def start_joinable(
    solo: Solo, job: PlanJob, plan: Plan, cycle: CycleInput, room: SiteRoom, nodes: NodeRoom
) -> StartGroup | ReleaseSolo | None:
    """Return the start of a job alone that others may join, or that is measured.

    Args:
        solo: The plan's word about it.
        job: The job.
        plan: The plan.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
        nodes: CPUs and memory that nodes have free.

    Returns:
        A group of one; its release, where its node has no room for a pilot job; None where the plan leaves it to Slurm
        to find GPUs.
    """
    if not solo.node or job.profile is None:
        return None
    what = MAY_BE_JOINED if may_join(cycle.config) else IS_MEASURED
    share = nodes.take_joinable(cycle.view.jobs[solo.job_id], solo.node)
    if isinstance(share, str):
        release = release_solo(solo, plan, cycle)
        return replace(release, reasons=(*release.reasons, _in_vain(what, share)))
    group = Group(
        (job.job_id,),
        solo.gpus,
        job.gpu_count,
        job.profile.iteration_s,
        1.0,
        {job.job_id: 1.0},
        (*solo.reasons, Reason(what)),
    )
    start = start_group(group, plan, cycle, room)
    if plan.cpu_mem_shares.get(job.job_id):
        return start
    if what == IS_MEASURED:  # no room for others
        return replace(start, cpu_count=min(start.cpu_count, share.cpu_count))
    return replace(start, cpu_count=share.cpu_count // start.gpus_per_node, mem_per_node_mib=share.mem_mib)


def started_plain(start: StartGroup, why: str) -> ReleaseSolo:
    """Return the release of a job that cannot have a pilot job of its own, and why."""
    what = IS_MEASURED if IS_MEASURED in start.reasons else MAY_BE_JOINED
    reasons = tuple(reason for reason in start.reasons if reason != what)
    return ReleaseSolo(start.members[0].job_id, (*reasons, _in_vain(what, why)))


def _in_vain(what: str, why: str) -> str:
    """Say for people that a job runs without a pilot job."""
    return f"{'it cannot be measured' if what == IS_MEASURED else 'no job can join it'}: {why}"
