"""The request's running units, and the waiting jobs that may join them. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from muri.clock import MIB_PER_GIB
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.traits import BatchModel
from muri.policies.types import CpuMemShare, FreeNode, NodeShare, PlanJob, PlanRequest, Policy, Running
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.cycle_input import overran, took_s
from muri.slurm_plugin.planning.gathered import Gathered, KnownJob, domain_of, running_alone
from muri.slurm_plugin.planning.model_traits import batch_model, interference_table, with_measured_pairs
from muri.slurm_plugin.planning.node_loads import Need, lack_of_room, need_of
from muri.slurm_plugin.planning.placement import is_served
from muri.slurm_plugin.planning.request import Preparation, plan_job, sharing
from muri.slurm_plugin.planning.site_limits import payer_of
from muri.slurm_plugin.planning.slurm_requests import as_submitted
from muri.slurm_plugin.planning.starts import Joiner, joins_together
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.comment_reports import member_report, promise_broken, steady_company
from muri.slurm_plugin.records.nodes import names_in
from muri.slurm_plugin.records.roles import ManagedJob, Role, RunningGroup, View

NO_JOINING: Final = "joining is turned off (grouping.join, grouping.max_group_size or the discipline lockstep)"

_NO_RANKS = "it has several GPUs: who shares these is on one node, has a task for each, and was measured on as many"

_NO_PILOT = "it runs without a pilot job, so that no job can join it"


def may_join(config: Config) -> bool:
    """Whether jobs may join others that run."""
    grouping = config.grouping
    return grouping.join and grouping.max_group_size > 1 and grouping.discipline != "lockstep"


def grouping_request(preparation: Preparation, policy: Policy) -> PlanRequest:
    """Return the request, with what runs, for a policy that names groups.

    A join takes less of the site's limits than a group that starts: no pilot job, and no time for all to begin. A job
    for which a group of its own kind is open may therefore be in larger groups than `largest_group` allowed so far.
    """
    request, cycle = preparation.request, preparation.cycle
    running = running_units(cycle)
    open_kinds = {kind_of(unit.members[0]) for unit in running if unit.joinable}
    jobs = tuple(_for_joins(job, cycle) if kind_of(job) in open_kinds else job for job in request.jobs)
    request = replace(request, jobs=jobs, running=_with_closed(running, jobs, cycle))
    return with_measured_pairs(request, policy, cycle.knowledge.traits.pairs)


def _for_joins(job: PlanJob, cycle: Gathered) -> PlanJob:
    joining = sharing(cycle.known[job.job_id], cycle.knowledge, cycle.config, cycle.room.largest_when_joining)
    if joining.largest <= job.largest_group:
        return job
    return replace(job, groupable=not joining.alone, alone_reason=joining.alone, largest_group=joining.largest)


Kind = tuple[str, str, str, int, int]


def kind_of(job: PlanJob) -> Kind:
    """Return the properties that a job shares with those that it joins: user, partition, domain, GPUs and nodes."""
    return job.user, job.partition, job.domain, job.gpu_count, job.node_count


def _with_closed(running: tuple[Running, ...], jobs: Sequence[PlanJob], cycle: Gathered) -> tuple[Running, ...]:
    """Return what runs with the jobs that cannot join it, because a member would get too little time."""
    alike: dict[Kind, dict[tuple[object, ...], list[PlanJob]]] = {
        kind_of(unit.members[0]): {} for unit in running if unit.joinable
    }
    for job in jobs:
        if job.may_share and job.profile is not None and (kind := kind_of(job)) in alike:
            managed = cycle.known[job.job_id].job
            held = managed.given_cpus, managed.mem_per_node_mib, managed.oversubscribe
            asked = payer_of(managed), managed.time_limit_s, *held
            alike[kind].setdefault(asked, []).append(job)
    units = []
    for unit in running:
        classes = alike[kind_of(unit.members[0])].values() if unit.joinable else ()
        closed_to: dict[int, str] = {}
        for of_class in classes:
            known, group = cycle.known[of_class[0].job_id], cycle.view.group_of[unit.members[0].job_id]
            (join,) = joins_together([Joiner(known, 1.0, known.min_speed)], group, cycle, ())
            if why := cycle.room.why_too_late(join) or _why_not_beside(group, known.job, cycle):
                closed_to |= dict.fromkeys((job.job_id for job in of_class), why)
        units.append(replace(unit, closed_to=closed_to))
    return tuple(units)


def running_units(cycle: Gathered) -> tuple[Running, ...]:
    """Return what runs and belongs to Muri: groups, those of one member among them, and jobs that were released alone.

    What runs on nodes that take no new work is left out.
    """
    open_nodes = {
        node.name: node
        for node in cycle.view.snapshot.nodes
        if node.usable and node.gpu_count and is_served(node, cycle.config)
    }
    units = [_group(group, cycle, open_nodes) for group in cycle.view.running_groups]
    for job in running_alone(cycle.view):
        planned, held = _running_job(cycle.known[job.job_id], cycle), {job.job_id: _held_shares(job)}
        units.append(Running((planned,), _shares(job), held, joinable=False, measured={}))
    return tuple(unit for unit in units if unit.gpus and all(share.node in open_nodes for share in unit.gpus))


def _group(group: RunningGroup, cycle: Gathered, nodes: Mapping[str, Node]) -> Running:
    """Return a group as a policy sees it; open where all is known of its members, and they would be put there today."""
    pilot, room, known = group.pilot, cycle.room, [cycle.known[job.job_id] for job in group.members]
    members = []
    for each in known:
        most, _ = cycle.knowledge.largest_group.get(each.job.job_id, (MAX_GROUP_SIZE, ""))
        late_s = int(max(0.0, each.job.start_s - pilot.start_s))
        largest = next((size - 1 for size in range(2, most + 1) if room.why_no_time(each.job, size, late_s)), most)
        members.append(replace(_running_job(each, cycle), largest_group=max(len(known), largest)))
    is_open = (
        not why_closed(group, nodes, cycle)
        and all(job.groupable and job.profile is not None for job in members)
        and len({job.domain for job in members}) == 1
        and all(homes(group) <= room.places.of(each.job).nodes for each in known)
    )
    return Running(
        tuple(members),
        _shares(pilot),
        {job.job_id: _held_shares(job, pilot, 1 / len(members)) for job in group.members},
        mode=group.mode,
        joinable=is_open,
        spare_mem_gib=spare_mem_gib(group, cycle) if is_open else 0.0,
        measured=measured_speeds(group),
    )


def _running_job(known: KnownJob, cycle: Gathered) -> PlanJob:
    """Describe a job that runs to a policy."""
    job = known.job
    planned = plan_job(known, cycle.room.places.of(job).name, cycle)
    ran_s = max(0.0, cycle.now_s - job.start_s)
    alone_s = took_s(job, cycle.view)
    # A job that has overrun is taken to need as long again, as in 2D-LAS.
    least_s = alone_s if overran(job, alone_s) else 1.0
    stopping = cycle.config.preemption
    return replace(
        planned,
        waiting_since_s=None,
        remaining_s=None if planned.remaining_s is None else max(least_s, planned.remaining_s - ran_s),
        attained_gpu_s=planned.attained_gpu_s + ran_s * job.gpu_count,
        restart_s=cycle.config.tuning.restart_s,
        preemptible=stopping.enabled and ran_s >= stopping.least_run_s and not why_not_preemptible(job),
    )


def measured_speeds(group: RunningGroup) -> dict[int, float]:
    """Return the speeds of members that their runtime has measured, 1 = as fast as alone, by job id.

    There are none where a member came or went since they were measured. A member whose iteration time alone is only
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


def why_closed(group: RunningGroup, nodes: Mapping[str, Node], cycle: Gathered) -> str:
    """Return why no job can join a group now, "" when a fitting one can.

    Of `nodes`, by name, one that is missing takes no new work.
    """
    members, config, grouping = group.members, cycle.config, cycle.config.grouping
    below_promise = promise_broken(group.pilot.reports.speeds)
    own = [nodes.get(name) for name in homes(group)]
    # A group that is starting or ending is left alone.
    checks = (
        (not may_join(config), NO_JOINING),
        (any(job.state is not JobState.RUNNING for job in members), "a member of the group is not running"),
        (group.mode == "plain", "the group shares without turns, which was measured for its present members only"),
        (len(members) >= grouping.max_group_size, "the group is full (grouping.max_group_size)"),
        (any(job.job_id in below_promise for job in members), "a member does not get the speed that it was promised"),
        (any(job.has_changed_limit for job in members), "a member's time limit was changed"),
        (any(node is None or not node.usable for node in own), "the group's node takes no new work"),
        (not all(job.is_granted for job in members), "an earlier version of Muri started the group"),
    )
    return next((why for applies, why in checks if applies), "") or _why_no_cpus(group, Need(1), cycle)


def _why_not_beside(group: RunningGroup, job: Job, cycle: Gathered) -> str:
    """Return why Slurm would not start a job beside a group, "" when it would."""
    limits = cycle.view.snapshot.limits.partition(group.pilot.partition)
    if job.oversubscribe and limits.oversubscribe > 1 and not group.pilot.oversubscribe:
        return "it shares CPUs, and Slurm starts it beside no job that has its own"
    return _why_no_cpus(group, need_of(job, max(1, job.node_count)), cycle)


def _why_no_cpus(group: RunningGroup, need: Need, cycle: Gathered) -> str:
    """Return why the CPUs of a group's nodes, or their memory, do not suffice for a job that joins, "" when they do."""
    pilot, limits = group.pilot, cycle.view.snapshot.limits.partition(group.pilot.partition)
    layers = limits.oversubscribe if pilot.oversubscribe else 1
    loads = [cycle.loads[name] for name in sorted(homes(group)) if name in cycle.loads]
    why = lack_of_room(loads, [need], layers, counts_mem=limits.counts_mem)
    return f"the group's node {why}" if why else ""


def spare_mem_gib(group: RunningGroup, cycle: Gathered) -> float:
    """Return the memory that is free on each of a group's nodes, infinite where Slurm does not count it."""
    if not cycle.view.snapshot.limits.partition(group.pilot.partition).counts_mem:
        return math.inf
    free = [cycle.loads[name].mem_mib for name in homes(group) if name in cycle.loads]
    return max(0, min(free, default=0)) / MIB_PER_GIB


def _held_shares(job: Job, pilot: Job | None = None, part: float = 1.0) -> tuple[CpuMemShare, ...]:
    """The CPUs and memory that a job holds on each of its nodes, and its part of those of its group's pilot."""
    names = sorted(names_in(job.nodes if pilot is None else pilot.nodes))
    cpus, mem_mib = float(job.cpu_count), float(job.mem_per_node_mib)
    if pilot is not None:
        cpus, mem_mib = cpus + part * pilot.cpu_count, mem_mib + part * pilot.mem_per_node_mib
    return tuple(CpuMemShare(name, cpus / len(names), mem_mib / MIB_PER_GIB) for name in names)


def _shares(job: Job) -> tuple[NodeShare, ...]:
    names = sorted(names_in(job.nodes))
    if not names or job.gpu_count % len(names):
        return ()
    return tuple(NodeShare(name, job.gpu_count // len(names)) for name in names)


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


def sharing_request(preparation: Preparation) -> PlanRequest:
    """Return the request, with what runs, for a policy that gives out GPUs one by one."""
    request, cycle = preparation.request, preparation.cycle
    units = tuple(_one_by_one(running_units(cycle), cycle.view))
    nodes, running = _numbered(request.nodes, units)
    traits = _Traits(cycle)
    jobs = tuple(traits.of(job) for job in request.jobs)
    running = tuple(replace(unit, members=tuple(traits.of(job) for job in unit.members)) for unit in running)
    at_work = _keys(job for unit in running for job in unit.members)
    known, turns = cycle.knowledge, cycle.config.grouping.discipline == "fair"
    return replace(
        request,
        jobs=jobs,
        nodes=nodes,
        running=running,
        interference=interference_table(_keys(jobs), at_work, known.profiles, known.traits, turns_only=turns),
        slowdowns=known.traits.slowdowns,
        whole_sets_only=True,
    )


def _keys(jobs: Iterable[PlanJob]) -> list[ProfileKey]:
    return [job.profile.key for job in jobs if job.profile is not None]


def _family_of(key: ProfileKey) -> tuple[str, int, str]:
    """What the profiles of a model with all its batch sizes have in common."""
    return key.model, key.gpu_count, key.gpu_type


class _Traits:
    """Adds to jobs the traits that packing policies use."""

    def __init__(self, cycle: Gathered) -> None:
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
    for number, unit in enumerate(units):
        for job in unit.members:
            # Muri wrote a member's present request; that the job is in a group shows that it was groupable.
            state = view.jobs[job.job_id].membership if job.job_id in view.group_of else None
            why = "" if job.job_id in view.group_of else job.alone_reason or _NO_PILOT
            known = replace(job, groupable=not why, alone_reason=why)
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


def why_no_room(job: ManagedJob, group: RunningGroup, cycle: Gathered) -> str:
    """Return why a job cannot join a group now, "" when it can."""
    pilot, domain = group.pilot, domain_of(job)
    if (job.uid, job.partition) != (pilot.uid, pilot.partition):
        return "the group belongs to another user or partition"
    if any(domain_of(as_submitted(member, pilot)) != domain for member in group.members):
        return f"the group does not belong to {domain}"
    if why := why_closed(group, cycle.view.node_index.by_name, cycle):
        return why
    if (job.gpu_count, max(1, job.node_count)) != (pilot.gpu_count, len(homes(group))):
        return "the group is not on as many GPUs and nodes"
    if not homes(group) <= cycle.room.places.of(job).nodes:
        return "the job may not run on the group's node"
    return _why_not_beside(group, job, cycle)


def has_a_task_per_gpu(planned: PlanJob, job: Job) -> bool:
    """Whether a job on several GPUs of one node surely has a rank for each of them.

    A script that has one process for all its GPUs would be refused by its runtimes, and go back to the queue.
    """
    measured = planned.profile is not None and not planned.profile.is_estimate
    return measured and planned.node_count == 1 and job.task_count == planned.gpu_count
