"""From a plan to actions: groups that start, jobs that join, and jobs alone, which others may join. Pure.

Whoever planned, what starts keeps to the site's limits, and jobs that Muri cannot plan go to Slurm, some at a time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from muri.policies.cycle.validation import broken_laws
from muri.policies.types import Plan, PlanJob, Policy
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Action, Join, MemberPlan, ReleaseSolo, StartGroup, started
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.joins import jobs_with_pilots, joins_of, start_joinable, started_plain
from muri.slurm_plugin.planning.node_room import NodeRoom, node_room
from muri.slurm_plugin.planning.placement import starts_by_itself
from muri.slurm_plugin.planning.request import Preparation
from muri.slurm_plugin.planning.running import Settled, may_join
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.slurm_requests import member_mem_mib
from muri.slurm_plugin.planning.starts import release_solo, start_group
from muri.slurm_plugin.records.cluster import Node
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_ROUNDING: Final = 1e-6


def starts_of(settled: Settled, policy: Policy, preparation: Preparation) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Turn what can be done of a plan into actions, as far as the site's limits leave room for them.

    Args:
        settled: What can be done of the plan.
        policy: The policy whose plan it is.
        preparation: What it was asked.

    Returns:
        The starts, joins and releases, and why other jobs of the plan wait, by job id.
    """
    request, cycle, room = preparation.request, preparation.cycle, preparation.room
    with_pilots = jobs_with_pilots(request.jobs, policy, cycle.view, cycle.config)
    nodes = node_room(request.nodes, cycle.config, cycle.nodes)
    starts, crowded = actions_of(settled, cycle, room, nodes, with_pilots)
    # A site's own policy may not know whom Slurm counts apart.
    unlawful = {job_id: law.why for law in broken_laws(request, settled.plan) for job_id in law.job_ids}
    starts, refused = within_limits(starts, room, cycle.view, {**crowded, **unlawful})
    if may_join(cycle.config):
        starts = tuple(_with_room(action, settled.plan, room, nodes) for action in starts)
    return starts, refused


def actions_of(
    settled: Settled, cycle: CycleInput, room: SiteRoom, nodes: NodeRoom, with_pilots: Mapping[int, PlanJob]
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Turn a plan into actions, groups first, in the plan's order.

    Args:
        settled: What can be done of the plan.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
        nodes: CPUs and memory that nodes have free; what the actions take is taken from them.
        with_pilots: The waiting jobs that get a pilot job of their own where they start alone.

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
        if len(start.members) == 1:
            actions.append(started_plain(start, why) if why else _for_two(start, cycle.node_index.by_name[start.node]))
        else:
            actions.append(start)
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


def to_let_go(jobs: Sequence[ManagedJob], view: View, config: Config, nodes: Sequence[Node]) -> tuple[ManagedJob, ...]:
    """Return the jobs that Slurm gets now: of each partition those of the highest priority, of these the oldest.

    A partition gets one for each idle CPU and `slurm_backlog` more, less those that compete there already. So a job is
    held back only behind more jobs of a higher priority than Slurm's schedulers look at. What has been let go and waits
    for something else than resources, such as a limit, keeps nobody back.

    Args:
        jobs: Those that are left to Slurm.
        view: The queue.
        config: The configuration.
        nodes: The nodes.
    """
    by_priority = sorted(jobs, key=lambda job: (-job.own_priority, job.submit_s, job.job_id))
    partitions = {job.partition for job in jobs}
    competing = Counter(job.partition for job in view.having(Role.RELEASED) if starts_by_itself(job))
    room = {each: _idle_cpus(each, nodes) + config.slurm_backlog - competing[each] for each in partitions}
    taken: Counter[str] = Counter()
    chosen: list[ManagedJob] = []
    for job in by_priority:
        if taken[job.partition] < room[job.partition]:
            taken[job.partition] += 1
            chosen.append(job)
    return tuple(chosen)


def _idle_cpus(partition: str, nodes: Sequence[Node]) -> int:
    """Return an upper bound of how many jobs could start in a partition, or one of several, at once."""
    names = set(partition.split(","))
    usable = (node for node in nodes if node.usable and not names.isdisjoint(node.partitions))
    return sum(max(0, node.cpu_count - node.cpus_allocated) for node in usable)


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

    Args:
        starts: What the plan starts, in its order.
        room: What the site's limits allow; it is used up.
        view: The queue.
        unlawful: Why jobs must not share GPUs as planned, by job id.

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


def releases_of(to_slurm: Mapping[int, str], cycle: CycleInput) -> tuple[tuple[ReleaseSolo, ...], dict[int, str]]:
    """Leave to Slurm the jobs that Muri cannot plan.

    Args:
        to_slurm: Why jobs that Muri could plan are left to Slurm, by job id.
        cycle: What the cycle decides on.

    Returns:
        The releases, and why the other such jobs wait, by job id: Slurm lately refused to let them go, as it does with
        a job that no nodes could ever hold, or has enough others to choose from.
    """
    why = "Muri does not serve its partition, or cannot read how many GPUs it asks for"
    reasons = {job.job_id: why for job in cycle.view.having(Role.NOT_OURS)}
    reasons |= {job_id: f"Slurm decides when it starts: {why}" for job_id, why in to_slurm.items()}
    refused = cycle.knowledge.refused_releases
    stuck = {job_id: f"{why}; {refused[job_id]}" for job_id, why in reasons.items() if job_id in refused}
    jobs = to_let_go(
        [cycle.view.jobs[job_id] for job_id in reasons if job_id not in stuck], cycle.view, cycle.config, cycle.nodes
    )
    releases = {job.job_id: ReleaseSolo(job.job_id, (reasons[job.job_id],)) for job in jobs}
    later = {job_id: f"{why}; {LATER}" for job_id, why in reasons.items() if job_id not in releases}
    return tuple(releases.values()), {**later, **stuck}
