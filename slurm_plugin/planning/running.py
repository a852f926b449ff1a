"""What runs now, as a policy sees it, and what a plan means for it. Pure.

Where running jobs are not stopped, it also tells who could move to another group, so that its GPUs would be free.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.types import (
    CpuMemShare,
    Group,
    NodeShare,
    Plan,
    PlanJob,
    PlanRequest,
    Policy,
    Reason,
    Running,
    Solo,
    Waiting,
    sentences,
)
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Preempt
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.placement import is_served
from muri.slurm_plugin.planning.request import KnownJob, Preparation, known_job, plan_job, sharing
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.starts import as_asked, with_request
from muri.slurm_plugin.planning.stated_durations import overran, took_s
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.comment_reports import member_report, promise_broken, steady_company
from muri.slurm_plugin.records.nodes import names_in
from muri.slurm_plugin.records.roles import ManagedJob, Role, RunningGroup, View
from muri.units import MIB_PER_GIB

NO_JOINING: Final = "joining is turned off (grouping.join, grouping.max_group_size or the discipline lockstep)"


def may_join(config: Config) -> bool:
    """Whether jobs may join others that run."""
    grouping = config.grouping
    return grouping.join and grouping.max_group_size > 1 and grouping.discipline != "lockstep"


def as_submitted(job: ManagedJob, pilot: Job) -> ManagedJob:
    """A member with the request that it had before it was grouped."""
    if job.membership is None:
        return job
    return with_request(job, job.membership.original, pilot.gpu_count)


def running_units(cycle: CycleInput, room: SiteRoom) -> tuple[Running, ...]:
    """Return what runs and belongs to Muri: groups, those of one member among them, and jobs that were released alone.

    What runs on nodes that take no new work is left out.

    Args:
        cycle: What the cycle decides on.
        room: Where jobs may run, and how long.
    """
    open_nodes = {
        node.name: node for node in cycle.nodes if node.usable and node.gpu_count and is_served(node, cycle.config)
    }
    units = [*_groups(cycle, room, open_nodes), *_solos(cycle, room)]
    return tuple(unit for unit in units if unit.gpus and all(share.node in open_nodes for share in unit.gpus))


def _groups(cycle: CycleInput, room: SiteRoom, nodes: Mapping[str, Node]) -> Iterator[Running]:
    for group in cycle.view.running_groups:
        jobs = [as_submitted(job, group.pilot) for job in group.members]
        members = tuple(
            replace(
                _plan_job(job, cycle, room),
                largest_group=max(len(jobs), _largest_beside(job, group.pilot, cycle.knowledge, room)),
            )
            for job in jobs
        )
        open_to_all = not why_closed(group, nodes, cycle.config) and _all_may_share(members, jobs, room, homes(group))
        yield Running(
            members,
            _shares(group.pilot),
            dict.fromkeys((job.job_id for job in jobs), _held_shares(group.pilot, 1 / len(jobs))),
            mode=group.mode,
            joinable=open_to_all,
            spare_mem_gib=spare_mem_mib(group) / MIB_PER_GIB,
            measured=measured_speeds(group),
        )


def measured_speeds(group: RunningGroup) -> dict[int, float]:
    """Return the speeds of members that their runtime has measured, 1 = as fast as alone, by job id.

    There are none where somebody came or went since they were measured. A member whose iteration time alone is only
    estimated is not among them.
    """
    found: dict[int, float] = {}
    if steady_company(group.pilot.reports.speeds) != {job.job_id for job in group.members}:
        return found
    for job in group.members:
        report, planned = member_report(group.pilot.reports.speeds, job.job_id), job.planned
        if report is not None and planned is not None and not planned.estimated:
            speed = report.speed(planned.solo_iteration_s)
            found |= {} if speed is None else {job.job_id: speed}
    return found


def homes(group: RunningGroup) -> frozenset[str]:
    """Return the names of a group's nodes."""
    return frozenset(names_in(group.pilot.nodes))


def broken_promises(group: RunningGroup) -> tuple[int, ...]:
    """Return the members at work that do not get the speed that they were promised."""
    told = promise_broken(group.pilot.reports.speeds)
    return tuple(job.job_id for job in group.members if job.job_id in told)


def why_closed(group: RunningGroup, nodes: Mapping[str, Node], config: Config) -> str:
    """Return why nobody can join a group now, "" when a fitting job can.

    Args:
        group: The group.
        nodes: Nodes by name; one that is not among them takes no new work.
        config: The configuration.
    """
    members, grouping = group.members, config.grouping
    own = [nodes.get(name) for name in homes(group)]
    # The script of a job on several GPUs is at most a task for each of them.
    scripts = group.pilot.gpu_count // max(1, len(own))
    # A group that is starting or ending is left alone.
    checks = (
        (not may_join(config), NO_JOINING),
        (any(job.state is not JobState.RUNNING for job in members), "a member of the group is not running"),
        (group.mode == "plain", "the group shares without turns, which was measured for its present members only"),
        (len(members) >= grouping.max_group_size, "the group is full (grouping.max_group_size)"),
        (bool(broken_promises(group)), "a member does not get the speed that it was promised"),
        (any(job.has_changed_limit for job in members), "a member's time limit was changed"),
        (any(node is None or not node.usable for node in own), "the group's node takes no new work"),
        (
            any(node is not None and node.cpu_count - node.cpus_allocated < scripts for node in own),
            "the group's node has no CPU left for its script",
        ),
    )
    return next((why for applies, why in checks if applies), "")


def _all_may_share(members: Sequence[PlanJob], jobs: Sequence[Job], room: SiteRoom, nodes: AbstractSet[str]) -> bool:
    """Whether all is known of a group's members, they have one domain, and would be put on its nodes today."""
    known = all(job.groupable and job.profile is not None for job in members)
    return (
        known and len({job.domain for job in members}) == 1 and all(nodes <= room.places.of(job).nodes for job in jobs)
    )


def spare_mem_mib(group: RunningGroup) -> int:
    """Return the memory of a pilot that no member has asked for; where none is set, jobs that ask for none may join."""
    asked = sum(job.membership.original.mem_per_node_mib for job in group.members if job.membership is not None)
    return max(0, group.pilot.mem_per_node_mib - asked)


def _largest_beside(job: ManagedJob, pilot: Job, knowledge: Knowledge, room: SiteRoom) -> int:
    """How many may share a running member's GPUs before sharing takes it more time than it is allowed."""
    largest, _ = knowledge.largest_group.get(job.job_id, (MAX_GROUP_SIZE, ""))
    late_s = int(max(0.0, job.start_s - pilot.start_s))
    sizes = range(2, largest + 1)
    return next((size - 1 for size in sizes if room.why_no_time(job, size, late_s)), largest)


def _solos(cycle: CycleInput, room: SiteRoom) -> Iterator[Running]:
    for job in cycle.view.having(Role.RELEASED):
        if job.state is JobState.RUNNING and job.gpu_count and not (job.array or job.het):
            asked, held = _plan_job(as_asked(job), cycle, room), {job.job_id: _held_shares(job)}
            yield Running((asked,), _shares(job), held, joinable=False, measured={})


def _held_shares(job: Job, part: float = 1.0) -> tuple[CpuMemShare, ...]:
    """A part of the CPUs and memory that a job holds on each of its nodes."""
    names = sorted(names_in(job.nodes))
    mem_gib = part * job.mem_per_node_mib / MIB_PER_GIB
    return tuple(CpuMemShare(name, part * job.cpu_count / len(names), mem_gib) for name in names)


def _shares(job: Job) -> tuple[NodeShare, ...]:
    names = sorted(names_in(job.nodes))
    if not names or job.gpu_count % len(names):
        return ()
    return tuple(NodeShare(name, job.gpu_count // len(names)) for name in names)


def _plan_job(job: ManagedJob, cycle: CycleInput, room: SiteRoom) -> PlanJob:
    """Describe a job that runs to a policy; `job` is as its user submitted it."""
    planned = plan_job(known_job(job, cycle), room.places.of(job).name, cycle.knowledge, cycle.config, cycle.node_index)
    ran_s = max(0.0, cycle.now_s - job.start_s)
    alone_s = took_s(job, cycle.view)
    # Who has overrun is taken to need as long again, as in 2D-LAS.
    least_s = alone_s if overran(job, alone_s) else 1.0
    left_s = None if planned.remaining_s is None else max(least_s, planned.remaining_s - ran_s)
    stopping, settled = cycle.config.preemption, ran_s >= cycle.config.preemption.least_run_s
    return replace(
        planned,
        waiting_since_s=None,
        remaining_s=left_s,
        attained_gpu_s=planned.attained_gpu_s + ran_s * job.gpu_count,
        restart_s=cycle.config.tuning.restart_s,
        preemptible=stopping.enabled and settled and not why_not_preemptible(job),
    )


def with_running(preparation: Preparation) -> PlanRequest:
    """Return the request with what runs.

    A join takes less of the site's limits than a group that starts: no pilot job, and no time for all to begin. A job
    for which a group of its own kind is open may therefore be in larger groups than `largest_group` allowed so far.
    """
    request, cycle, room = preparation.request, preparation.cycle, preparation.room
    running = running_units(cycle, room)
    open_kinds = {kind_of(unit.members[0]) for unit in running if unit.joinable}
    jobs = tuple(
        _for_joins(job, preparation.known[job.job_id], cycle.knowledge, cycle.config, room)
        if kind_of(job) in open_kinds
        else job
        for job in request.jobs
    )
    return replace(request, jobs=jobs, running=running)


Kind = tuple[str, str, str, int, int]
"""What a job must have in common with those that it joins: user, partition, domain, GPUs and nodes."""


def kind_of(job: PlanJob) -> Kind:
    """Return what a job must have in common with those that it joins."""
    return job.user, job.partition, job.domain, job.gpu_count, job.node_count


def _for_joins(job: PlanJob, known: KnownJob, knowledge: Knowledge, config: Config, room: SiteRoom) -> PlanJob:
    joining = sharing(known, knowledge, config, room.largest_when_joining)
    if joining.largest <= job.largest_group:
        return job
    return replace(job, groupable=not joining.alone, alone_reason=joining.alone, largest_group=joining.largest)


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
        joins: Jobs that join what runs where the plan gives out GPUs one by one.
        split: Micro-batches, and the GPU memory (GiB) that they take, of jobs that split their batches, by job id.
    """

    plan: Plan
    stops: tuple[Waiting, ...]
    joins: tuple[Group, ...] = ()
    split: Mapping[int, tuple[int, float]] = field(default_factory=dict)


def settle(plan: Plan, request: PlanRequest) -> Settled:
    """Take out of a plan what runs already, and what has to wait until running jobs have stopped.

    Nobody is stopped who must not be, whatever the plan says: it may be of a site's own policy.
    """
    jobs = {job.job_id: job for unit in request.running for job in unit.members}
    at_work = jobs.keys()
    joins = [group for group in plan.groups if group.joining]
    starts = [group for group in plan.groups if not group.joining]
    stops = [item for item in plan.waiting if item.job_id in at_work and item.preempted]
    for group in starts:
        stops += [Waiting(job, group.reasons, True) for job in group.members if job in at_work and not group.kept]
    for group in joins:
        # Who is to move from one group to another joins it once it waits.
        stops += [Waiting(job, group.reasons, True) for job in group.joining if job in at_work]
    stops += [
        Waiting(solo.job_id, solo.reasons, True) for solo in plan.solo if solo.job_id in at_work and not solo.kept
    ]
    free = {node.name: node.free_gpus for node in request.nodes}
    open_units = {frozenset(job.job_id for job in unit.members): unit.gpus for unit in request.running if unit.joinable}
    groups = [_of_waiting(group, at_work) for group in joins if open_units.get(_met_by(group)) == group.gpus]
    groups = [group for group in groups if group.joining]
    groups += [group for group in starts if at_work.isdisjoint(group.members) and _fits(group, free)]
    solo = [item for item in plan.solo if item.job_id not in at_work and _fits(item, free)]
    started = {job for group in groups for job in group.members} | {item.job_id for item in solo}
    closed = {job_id: why for unit in request.running for job_id, why in unit.closed_to.items()}
    waiting = [_with_reason(item, closed) for item in plan.waiting if item.job_id not in at_work]
    waiting += _postponed(plan, started | at_work)
    settled = replace(plan, groups=tuple(groups), solo=tuple(solo), waiting=tuple(waiting))
    return Settled(settled, tuple(item for item in stops if jobs[item.job_id].preemptible))


def _of_waiting(group: Group, at_work: AbstractSet[int]) -> Group:
    """A group with those of its joiners that can come now."""
    later = at_work & set(group.joining)
    members = tuple(job for job in group.members if job not in later)
    return replace(group, members=members, joining=tuple(job for job in group.joining if job not in later))


def _with_reason(item: Waiting, closed: Mapping[int, str]) -> Waiting:
    """A waiting job with the reason why it cannot join what runs."""
    if item.job_id not in closed:
        return item
    return replace(item, reasons=(*item.reasons, Reason("it cannot join what runs: {}", (closed[item.job_id],))))


def _met_by(joiners: Group) -> frozenset[int]:
    """Those that a plan's joiners come to: they must run together, be open to others, and hold just its GPUs."""
    return frozenset(joiners.members).difference(joiners.joining)


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


ASK_AGAIN_S: Final = 300.0
"""Who could move is asked for no more often: it takes a plan of the whole queue."""

Moves = Mapping[int, tuple[int, ...]]
"""Those whose GPUs a running job could move to, by the running job's id."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Who could move, as it was found some time ago.

    Attributes:
        asked_s: When, seconds since the epoch.
        moves: What was found.
    """

    asked_s: float = 0.0
    moves: Moves = field(default_factory=dict)

    def is_recent(self, now_s: float) -> bool:
        """Whether there is no need to ask again."""
        return 0 <= now_s - self.asked_s < ASK_AGAIN_S

    def told(self, view: View) -> dict[int, str]:
        """Return what to tell running jobs, by job id, as far as all whom it is about still run."""
        held = {job_id: others for job_id, others in self.moves.items() if {job_id, *others} <= view.group_of.keys()}
        return {job_id: _said(others) for job_id, others in held.items()}


def proposed_moves(request: PlanRequest, view: View, restart_s: float, stopping: Callable[[], Policy]) -> Moves:
    """Return where running jobs would move if they might be stopped.

    Only jobs whose users agreed to be stopped, and whose scripts have declared a checkpoint in this run, are told.

    Args:
        request: What the policy was asked.
        view: The queue.
        restart_s: What stopping a job and starting it again loses.
        stopping: Gives the policy as it is where running jobs may be stopped; not asked where nobody could move.
    """
    movable = {job.job_id for job in view.having(Role.MEMBER) if not why_not_preemptible(job)}
    open_units = [unit for unit in request.running if unit.joinable]
    alike = Counter(kind_of(unit.members[0]) for unit in open_units)
    may_meet = {job.job_id for unit in open_units if alike[kind_of(unit.members[0])] > 1 for job in unit.members}
    if not request.jobs or movable.isdisjoint(may_meet):
        return {}
    running = tuple(
        replace(
            unit,
            members=tuple(replace(job, preemptible=job.job_id in movable, restart_s=restart_s) for job in unit.members),
        )
        for unit in request.running
    )
    policy = stopping()
    return {} if policy.supports_packing else _moves(policy.plan(replace(request, running=running)), movable)


def _moves(plan: Plan, movable: set[int]) -> Moves:
    found: dict[int, tuple[int, ...]] = {}
    for group in plan.groups:
        others = tuple(job_id for job_id in group.members if job_id not in group.joining)
        found |= dict.fromkeys(movable.intersection(group.joining), others)
    return found


def _said(others: tuple[int, ...]) -> str:
    return (
        f"it has a checkpoint and could move to the GPUs of job {', '.join(map(str, others))}, which would free its "
        "own: preemption.enabled in muri.yaml lets Muri do that"
    )
