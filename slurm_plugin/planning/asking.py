"""Asks the policy, and tells what of its answer can be done now. Pure.

Most policies name groups. Some give out GPUs one by one, and their sharers become groups here: Slurm gives a job's GPUs
to no other job. A job that others may join therefore starts behind a pilot job, as a group of one, and a later job
joins it on exactly the same GPUs (`whole_sets_only`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from muri.policies.cycle.validation import RequestError
from muri.policies.siblings.packed import mem_gib_of
from muri.policies.types import (
    Group,
    NodeShare,
    Plan,
    PlanJob,
    PlanRequest,
    Policy,
    Reason,
    Sharer,
    Solo,
    Waiting,
    waited_s,
)
from muri.slurm_plugin.planning.gathered import Gathered
from muri.slurm_plugin.planning.request import Preparation
from muri.slurm_plugin.planning.running import (
    grouping_request,
    kind_of,
    sharing_request,
    why_no_room,
    why_not_preemptible,
)
from muri.slurm_plugin.records.roles import Role, RunningGroup, View

log = logging.getLogger("muri.controller")

Place = tuple[str, int]

_PARTLY = Reason(
    "the plan puts it on GPUs that running jobs hold only in part or in several sets; on Slurm it can only join one "
    "running job, on just the same GPUs"
)

_UNMEASURED = Reason("its model has no profile yet; its script must not run beside its own dry run")


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan, split into what can be done now."""

    plan: Plan  # Starts that need no running job to stop first
    # Running jobs that have to stop, with the reasons; what was planned for their GPUs is planned anew when these are
    # free
    stops: tuple[Waiting, ...]
    joins: tuple[Group, ...] = ()  # Jobs that join what runs where the plan gives out GPUs one by one
    # Micro-batches, and the GPU memory (GiB) that they take, of jobs that split their batches, by job id
    split: Mapping[int, tuple[int, float]] = field(default_factory=dict)


def ask(policy: Policy, preparation: Preparation) -> tuple[Settled, Preparation]:
    """Return what can be done of a policy's plan, and the preparation with the request, which includes what runs."""
    settled: Callable[[Plan, PlanRequest], Settled]
    if policy.supports_packing:
        request, settled = sharing_request(preparation), partial(_settle_sharers, preparation=preparation)
    else:
        request, settled = grouping_request(preparation, policy), settle
    try:
        plan = policy.plan(request)
    except RequestError as error:
        if not request.running:
            raise
        log.warning("running jobs are left alone in this cycle: %s", error)
        request = replace(request, running=())
        plan = policy.plan(request)
    return settled(plan, request), replace(preparation, request=request)


def _settle_sharers(plan: Plan, request: PlanRequest, preparation: Preparation) -> Settled:
    """Return what can be done now of a plan that gives out GPUs one by one, with groups in place of sharers."""
    at_work = {job.job_id: job for unit in request.running for job in unit.members}
    jobs = {job.job_id: job for job in request.jobs}
    # Stops of jobs that are not preemptible are ignored: the plan may be of a site's own policy.
    stops = tuple(
        item for item in plan.waiting if item.preempted and item.job_id in at_work and at_work[item.job_id].preemptible
    )
    new = _NewSharers(request, preparation.cycle, {item.job_id for item in stops})
    for sharer in plan.sharers:
        if sharer.job_id not in at_work:
            new.add(sharer, jobs[sharer.job_id])
    waiting = [item for item in plan.waiting if item.job_id not in at_work]
    solo = (*(item for item in plan.solo if item.job_id not in at_work), *new.solo)
    done = replace(plan, groups=tuple(new.groups), solo=solo, waiting=(*waiting, *new.waiting), sharers=())
    return Settled(done, stops, tuple(new.joins), new.split)


class _NewSharers:
    """Turns the new sharers of a plan into groups, joins and jobs alone.

    The GPUs of running jobs that have to stop (`stopping`) have no room for others until they have.
    """

    def __init__(self, request: PlanRequest, cycle: Gathered, stopping: AbstractSet[int]) -> None:
        self._cycle = cycle
        self._stopping = stopping
        self.groups: list[Group] = []
        self.solo: list[Solo] = []
        self.waiting: list[Waiting] = []
        self.joins: list[Group] = []
        self.split: dict[int, tuple[int, float]] = {}
        self._starting: set[int] = set()
        self._joined: set[int] = set()
        self._holders: dict[frozenset[Place], int] = {}
        self._held: dict[Place, int] = {}
        for unit in request.running:
            self._hold(unit.members[0].job_id, _places(unit.gpus))

    def add(self, sharer: Sharer, job: PlanJob) -> None:
        """Decide what becomes of a sharer."""
        if sharer.accumulate_steps > 1:
            self.split[sharer.job_id] = sharer.accumulate_steps, mem_gib_of(job, sharer.accumulate_steps)
        places = _places(sharer.gpus)
        met = {self._held[place] for place in places if place in self._held}
        if not met:
            self._start(sharer, job)
            self._hold(sharer.job_id, places)
            return
        group = self._cycle.view.group_of.get(self._holders.get(places, 0))
        if group is not None and group.pilot.job_id not in self._joined:
            self._join(sharer, group)
        elif met & self._starting:
            why = Reason("it will join job {} once that one runs", (min(met),))
            self.waiting.append(Waiting(sharer.job_id, (why,)))
        else:
            self.waiting.append(Waiting(sharer.job_id, (_PARTLY,)))

    def _hold(self, job_id: int, places: frozenset[Place]) -> None:
        self._holders.setdefault(places, job_id)
        self._held |= {place: self._held.get(place, job_id) for place in places}

    def _start(self, sharer: Sharer, job: PlanJob) -> None:
        max_wait_s = self._cycle.config.grouping.max_wait_s
        if job.groupable and job.profile is None and waited_s(job, self._cycle.now_s) <= max_wait_s:
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

    def _join(self, sharer: Sharer, group: RunningGroup) -> None:
        job, met = self._cycle.view.jobs[sharer.job_id], tuple(member.job_id for member in group.members)
        why = why_no_room(job, group, self._cycle)
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


def settle(plan: Plan, request: PlanRequest) -> Settled:
    """Take out of a plan what runs already, and what has to wait until running jobs have stopped.

    Stops of jobs that are not preemptible are ignored: the plan may be of a site's own policy.
    """
    jobs = {job.job_id: job for unit in request.running for job in unit.members}
    at_work = jobs.keys()
    joins = [group for group in plan.groups if group.joining]
    starts = [group for group in plan.groups if not group.joining]
    stops = [item for item in plan.waiting if item.job_id in at_work and item.preempted]
    for group in starts:
        stops += [Waiting(job, group.reasons, True) for job in group.members if job in at_work and not group.kept]
    for group in joins:
        # A job that is to move from one group to another joins it once it waits.
        stops += [Waiting(job, group.reasons, True) for job in group.joining if job in at_work]
    stops += [
        Waiting(solo.job_id, solo.reasons, True) for solo in plan.solo if solo.job_id in at_work and not solo.kept
    ]
    free = {node.name: node.free_gpus for node in request.nodes}
    open_units = {frozenset(job.job_id for job in unit.members): unit.gpus for unit in request.running if unit.joinable}
    groups = []
    for group in joins:
        # Those that they come to must run together, be open to others, and hold just the group's GPUs.
        met = frozenset(group.members).difference(group.joining)
        joining = tuple(job for job in group.joining if job not in at_work)
        if joining and open_units.get(met) == group.gpus:
            members = tuple(job for job in group.members if job in met or job in joining)
            groups.append(replace(group, members=members, joining=joining))
    groups += [group for group in starts if at_work.isdisjoint(group.members) and _fits(group, free)]
    solo = [item for item in plan.solo if item.job_id not in at_work and _fits(item, free)]
    settled = {job for group in groups for job in group.members} | {item.job_id for item in solo} | at_work
    closed = {job_id: why for unit in request.running for job_id, why in unit.closed_to.items()}
    waiting = [
        replace(item, reasons=(*item.reasons, Reason("it cannot join what runs: {}", (closed[item.job_id],))))
        if item.job_id in closed
        else item
        for item in plan.waiting
        if item.job_id not in at_work
    ]
    for group in plan.groups:
        waiting += [Waiting(job, group.reasons) for job in group.members if job not in settled]
    waiting += [Waiting(item.job_id, item.reasons) for item in plan.solo if item.job_id not in settled]
    done = replace(plan, groups=tuple(groups), solo=tuple(solo), waiting=tuple(waiting))
    return Settled(done, tuple(item for item in stops if jobs[item.job_id].preemptible))


def _fits(item: Group | Solo, free: dict[str, int]) -> bool:
    """Take a start's GPUs out of what is free now; False when running jobs still hold them."""
    if any(share.gpu_count > free.get(share.node, 0) for share in item.gpus):
        return False
    for share in item.gpus:
        free[share.node] -= share.gpu_count
    return True


ASK_AGAIN_S: Final = 300.0
"""Who could move is asked for no more often: it takes a plan of the whole queue."""

Moves = Mapping[int, tuple[int, ...]]
"""Those whose GPUs a running job could move to, by the running job's id."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Which running jobs could move, as a plan showed some time ago."""

    asked_s: float = 0.0  # Seconds since the epoch
    moves: Moves = field(default_factory=dict)

    def is_recent(self, now_s: float) -> bool:
        """Whether there is no need to ask again."""
        return 0 <= now_s - self.asked_s < ASK_AGAIN_S

    def notes(self, view: View) -> dict[int, str]:
        """Return what to tell running jobs, by job id, as long as all whose move it is about still run."""
        return {
            job_id: f"it has a checkpoint and could move to the GPUs of job {', '.join(map(str, others))}, which would "
            "free its own: preemption.enabled in muri.yaml lets Muri do that"
            for job_id, others in self.moves.items()
            if {job_id, *others} <= view.group_of.keys()
        }


def proposed_moves(request: PlanRequest, view: View, restart_s: float, stopping: Callable[[], Policy]) -> Moves:
    """Return where running jobs would move if they might be stopped.

    Only jobs whose users agreed to be stopped, and whose scripts have declared a checkpoint in this run, are told.
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
    if policy.supports_packing:
        return {}
    return {
        job_id: tuple(other for other in group.members if other not in group.joining)
        for group in policy.plan(replace(request, running=running)).groups
        for job_id in movable.intersection(group.joining)
    }
