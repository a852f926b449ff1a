"""From a plan to actions: groups that start, jobs that join, and jobs alone, which others may join. Pure.

Starts keep to the site's limits under any policy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from muri.clock import MIB_PER_GIB
from muri.policies.cycle.validation import broken_laws
from muri.policies.types import FreeNode, Group, NodeShare, Plan, PlanJob, Policy, Reason, Solo, sentences
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Action, Join, MemberPlan, ReleaseSolo, StartGroup, started
from muri.slurm_plugin.planning.asking import Settled
from muri.slurm_plugin.planning.gathered import Gathered
from muri.slurm_plugin.planning.request import Preparation
from muri.slurm_plugin.planning.running import has_a_task_per_gpu, may_join
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.slurm_requests import MEMBER_MEM_MIB, member_mem_mib
from muri.slurm_plugin.planning.starts import Joiner, joins_together, release_solo, start_group
from muri.slurm_plugin.records.cluster import Job, Node
from muri.slurm_plugin.records.nodes import names_in
from muri.slurm_plugin.records.roles import View

_LEAST_OF_OWN_CPUS: Final = 0.75
"""A job's batch script takes a CPU beside its pilot job; where the node has none left, the pilot does with one less, if
that is no more than a quarter of what the job asked for."""


@dataclass(slots=True)
class _Left:
    cpus: int
    mem_mib: int

    def why_short(self, cpus: int, mem_mib: int) -> str:
        """Say what is too little for a group, "" where nothing is."""
        for unit, needed, left in (("CPUs", cpus, self.cpus), ("MiB of memory", mem_mib, self.mem_mib)):
            if needed > left:
                return f"has {max(0, left)} {unit} left, and its pilot job and its members' scripts need {needed}"
        return ""


@dataclass(frozen=True, slots=True)
class PilotShare:
    """What the pilot of one job gets."""

    cpu_count: int  # CPUs
    mem_mib: int  # Memory; 0 where the job has not asked for any


class NodeRoom:
    """The CPUs and memory of nodes of which a plan knows what is free, less those of jobs that start in this cycle."""

    def __init__(self, free: Iterable[FreeNode], nodes: Iterable[Node], config: Config) -> None:
        self._left = {node.name: _Left(int(node.free_cpus), round(node.free_mem_gib * MIB_PER_GIB)) for node in free}
        self._nodes = {node.name: node for node in nodes if node.name in self._left}
        self._share = config.tuning.joinable_share
        self._scripts = config.grouping.max_group_size

    def take_group(self, group: StartGroup, *, counts_mem: bool) -> str:
        """Take a group's CPUs and memory; return why its pilot and members' scripts find no room there, or ""."""
        scripts = sum(member.cpu_count for member in group.members) // group.node_count
        scripts_mib = MEMBER_MEM_MIB * len(group.members) if group.mem_per_node_mib else 0
        cpus, mem_mib = group.cpu_count * group.gpus_per_node + scripts, group.mem_per_node_mib + scripts_mib
        names = sorted(names_in(group.node) & self._left.keys())
        short = ((name, self._left[name].why_short(cpus, mem_mib if counts_mem else 0)) for name in names)
        why = next((f"{name} {what}" for name, what in short if what), "")
        if why:  # one of its jobs may start alone instead
            asked = [member.original for member in group.members]
            cpus = max(-(-each.cpu_count // group.node_count) for each in asked)
            mem_mib = max(each.mem_per_node_mib for each in asked)
        for name in names:
            self._take(name, cpus, mem_mib)
        return why

    def take_alone(self, job: Job, gpus: Sequence[NodeShare]) -> None:
        """Take the CPUs and memory of a job alone."""
        for share in gpus:
            self._take(share.node, -(-job.given_cpus // len(gpus)), job.mem_per_node_mib)

    def take_joinable(self, job: Job, name: str) -> PilotShare | str:
        """Give a job that is counted as one alone a pilot with room for others, at no cost to other jobs.

        The pilot asks for no more than as many jobs like this one as may share its GPUs. Pilot and batch script
        together hold no more than the GPUs' part of the node, or the job's own CPUs where these are more, and no more
        than is free: other GPUs keep the CPUs and memory that belong to them. The answer may be why it can have none.
        """
        node, left = self._nodes[name], self._left[name]
        part = self._part(node, job.gpu_count)
        cpus = self._pilot_cpus(
            job, node, min(left.cpus + job.given_cpus, max(job.given_cpus, int(part * node.cpu_count)))
        )
        if not cpus:
            return f"{name} has no CPU left for a batch script beside a pilot job"
        mem_mib = self._pilot_mem_mib(job, min(left.mem_mib + job.mem_per_node_mib, int(part * node.mem_mib)))
        if mem_mib is None:
            return f"{name} has no host memory left for anybody else beside these GPUs"
        script_mib = min(job.mem_per_node_mib, MEMBER_MEM_MIB)
        script_cpus = _script_cpus(job, node)
        self._take(name, cpus + script_cpus - job.given_cpus, mem_mib + script_mib - job.mem_per_node_mib)
        return PilotShare(cpus, mem_mib)

    def widen(self, group: StartGroup) -> StartGroup:
        """Return a group that is counted, with memory for those that join it later.

        All that it has on a node is no more than its GPUs' part of that, no more than is free, and for each further
        member no more than those that it has ask for.
        """
        names = names_in(group.node)
        if not group.mem_per_node_mib or not names <= self._nodes.keys() or len(group.members) >= self._scripts:
            return group
        scripts_mib = self._scripts * MEMBER_MEM_MIB
        own_mib = group.mem_per_node_mib
        nodes = [self._nodes[name] for name in names]
        part_mib = min(int(self._part(node, group.gpus_per_node) * node.mem_mib) for node in nodes) - scripts_mib
        for_others_mib = own_mib * (self._scripts - len(group.members)) // len(group.members)
        more_mib = max(0, min(part_mib - own_mib, for_others_mib, *(self._left[name].mem_mib for name in names)))
        for name in names:
            self._take(name, 0, more_mib)
        return replace(group, mem_per_node_mib=own_mib + more_mib)

    def _part(self, node: Node, gpu_count: int) -> float:
        """The part of a node that belongs to so many of its GPUs."""
        return self._share * gpu_count / max(1, node.gpu_count)

    def _pilot_cpus(self, job: Job, node: Node, most: int) -> int:
        """CPUs of a pilot, 0 where there are too few; each of its ranks, one for each GPU, gets as many."""
        script = _script_cpus(job, node)
        own = job.given_cpus
        wanted = min(max(own, most - self._scripts * script), self._scripts * own)
        cpus = min(wanted, most - script)
        cpus -= cpus % job.gpu_count
        return cpus if cpus >= max(1, _LEAST_OF_OWN_CPUS * own) else 0

    def _pilot_mem_mib(self, job: Job, most_mib: int) -> int | None:
        """Memory of a pilot, None where there is too little."""
        own_mib = job.mem_per_node_mib
        if not own_mib:
            return 0
        if own_mib + min(own_mib, MEMBER_MEM_MIB) > most_mib:
            return None
        return min(max(own_mib, most_mib - self._scripts * MEMBER_MEM_MIB), self._scripts * own_mib)

    def _take(self, name: str, cpus: int, mem_mib: int) -> None:
        left = self._left.get(name)
        if left is not None:
            left.cpus -= cpus
            left.mem_mib -= mem_mib


def _script_cpus(job: Job, node: Node) -> int:
    """CPUs of a job's own script beside its pilot: a task for each GPU; Slurm gives out whole cores."""
    return job.gpu_count * max(1, node.threads_per_core)


_ROUNDING: Final = 1e-6


def starts_of(settled: Settled, policy: Policy, preparation: Preparation) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Return the starts, joins and releases that limits leave room for, and why other jobs of the plan wait."""
    request, cycle, room = preparation.request, preparation.cycle, preparation.cycle.room
    with_pilots = jobs_with_pilots(request.jobs, policy, cycle.view, cycle.config)
    nodes = NodeRoom(request.nodes, cycle.view.snapshot.nodes, cycle.config)
    starts, crowded = actions_of(settled, cycle, nodes, with_pilots)
    # A site's own policy may not know the laws of sharing.
    unlawful = {job_id: law.why for law in broken_laws(request, settled.plan) for job_id in law.job_ids}
    starts, refused = within_limits(starts, room, cycle.view, {**crowded, **unlawful})
    if may_join(cycle.config):
        starts = tuple(_with_room(action, settled.plan, room, nodes) for action in starts)
    return starts, refused


def actions_of(
    settled: Settled, cycle: Gathered, nodes: NodeRoom, with_pilots: Mapping[int, PlanJob]
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Turn a plan into actions, groups first, in its order; and say of which groups the nodes have too little left."""
    plan = settled.plan
    actions: list[Action] = []
    crowded: dict[int, str] = {}
    for group in plan.groups:
        if group.joining:
            actions += joins_of(group, plan, cycle)
            continue
        start = start_group(group, plan, cycle)
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
        with_pilot = None if planned is None else start_joinable(solo, planned, plan, cycle, nodes)
        actions.append(with_pilot or release_solo(solo, plan, cycle))
    for group in settled.joins:
        actions += joins_of(group, plan, cycle)
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


def _for_two(start: StartGroup, node: Node) -> StartGroup:
    """Return the start of one job with CPUs and memory for two such, as far as its GPUs' part of the node goes.

    A pilot's allocation cannot grow, and joining jobs run inside it; their batch scripts have a CPU for each GPU and a
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
    """Return the starts for which the site's limits have room, and why the other jobs wait, by job id.

    Of a group without room the oldest job starts alone. A job that is to have a pilot job only so that others may join
    it starts without where the limits would rather have it so: all that starts comes first.
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
    """Return the part of a start that limits allow, and why not all; a pilot of one job is not counted yet."""
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
    """Return which member would run below its minimum speed, "" for none.

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


def joins_of(group: Group, plan: Plan, cycle: Gathered) -> tuple[Join, ...]:
    """Return the joins that a plan's group with joining members means, one for each of them."""
    unit = cycle.view.group_of[next(job_id for job_id in group.members if job_id not in group.joining)]
    joiners = [Joiner.of(cycle.known[job_id], group, plan) for job_id in group.joining]
    return joins_together(joiners, unit, cycle, sentences(group.reasons))


MAY_BE_JOINED: Final = "others may join it while it runs"

IS_MEASURED: Final = "its model is measured while it runs"


def jobs_with_pilots(jobs: Iterable[PlanJob], policy: Policy, view: View, config: Config) -> dict[int, PlanJob]:
    """Return the waiting jobs that get a pilot job of their own where they start alone, by job id."""
    # Policies that give out GPUs one by one say themselves who may be joined.
    if policy.supports_packing or not shares_gpus(policy):
        return {}
    known = [job for job in jobs if job.may_share and job.profile is not None]
    fit = [job for job in known if job.gpu_count == 1 or has_a_task_per_gpu(job, view.jobs[job.job_id])]
    if not may_join(config):  # those are measured of which nothing is known, so that later jobs can be grouped
        measures = config.profiling.in_place and config.grouping.max_group_size > 1
        fit = [job for job in fit if measures and job.profile is not None and job.profile.is_estimate]
    return {job.job_id: job for job in fit}


def shares_gpus(policy: Policy) -> bool:
    """Whether jobs ever share GPUs under a policy; one of a site's own may not tell its options."""
    rules = getattr(policy, "rules", None)
    return policy.profile_use == "sharing" if rules is None else rules.max_group_size > 1


def start_joinable(
    solo: Solo, job: PlanJob, plan: Plan, cycle: Gathered, nodes: NodeRoom
) -> StartGroup | ReleaseSolo | None:
    """Return the start of a job alone that others may join, or that is measured, as a group of one.

    Where its node has no room for a pilot job it is released; None where the plan leaves it to Slurm to find GPUs.
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
    start = start_group(group, plan, cycle)
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
