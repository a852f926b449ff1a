"""From a plan to actions: groups that start, jobs that join, and jobs alone, which others may join. Pure.

Whoever planned, what starts keeps to the site's limits, and jobs that Muri cannot plan go to Slurm, some at a time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from muri.policies.cycle.validation import broken_laws
from muri.policies.types import Group, Plan, PlanJob, Policy, Reason, Solo, sentences
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import (
    Action,
    Join,
    MemberPlan,
    ReleaseSolo,
    ResumeGroup,
    StandBack,
    StartGroup,
    members_in,
    started,
)
from muri.slurm_plugin.planning.asking import Settled
from muri.slurm_plugin.planning.gathered import Gathered
from muri.slurm_plugin.planning.placement import NodeRoom, node_room, starts_by_itself
from muri.slurm_plugin.planning.request import Preparation, is_let_go
from muri.slurm_plugin.planning.running import has_a_task_per_gpu, may_join
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.slurm_requests import member_mem_mib
from muri.slurm_plugin.planning.starts import Joiner, joins_together, release_solo, start_group
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.comment_tags import Place
from muri.slurm_plugin.records.journal import Intent
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_ROUNDING: Final = 1e-6


def starts_of(settled: Settled, policy: Policy, preparation: Preparation) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Turn what can be done of a plan into actions, as far as the site's limits leave room for them.

    Returns:
        The starts, joins and releases, and why other jobs of the plan wait, by job id.
    """
    request, cycle, room = preparation.request, preparation.cycle, preparation.room
    with_pilots = jobs_with_pilots(request.jobs, policy, cycle.view, cycle.config)
    nodes = node_room(request.nodes, cycle.config, cycle.view.snapshot.nodes)
    starts, crowded = actions_of(settled, cycle, room, nodes, with_pilots)
    # A site's own policy may not know whom Slurm counts apart.
    unlawful = {job_id: law.why for law in broken_laws(request, settled.plan) for job_id in law.job_ids}
    starts, refused = within_limits(starts, room, cycle.view, {**crowded, **unlawful})
    if may_join(cycle.config):
        starts = tuple(_with_room(action, settled.plan, room, nodes) for action in starts)
    return starts, refused


def actions_of(
    settled: Settled, cycle: Gathered, room: SiteRoom, nodes: NodeRoom, with_pilots: Mapping[int, PlanJob]
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Turn a plan into actions, groups first, in the plan's order.

    Returns:
        The actions; and of groups for which their nodes have too little left, why, by job id.
    """
    plan = settled.plan
    actions: list[Action] = []
    crowded: dict[int, str] = {}
    for group in plan.groups:
        if group.joining:
            actions += joins_of(group, plan, cycle, room)
            continue
        start = start_group(group, plan, cycle, room)
        counts_mem = cycle.view.snapshot.limits.partition(start.partition).counts_mem
        why = nodes.take_group(start, counts_mem=counts_mem)
        if why and len(start.members) > 1:
            crowded |= dict.fromkeys(started((start,)), why)
        if len(start.members) > 1:
            actions.append(start)
        else:
            node = cycle.view.node_index.by_name[start.node]
            actions.append(started_plain(start, why) if why else _for_two(start, node))
    # A job's room for others takes nothing that another job of this plan asks for.
    for solo in plan.solo:
        nodes.take_alone(cycle.view.jobs[solo.job_id], solo.gpus)
    for solo in plan.solo:
        planned = with_pilots.get(solo.job_id)
        with_pilot = None if planned is None else start_joinable(solo, planned, plan, cycle, room, nodes)
        actions.append(with_pilot or release_solo(solo, plan, cycle))
    for group in settled.joins:
        actions += joins_of(group, plan, cycle, room)
    return tuple(_split(action, settled.split) for action in actions), crowded


def _split(action: Action, split: Mapping[int, tuple[int, float]]) -> Action:
    """Return a start or a join whose members compute their batches in micro-batches, which take less memory."""

    def of(member: MemberPlan) -> MemberPlan:
        if member.job_id not in split:
            return member
        steps, gpu_mem_gib = split[member.job_id]
        return replace(member, accumulate_steps=steps, gpu_mem_gib=gpu_mem_gib)

    match action:
        case StartGroup():
            return replace(action, members=tuple(map(of, action.members))) if split else action
        case Join():
            return replace(action, member=of(action.member))
    return action


def idle_gpus_first(starts: Sequence[Action]) -> tuple[Action, ...]:
    """Return what starts on idle GPUs, and then what joins groups, whose GPUs are at work; each in the plan's order."""
    return tuple(sorted(starts, key=lambda action: isinstance(action, Join)))


LATER = "more than enough jobs of its partition wait for Slurm already (slurm_backlog); it is let go as they start"


def to_let_go(jobs: Sequence[ManagedJob], view: View, config: Config) -> tuple[ManagedJob, ...]:
    """Return the jobs that Slurm gets now: of each partition those of the highest priority, of these the oldest.

    A partition gets one for each idle CPU and `slurm_backlog` more, less those that compete there already. So a job is
    held back only behind more jobs of a higher priority than Slurm's schedulers look at. Jobs that have been let go and
    wait for something else than resources, such as a limit, do not count.
    """
    by_priority = sorted(jobs, key=lambda job: (-job.own_priority, job.submit_s, job.job_id))
    competing = Counter(job.partition for job in view.having(Role.RELEASED) if starts_by_itself(job))
    room: dict[str, int] = {}
    chosen: list[ManagedJob] = []
    for job in by_priority:
        if job.partition not in room:  # one partition, or several
            names = set(job.partition.split(","))
            usable = (node for node in view.snapshot.nodes if node.usable and not names.isdisjoint(node.partitions))
            idle = sum(max(0, node.cpu_count - node.cpus_allocated) for node in usable)
            room[job.partition] = idle + config.slurm_backlog - competing[job.partition]
        if room[job.partition] > 0:
            room[job.partition] -= 1
            chosen.append(job)
    return tuple(chosen)


def _for_two(start: StartGroup, node: Node) -> StartGroup:
    """Return the start of one job with CPUs and memory for two such, as far as its GPUs' part of the node goes.

    What a pilot holds can't grow later, and one who joins runs in it; its batch script has a CPU for each GPU and a
    little memory of its own.
    """
    gpus = start.gpus_per_node
    scripts = start.members[0].cpu_count + gpus
    part = (node.cpu_count * gpus // node.gpu_count - scripts) // gpus
    cpus = max(start.cpu_count, min(2 * start.cpu_count, part))
    cpus = max(1, min(cpus, (node.cpu_count - node.cpus_allocated - scripts) // gpus))
    if not start.mem_per_node_mib:
        return replace(start, cpu_count=cpus)
    scripts_mib = 2 * (member_mem_mib(start.members[0].original) or 0)
    part_mib = min(node.mem_mib * gpus // node.gpu_count, node.mem_mib - node.mem_allocated_mib) - scripts_mib
    mem_mib = max(start.mem_per_node_mib, min(2 * start.mem_per_node_mib, part_mib))
    return replace(start, cpu_count=cpus, mem_per_node_mib=mem_mib)


def within_limits(
    starts: Sequence[Action], room: SiteRoom, view: View, unlawful: Mapping[int, str]
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Take what the site's limits leave room for.

    Returns:
        The starts for which there is room, and why the other jobs wait, by job id. Of a group without room the oldest
        job starts alone. A job that is to have a pilot job only so that others may join it starts without where the
        limits would rather have it so: all that starts comes first.
    """
    kept: list[Action] = []
    refused: dict[int, str] = {}
    for action in starts:
        taken, why = _taken(action, room, view, unlawful)
        kept += taken
        refused |= dict.fromkeys(started((action,)) - started(taken), why)
    for index, action in enumerate(kept):
        if isinstance(action, StartGroup) and len(action.members) == 1:
            group, why = room.take_pilot(action)
            kept[index] = started_plain(action, why) if why else group
    return tuple(kept), refused


def _with_room(action: Action, plan: Plan, room: SiteRoom, nodes: NodeRoom) -> Action:
    """Give a group that takes turns, and whose memory the plan leaves to Muri, memory for those that join it later."""
    match action:
        case StartGroup(members=(_, _, *_) as members, mode="interleave") if not any(
            plan.cpu_mem_shares.get(member.job_id) for member in members
        ):
            wider = nodes.widen(action)
            return room.widen(action, wider) if wider != action else action
    return action


def _taken(action: Action, room: SiteRoom, view: View, unlawful: Mapping[int, str]) -> tuple[tuple[Action, ...], str]:
    """What can be done of a start, and why not all of it; a pilot of one job is not counted yet."""
    why = ""
    match action:
        case StartGroup(members=(member,)):
            why = room.take_alone(view.jobs[member.job_id])
        case StartGroup(members=members):
            group = room.capped(action)
            why = unlawful.get(members[0].job_id, "") or why_too_slow(members) or room.take_group(group)
            return (_oldest_alone(group, room, view, why), why) if why else ((group,), "")
        case ReleaseSolo(job_id=job_id):
            why = room.take_alone(view.jobs[job_id])
        case Join():
            why = unlawful.get(action.member.job_id, "") or why_too_slow((action.member,)) or room.take_join(action)
    return () if why else (action,), why


def why_too_slow(members: Sequence[MemberPlan]) -> str:
    """Say whom a plan puts beside others at less than the speed that it is promised, "" for nobody.

    The planner promises the same; a site's own policy may not know of promises.
    """
    slow = next((member for member in members if member.speed < member.min_speed - _ROUNDING), None)
    if slow is None:
        return ""
    return (
        f"job {slow.job_id} would get {slow.speed:.2f} of its speed alone there, and is promised {slow.min_speed:.2f}"
    )


def _oldest_alone(group: StartGroup, room: SiteRoom, view: View, why: str) -> tuple[ReleaseSolo, ...]:
    """Start the oldest job of a group that cannot start.

    Planned again in the next cycle, the same group would be refused again, and its GPUs would stay idle for ever.
    """
    oldest = view.oldest(member.job_id for member in group.members)
    return () if room.take_alone(oldest) else (ReleaseSolo(oldest.job_id, (f"it starts alone: {why}",)),)


def releases_of(
    to_slurm: Mapping[int, str], refused: Mapping[int, str], view: View, config: Config
) -> tuple[tuple[ReleaseSolo, ...], dict[int, str]]:
    """Leave to Slurm the jobs that Muri cannot plan.

    Returns:
        The releases, and why the other such jobs wait, by job id: Slurm lately refused to let them go, as it does with
        a job that no nodes could ever hold, or has enough others to choose from.
    """
    why = "Muri does not serve its partition, or cannot read how many GPUs it asks for"
    reasons = {job.job_id: why for job in view.having(Role.NOT_OURS)}
    reasons |= {job_id: f"Slurm decides when it starts: {why}" for job_id, why in to_slurm.items()}
    stuck = {job_id: f"{why}; {refused[job_id]}" for job_id, why in reasons.items() if job_id in refused}
    jobs = to_let_go([view.jobs[job_id] for job_id in reasons if job_id not in stuck], view, config)
    releases = {job.job_id: ReleaseSolo(job.job_id, (reasons[job.job_id],)) for job in jobs}
    later = {job_id: f"{why}; {LATER}" for job_id, why in reasons.items() if job_id not in releases}
    return tuple(releases.values()), {**later, **stuck}


_MOST_NICE: Final = 2_000_000_000
"""Slurm takes nice values up to 2,147,483,645."""


def stand_backs(view: View, intents: tuple[Intent, ...], actions: Sequence[Action]) -> Iterator[StandBack]:
    """Let tasks that are kept back stand behind siblings that may start, and others where Slurm has them.

    A nice value stays until its task is let go: until then Muri alone decides when it starts.
    """
    resumed = {action.token for action in actions if isinstance(action, ResumeGroup)}
    groups = [members_in(intent.payload) for intent in intents if intent.token in resumed]
    starts = started(actions) | {member.job_id for members in groups for member in members}
    arrays: defaultdict[int, list[ManagedJob]] = defaultdict(list)
    for job in view.jobs.values():
        if job.array_job_id and job.state is JobState.PENDING:
            arrays[job.array_job_id].append(job)
    for records in arrays.values():
        ahead = [
            job
            for job in records
            if not job.held and (job.job_id in starts or (job.role in {Role.MEMBER, Role.RELEASED} and is_let_go(job)))
        ]
        # What goes away goes first: two tasks that wait for each other's start Slurm would refuse.
        yield from (StandBack(job.job_id, None) for job in records if _stands_back_for_nobody(job, ahead, starts))
        for job in records:
            may_wait = job.role is Role.CANDIDATE and job.given is None and job.job_id not in starts
            # Slurm's schedulers do not look at others.
            is_looked_at = not (job.held or job.dependency or job.begin_s > view.snapshot.taken_s)
            if may_wait and is_looked_at and (place := _place_behind(job, ahead)) is not None:
                yield StandBack(job.job_id, place)


def _stands_back_for_nobody(job: ManagedJob, ahead: Sequence[ManagedJob], starts: AbstractSet[int]) -> bool:
    if job.place is None or job.held:
        return False
    if job.role is not Role.CANDIDATE:
        return True
    waits_for = set() if job.dependency == job.own_dependency else set(job.dependency.split(","))
    return bool(waits_for) and (job.job_id in starts or waits_for.isdisjoint(map(_start_of, ahead)))


def _place_behind(job: ManagedJob, ahead: Sequence[ManagedJob]) -> Place | None:
    """What makes a task stand behind siblings, None where it does already."""
    passed = [
        each
        for each in ahead
        if each.partition == job.partition and _order(job, job.priority) < _order(each, each.own_priority)
    ]
    if not passed:
        return None
    lowest, own_nice = min(each.own_priority for each in passed), job.own_nice
    nice = job.nice + job.priority - lowest + 1
    was_in_vain = job.place is not None and job.place.nice not in {job.nice, job.place.own_nice}
    if lowest > 1 and nice <= _MOST_NICE and not was_in_vain:
        return Place(own_nice, nice)
    return Place(own_nice, own_nice, ",".join(sorted(map(_start_of, passed))))


def _start_of(job: Job) -> str:
    """The dependency on a task's start."""
    return f"after:{job.name_in_slurm}"


def _order(job: Job, priority: int) -> tuple[float, float, float]:
    """Slurm's order among an array's records; the record of several tasks comes last."""
    return -priority, job.submit_s, float("inf") if job.several_tasks else int(job.array_tasks or 0)


def joins_of(group: Group, plan: Plan, cycle: Gathered, room: SiteRoom) -> tuple[Join, ...]:
    """Return the joins that a plan's group with joining members means, one for each of them."""
    unit = cycle.view.group_of[next(job_id for job_id in group.members if job_id not in group.joining)]
    known = (cycle.known[job_id] for job_id in group.joining)
    joiners = [
        Joiner(each, group.speed[each.job.job_id], plan.promises.get(each.job.job_id, each.min_speed)) for each in known
    ]
    return joins_together(joiners, unit, cycle, room, sentences(group.reasons))


MAY_BE_JOINED: Final = "others may join it while it runs"

IS_MEASURED: Final = "its model is measured while it runs"


def jobs_with_pilots(jobs: Iterable[PlanJob], policy: Policy, view: View, config: Config) -> dict[int, PlanJob]:
    """Return the waiting jobs that get a pilot job of their own where they start alone, by job id."""
    # Policies that give out GPUs one by one say themselves who may be joined.
    if policy.supports_packing or not shares_gpus(policy):
        return {}
    known = [job for job in jobs if job.may_share and job.profile is not None]
    fit = [job for job in known if job.gpu_count == 1 or has_a_task_per_gpu(job, view.jobs[job.job_id])]
    return {job.job_id: job for job in fit if may_join(config) or _is_to_be_measured(job, config)}


def _is_to_be_measured(job: PlanJob, config: Config) -> bool:
    """Whether a job that nobody may join is measured, so that later jobs of its model can be grouped."""
    estimated = job.profile is not None and job.profile.is_estimate
    return estimated and config.profiling.in_place and config.grouping.max_group_size > 1


def shares_gpus(policy: Policy) -> bool:
    """Whether jobs ever share GPUs under a policy; one of a site's own may not tell its options."""
    rules = getattr(policy, "rules", None)
    return policy.profile_use == "sharing" if rules is None else rules.max_group_size > 1


def start_joinable(
    solo: Solo, job: PlanJob, plan: Plan, cycle: Gathered, room: SiteRoom, nodes: NodeRoom
) -> StartGroup | ReleaseSolo | None:
    """Return the start of a job alone that others may join, or that is measured.

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
