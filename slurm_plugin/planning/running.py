"""What runs now, as a policy sees it, and what a plan means for it. Pure.

Where running jobs are not stopped, it also tells who could move to another group, so that its GPUs would be free.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.traits import BatchModel
from muri.policies.types import CpuMemShare, FreeNode, NodeShare, PlanJob, PlanRequest, Running
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge, overran, took_s
from muri.slurm_plugin.planning.model_traits import batch_model, interference_table
from muri.slurm_plugin.planning.placement import Places, domain_of, is_served
from muri.slurm_plugin.planning.request import KnownJob, Preparation, known_job, plan_job, sharing
from muri.slurm_plugin.planning.site_limits import SiteRoom, payer_of
from muri.slurm_plugin.planning.slurm_requests import as_asked, as_submitted
from muri.slurm_plugin.planning.starts import Joiner, joins_together
from muri.slurm_plugin.records.cluster import Job, JobState, Node, NodeIndex
from muri.slurm_plugin.records.comment_reports import member_report, promise_broken, steady_company
from muri.slurm_plugin.records.nodes import names_in
from muri.slurm_plugin.records.roles import ManagedJob, Role, RunningGroup, View
from muri.units import MIB_PER_GIB

NO_JOINING: Final = "joining is turned off (grouping.join, grouping.max_group_size or the discipline lockstep)"


def may_join(config: Config) -> bool:
    """Whether jobs may join others that run."""
    grouping = config.grouping
    return grouping.join and grouping.max_group_size > 1 and grouping.discipline != "lockstep"


def running_units(cycle: CycleInput, room: SiteRoom) -> tuple[Running, ...]:
    """Return what runs and belongs to Muri: groups, those of one member among them, and jobs that were released alone.

    What runs on nodes that take no new work is left out.
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
    """Return why nobody can join a group now, "" when a fitting job can."""
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


_NO_RANKS = "it has several GPUs: who shares these is on one node, has a task for each, and was measured on as many"

_NO_PILOT = "it runs without a pilot job, so that no job can join it"


def sharing_request(request: PlanRequest, cycle: CycleInput, room: SiteRoom) -> PlanRequest:
    """Return the request as policies that give out GPUs one by one expect it."""
    units = tuple(_one_by_one(running_units(cycle, room), cycle.view))
    nodes, running = _numbered(request.nodes, units)
    traits = _Traits(cycle)
    jobs = tuple(traits.of(job) for job in request.jobs)
    running = tuple(replace(unit, members=tuple(traits.of(job) for job in unit.members)) for unit in running)
    at_work = _keys(job for unit in running for job in unit.members)
    known, turns = cycle.knowledge, cycle.config.grouping.discipline == "fair"
    table = interference_table(_keys(jobs), at_work, known.profiles, known.traits, turns_only=turns)
    measured = replace(request, interference=table, slowdowns=known.traits.slowdowns)
    return replace(measured, jobs=jobs, nodes=nodes, running=running, whole_sets_only=True)


def _keys(jobs: Iterable[PlanJob]) -> list[ProfileKey]:
    return [job.profile.key for job in jobs if job.profile is not None]


def _family_of(key: ProfileKey) -> tuple[str, int, str]:
    """What the profiles of a model with all its batch sizes have in common."""
    return key.model, key.gpu_count, key.gpu_type


class _Traits:
    """Adds to jobs the traits that packing policies use."""

    def __init__(self, cycle: CycleInput) -> None:
        self._knowledge, self._view = cycle.knowledge, cycle.view
        self._joins = may_join(cycle.config)
        self._found: dict[tuple[ProfileKey, int], BatchModel | None] = {}
        self._families: dict[tuple[str, int, str], dict[ProfileKey, StageProfile]] = {}
        for key, profile in self._knowledge.profiles.items():
            self._families.setdefault(_family_of(key), {})[key] = profile

    def of(self, job: PlanJob) -> PlanJob:
        alone = job.alone_reason
        if not alone and not self._joins:
            alone = NO_JOINING
        elif not alone and job.gpu_count > 1 and not has_a_task_per_gpu(job, self._view.jobs[job.job_id]):
            alone = _NO_RANKS
        return replace(job, groupable=not alone, alone_reason=alone, batch=self._batch(job))

    def _batch(self, job: PlanJob) -> BatchModel | None:
        if job.profile is None:
            return None
        steps = self._view.jobs[job.job_id].request.accumulate
        if steps == 1 and str(job.profile.key) in self._knowledge.traits.accumulating:
            steps = max(1, job.profile.key.batch_size)  # the script says that it can, and sets no limit
        name = job.profile.key, steps
        if name not in self._found:
            family = self._families.get(_family_of(name[0]), {})
            self._found[name] = batch_model(name[0], family, self._knowledge.traits.fits, name[1])
        return self._found[name]


def _one_by_one(units: tuple[Running, ...], view: View) -> Iterator[tuple[int, Running]]:
    """Each running job as a unit of its own, with the number of the unit that it shares GPUs in."""
    grouped = {member.job_id: member.membership for group in view.running_groups for member in group.members}
    for number, unit in enumerate(units):
        for job in unit.members:
            # Muri wrote a member's present request; that the job is in a group shows that it was groupable.
            why = "" if job.job_id in grouped else job.alone_reason or _NO_PILOT
            known = replace(job, groupable=not why, alone_reason=why)
            state = grouped.get(job.job_id)
            steps = 1 if state is None else state.accumulate_steps
            yield number, replace(unit, members=(known,), cpu_mem_shares={}, accumulate_steps=steps)


def _numbered(
    nodes: tuple[FreeNode, ...], units: tuple[tuple[int, Running], ...]
) -> tuple[tuple[FreeNode, ...], tuple[Running, ...]]:
    """Give the GPUs of each node numbers: running jobs the first ones, the free ones the last."""
    room = {node.name: node.gpu_count - node.free_gpus for node in nodes}
    taken = dict.fromkeys(room, 0)
    shares: dict[int, tuple[NodeShare, ...] | None] = {}
    running: list[Running] = []
    for number, unit in units:
        if number not in shares:
            shares[number] = _take(unit, taken, room)
        if (own := shares[number]) is not None:
            running.append(replace(unit, gpus=own))
    return tuple(_with_numbers(node) for node in nodes), tuple(running)


def _take(unit: Running, taken: dict[str, int], room: Mapping[str, int]) -> tuple[NodeShare, ...] | None:
    """The next numbers of each node; None where the snapshot shows fewer GPUs in use than the job holds."""
    if any(taken.get(share.node, 0) + share.gpu_count > room.get(share.node, 0) for share in unit.gpus):
        return None
    found = []
    for share in unit.gpus:
        first = taken[share.node]
        taken[share.node] += share.gpu_count
        found.append(replace(share, gpu_ids=tuple(range(first, first + share.gpu_count))))
    return tuple(found)


def _with_numbers(node: FreeNode) -> FreeNode:
    ids = tuple(range(node.gpu_count))
    free = ids[node.gpu_count - node.free_gpus :] if node.free_gpus else ()
    return replace(node, islands=(free,) if free else (), topology=(ids,))


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
    """Return why a job cannot join a group now, "" when it can."""
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


def has_a_task_per_gpu(planned: PlanJob, job: Job) -> bool:
    """Whether a job on several GPUs of one node surely has a rank for each of them.

    A script that has one process for all its GPUs would be refused by its runtimes, and go back to the queue.
    """
    measured = planned.profile is not None and not planned.profile.is_estimate
    return measured and planned.node_count == 1 and job.task_count == planned.gpu_count
