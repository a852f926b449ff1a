"""Asks the policy, and tells what of its answer can be done now. Pure.

Most policies name groups. Some give out GPUs one by one, and their sharers become groups here: Slurm gives a job's GPUs
to no other job. A job that others may join therefore starts behind a pilot job, as a group of one, and a later job
joins it on exactly the same GPUs (`whole_sets_only`).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from muri.policies.cycle.packed import mem_gib_of
from muri.policies.cycle.validation import RequestError
from muri.policies.traits import BatchModel
from muri.policies.types import (
    FreeNode,
    Group,
    NodeShare,
    Plan,
    PlanJob,
    PlanRequest,
    Policy,
    Reason,
    Running,
    Sharer,
    Solo,
    Waiting,
    waited_s,
)
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.joins import has_a_task_per_gpu, why_no_room, with_closed_units
from muri.slurm_plugin.planning.model_traits import batch_model, interference_table, with_measured_pairs
from muri.slurm_plugin.planning.placement import Places
from muri.slurm_plugin.planning.request import Preparation
from muri.slurm_plugin.planning.running import NO_JOINING, Settled, may_join, running_units, settle, with_running
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.records.roles import RunningGroup, View

log = logging.getLogger("muri.controller")

Place = tuple[str, int]

_PARTLY = Reason(
    "the plan puts it on GPUs that running jobs hold only in part or in several sets; on Slurm it can only join one "
    "running job, on just the same GPUs"
)
_NO_RANKS = "it has several GPUs: who shares these is on one node, has a task for each, and was measured on as many"
_UNMEASURED = Reason("its model has no profile yet; its script must not run beside its own dry run")


def ask(policy: Policy, preparation: Preparation) -> tuple[Settled, Preparation]:
    """Ask the policy; its request includes what runs.

    Returns:
        What can be done of its plan, and the preparation with the request that it was asked.
    """
    cycle, room = preparation.cycle, preparation.room
    if policy.supports_packing:
        request = sharing_request(preparation.request, cycle, room)
    else:
        request = with_closed_units(with_running(preparation), cycle, room)
        request = with_measured_pairs(request, policy, cycle.knowledge.traits.pairs)
    try:
        plan = policy.plan(request)
    except RequestError as error:
        if not request.running:
            raise
        log.warning("running jobs are left alone in this cycle: %s", error)
        request = replace(request, running=())
        plan = policy.plan(request)
    settled = settle_sharers(plan, request, cycle, room.places) if policy.supports_packing else settle(plan, request)
    return settled, replace(preparation, request=request)


def settle_sharers(plan: Plan, request: PlanRequest, cycle: CycleInput, places: Places) -> Settled:
    """Return what a plan with sharers means on Slurm.

    Args:
        plan: The policy's answer.
        request: What it was asked, by `sharing_request`.
        cycle: What the cycle decides on.
        places: Where jobs may run.
    """
    at_work = {job.job_id: job for unit in request.running for job in unit.members}
    jobs = {job.job_id: job for job in request.jobs}
    # Nobody is stopped who must not be, whatever the plan says: it may be of a site's own policy.
    stops = tuple(
        item for item in plan.waiting if item.preempted and item.job_id in at_work and at_work[item.job_id].preemptible
    )
    outcome = PlacementOutcome(request, cycle.view.group_of, places, {item.job_id for item in stops})
    for sharer in plan.sharers:
        if sharer.job_id not in at_work:
            outcome.add(sharer, jobs[sharer.job_id], cycle)
    waiting = [item for item in plan.waiting if item.job_id not in at_work]
    solo = (*(item for item in plan.solo if item.job_id not in at_work), *outcome.solo)
    done = replace(plan, groups=tuple(outcome.groups), solo=solo, waiting=(*waiting, *outcome.waiting), sharers=())
    return Settled(done, stops, tuple(outcome.joins), outcome.split)


class PlacementOutcome:
    """The new sharers of a plan by what they become.

    Args:
        request: What the policy was asked.
        groups: The running group of each member.
        places: Where jobs may run.
        stopping: Running jobs that have to stop; until they have, their GPUs have no room for others.
    """

    def __init__(
        self,
        request: PlanRequest,
        groups: Mapping[int, RunningGroup],
        places: Places,
        stopping: AbstractSet[int] = frozenset(),
    ) -> None:
        self._places = places
        self._stopping = stopping
        self.groups: list[Group] = []
        self.solo: list[Solo] = []
        self.waiting: list[Waiting] = []
        self.joins: list[Group] = []
        self.split: dict[int, tuple[int, float]] = {}
        self._running_groups = groups
        self._starting: set[int] = set()
        self._joined: set[int] = set()
        self._holders: dict[frozenset[Place], int] = {}
        self._held: dict[Place, int] = {}
        for unit in request.running:
            self._hold(unit.members[0].job_id, _places(unit.gpus))

    def add(self, sharer: Sharer, job: PlanJob, cycle: CycleInput) -> None:
        """Decide what becomes of a sharer."""
        if sharer.accumulate_steps > 1:
            self.split[sharer.job_id] = sharer.accumulate_steps, mem_gib_of(job, sharer.accumulate_steps)
        places = _places(sharer.gpus)
        met = {self._held[place] for place in places if place in self._held}
        if not met:
            self._start(sharer, job, cycle)
            self._hold(sharer.job_id, places)
            return
        group = self._running_groups.get(self._holders.get(places, 0))
        if group is not None and group.pilot.job_id not in self._joined:
            self._join(sharer, group, cycle)
        elif met & self._starting:
            why = Reason("it will join job {} once that one runs", (min(met),))
            self.waiting.append(Waiting(sharer.job_id, (why,)))
        else:
            self.waiting.append(Waiting(sharer.job_id, (_PARTLY,)))

    def _hold(self, job_id: int, places: frozenset[Place]) -> None:
        self._holders.setdefault(places, job_id)
        self._held |= {place: self._held.get(place, job_id) for place in places}

    def _start(self, sharer: Sharer, job: PlanJob, cycle: CycleInput) -> None:
        if job.groupable and job.profile is None and waited_s(job, cycle.now_s) <= cycle.config.grouping.max_wait_s:
            self.waiting.append(Waiting(sharer.job_id, (_UNMEASURED,)))
            return
        if not job.groupable or job.profile is None:
            self.solo.append(Solo(sharer.job_id, sharer.reasons, sharer.gpus))
            return
        speed, period_s = {sharer.job_id: sharer.speed}, job.profile.iteration_s
        self._starting.add(sharer.job_id)
        self.groups.append(
            # A job that joins takes turns with it: the figures of pairs may be estimates here.
            Group((sharer.job_id,), sharer.gpus, job.gpu_count, period_s, 1.0, speed, sharer.reasons)
        )

    def _join(self, sharer: Sharer, group: RunningGroup, cycle: CycleInput) -> None:
        job, met = cycle.view.jobs[sharer.job_id], tuple(member.job_id for member in group.members)
        why = why_no_room(job, group, cycle.config, cycle.node_index, self._places)
        if not why and not self._stopping.isdisjoint(met):
            why = "a member of the group is about to stop"
        if why:
            self.waiting.append(Waiting(sharer.job_id, (*sharer.reasons, Reason("it cannot join yet: {}", (why,)))))
            return
        self._joined.add(group.pilot.job_id)
        speed, joining = {sharer.job_id: sharer.speed}, (sharer.job_id,)
        self.joins.append(
            Group((*met, sharer.job_id), sharer.gpus, job.gpu_count, 0.0, 1.0, speed, sharer.reasons, joining=joining)
        )


def _places(gpus: tuple[NodeShare, ...]) -> frozenset[Place]:
    return frozenset((share.node, gpu_id) for share in gpus for gpu_id in share.gpu_ids)


_NO_PILOT = "it runs without a pilot job, so that no job can join it"


def sharing_request(request: PlanRequest, cycle: CycleInput, room: SiteRoom) -> PlanRequest:
    """Return the request as policies that give out GPUs one by one expect it.

    Args:
        request: For policies that group.
        cycle: What the cycle decides on.
        room: Where jobs may run, and how long.
    """
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
