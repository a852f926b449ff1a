"""From a plan to actions: groups that start, jobs that join, and jobs alone, which others may join. Pure.

Starts keep to the site's limits under any policy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from muri.policies.cycle.validation import broken_laws
from muri.policies.types import Group, NodeShare, Plan, PlanJob, Policy, Reason, Solo, sentences
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Action, Join, MemberPlan, ReleaseSolo, StartGroup, started
from muri.slurm_plugin.planning.asking import Settled
from muri.slurm_plugin.planning.gathered import Gathered
from muri.slurm_plugin.planning.node_loads import Layers, Need, NodeLoad, lack_of_room, need_of
from muri.slurm_plugin.planning.request import Preparation
from muri.slurm_plugin.planning.running import has_a_task_per_gpu, may_join
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.slurm_requests import member_mem_mib
from muri.slurm_plugin.planning.starts import Joiner, joins_together, release_solo, start_group
from muri.slurm_plugin.records.cluster import Job
from muri.slurm_plugin.records.nodes import names_in
from muri.slurm_plugin.records.roles import View


class NodeRoom:
    """The CPUs and memory of nodes, less those of jobs that start in this cycle."""

    def __init__(self, cycle: Gathered) -> None:
        limits = cycle.view.snapshot.limits
        self._jobs = cycle.view.jobs
        self._loads = {name: load.copy() for name, load in cycle.loads.items()}
        self._layers = Layers(limits)
        self._counts_mem = {each.name for each in limits.partitions if each.counts_mem}
        self._most_members = cycle.config.grouping.max_group_size

    def expect_plain(self, job: Job, gpus: Sequence[NodeShare]) -> None:
        """Note where the plan counts a job that starts without a pilot."""
        if not self._layers.shares(job):
            for load in self._loads_at(gpus):
                load.ordinary = True

    def take_alone(self, job: Job, gpus: Sequence[NodeShare]) -> None:
        """Take the CPUs and memory of a job alone."""
        self._take(self._loads_at(gpus), (need_of(job, max(1, len(gpus))),), shares=self._layers.shares(job))

    def take_group(self, group: StartGroup) -> tuple[StartGroup, str]:
        """Take the CPUs and memory of a group; return it as it shares CPUs or not, and why it finds no room, or "".

        Jobs share CPUs where their partition allows it and they need it, and no ordinary job is in the way: what shares
        keeps ordinary jobs off its node. Who has shared before always does: Slurm does not take that back.
        """
        loads, needs = self._loads_of(group.node), _needs_of(group)
        layers = self._layers.of(group.partition)
        must_share = any(self._layers.shares(self._jobs[member.job_id]) for member in group.members)
        why = ""
        for most in (layers,) if layers < 2 or must_share else self._kinds(loads, needs, group.gpus_per_node, layers):
            why = self._why_not(loads, needs, most, group.partition)
            if not why:
                self._take(loads, needs, shares=most > 1)
                return replace(group, oversubscribe=most > 1), ""
        return group, why

    def _kinds(self, loads: Iterable[NodeLoad], needs: Sequence[Need], gpus: int, layers: int) -> tuple[int, int]:
        """Ways to share CPUs, the better first: none where a full group finds its own in the GPUs' part of the node."""
        pilot, *members = needs
        full = pilot.cpus + self._most_members * max(need.cpus for need in members)
        has_own = all(full <= load.cpu_count * gpus // max(1, load.gpu_count) for load in loads)
        return (1, layers) if has_own else (layers, 1)

    def take_largest(self, group: StartGroup) -> None:
        """Take what one job of a group needs that finds no room: it may start alone instead."""
        needs = [need_of(self._jobs[member.job_id], group.node_count) for member in group.members]
        largest = Need(max(need.cpus for need in needs), max(need.mem_mib for need in needs))
        self._take(self._loads_of(group.node), (largest,), shares=False)

    def take_join(self, join: Join) -> str:
        """Take the CPUs and memory of a job that joins a group; return why it finds no room, or ""."""
        job, pilot = self._jobs[join.member.job_id], self._jobs[join.pilot]
        loads, needs = self._loads_of(join.node), (need_of(job, max(1, pilot.node_count)),)
        layers = self._layers.of(job.partition) if join.oversubscribe else 1
        why = self._why_not(loads, needs, layers, job.partition)
        if not why:
            self._take(loads, needs, shares=layers > 1)
        return why

    def hold(self, job: Job, gpus: Sequence[NodeShare], sign: int = 1) -> None:
        """Keep the CPUs and memory of a job for it, however it starts; with -1, let go of them."""
        need = need_of(job, len(gpus))
        for load in self._loads_at(gpus):
            load.cpus -= sign * need.cpus
            load.mem_mib -= sign * need.mem_mib

    def _loads_at(self, gpus: Sequence[NodeShare]) -> list[NodeLoad]:
        return [self._loads[share.node] for share in gpus if share.node in self._loads]

    def _loads_of(self, nodes: str) -> list[NodeLoad]:
        return [self._loads[name] for name in sorted(names_in(nodes) & self._loads.keys())]

    def _why_not(self, loads: Iterable[NodeLoad], needs: Sequence[Need], layers: int, partition: str) -> str:
        return lack_of_room(loads, needs, layers, counts_mem=partition in self._counts_mem)

    def _take(self, loads: Iterable[NodeLoad], needs: Sequence[Need], *, shares: bool) -> None:
        for load in loads:
            load.take(needs, shares=shares)


def _needs_of(group: StartGroup) -> list[Need]:
    """The CPUs and memory of a group's jobs on each of its nodes, the pilot first, which starts first."""
    pilot = Need(group.cpu_count * group.gpus_per_node, group.mem_per_node_mib)
    return [pilot, *(Need(-(-each.cpu_count // group.node_count), member_mem_mib(each)) for each in group.members)]


_ROUNDING: Final = 1e-6


def starts_of(settled: Settled, policy: Policy, preparation: Preparation) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Return the starts, joins and releases that limits leave room for, and why other jobs of the plan wait."""
    request, cycle, room = preparation.request, preparation.cycle, preparation.cycle.room
    with_pilots = jobs_with_pilots(request.jobs, policy, cycle.view, cycle.config)
    starts, crowded = actions_of(settled, cycle, NodeRoom(cycle), with_pilots)
    # A site's own policy may not know the laws of sharing.
    unlawful = {job_id: law.why for law in broken_laws(request, settled.plan) for job_id in law.job_ids}
    return within_limits(starts, room, cycle.view, {**crowded, **unlawful})


def actions_of(
    settled: Settled, cycle: Gathered, nodes: NodeRoom, with_pilots: Mapping[int, PlanJob]
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Turn a plan into actions, groups first, in its order; and say of which groups the nodes have too little left."""
    plan = settled.plan
    with_pilots = {
        solo.job_id: with_pilots[solo.job_id] for solo in plan.solo if solo.node and solo.job_id in with_pilots
    }
    for solo in plan.solo:
        if solo.job_id not in with_pilots:
            nodes.expect_plain(cycle.view.jobs[solo.job_id], solo.gpus)
    actions, crowded = _groups_of(plan, cycle, nodes)
    actions += _alone_of(plan, cycle, nodes, with_pilots)
    for group in settled.joins:
        actions += joins_of(group, plan, cycle)
    for action in actions:
        if isinstance(action, Join) and (why := nodes.take_join(action)):
            crowded[action.member.job_id] = f"it cannot join yet: {why}"
    return tuple(_split(action, settled.split) for action in actions), crowded


def _groups_of(plan: Plan, cycle: Gathered, nodes: NodeRoom) -> tuple[list[Action], dict[int, str]]:
    """Return the starts of a plan's groups and the joins, and why the nodes have no room for some of the starts."""
    actions: list[Action] = []
    crowded: dict[int, str] = {}
    for group in plan.groups:
        if group.joining:
            actions += joins_of(group, plan, cycle)
            continue
        start, why = nodes.take_group(cycle.room.capped(start_group(group, plan, cycle)))
        if why:
            nodes.take_largest(start)
        if why and len(start.members) > 1:
            crowded |= dict.fromkeys(started((start,)), why)
        actions.append(started_plain(start, why) if why and len(start.members) == 1 else start)
    return actions, crowded


def _alone_of(plan: Plan, cycle: Gathered, nodes: NodeRoom, with_pilots: Mapping[int, PlanJob]) -> Iterator[Action]:
    """Yield the starts of jobs alone. No pilot takes anything that another job of the plan asks for."""
    for solo in plan.solo:
        take = nodes.hold if solo.job_id in with_pilots else nodes.take_alone
        take(cycle.view.jobs[solo.job_id], solo.gpus)
    for solo in plan.solo:
        planned = with_pilots.get(solo.job_id)
        if planned is None:
            yield release_solo(solo, plan, cycle)
        else:
            yield start_joinable(solo, planned, plan, cycle, nodes)


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


def start_joinable(solo: Solo, job: PlanJob, plan: Plan, cycle: Gathered, nodes: NodeRoom) -> StartGroup | ReleaseSolo:
    """Return the start of a job alone that others may join, or that is measured, as a group of one.

    Where its node has no room for a pilot job it is released.
    """
    what = MAY_BE_JOINED if may_join(cycle.config) else IS_MEASURED
    group = Group(
        (job.job_id,),
        solo.gpus,
        job.gpu_count,
        cycle.known[job.job_id].planned_profile.iteration_s,
        1.0,
        {job.job_id: 1.0},
        (*solo.reasons, Reason(what)),
    )
    nodes.hold(cycle.view.jobs[job.job_id], solo.gpus, -1)
    start, why = nodes.take_group(cycle.room.capped(start_group(group, plan, cycle)))
    if not why:
        return start
    nodes.take_alone(cycle.view.jobs[solo.job_id], solo.gpus)
    release = release_solo(solo, plan, cycle)
    return replace(release, reasons=(*release.reasons, _in_vain(what, why)))


def started_plain(start: StartGroup, why: str) -> ReleaseSolo:
    """Return the release of a job that cannot have a pilot job of its own, and why."""
    what = IS_MEASURED if IS_MEASURED in start.reasons else MAY_BE_JOINED
    reasons = tuple(reason for reason in start.reasons if reason != what)
    return ReleaseSolo(start.members[0].job_id, (*reasons, _in_vain(what, why)))


def _in_vain(what: str, why: str) -> str:
    """Say for people that a job runs without a pilot job."""
    return f"{'it cannot be measured' if what == IS_MEASURED else 'no job can join it'}: {why}"
