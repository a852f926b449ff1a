"""The cycle that all queue policies share: rank, select, group, place, explain."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import Final

from muri.inherited import garbage_collector_paused
from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import Decisions, DecisionWriter, SlurmQueue
from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.cycle.placing import MemoryOf, Placement, Unit, first_places, place, unit_of
from muri.policies.cycle.queue import Bucket, Choice, Contender, Members, Queue, Selection, line_up, pools, select
from muri.policies.cycle.regrouping import Forecasts, Grouper, Grouping, Task, is_open
from muri.policies.cycle.validation import check_request
from muri.policies.options import PolicyOptions
from muri.policies.speed.model import SpeedModel
from muri.policies.speed.registry import speed_model
from muri.policies.types import (
    Certificate,
    FreeNode,
    Plan,
    PlanRequest,
    PriorityKey,
    Reason,
    Solo,
    Waiting,
    may_share_gpus,
)

JOINERS_PER_SEAT: Final = 4  # Waiting jobs that are considered for each free place in running units


def plan_queue(
    request: PlanRequest,
    policy: str,
    key: PriorityKey,
    options: PolicyOptions,
    model: SpeedModel | None = None,
    *,
    in_order: bool = False,
) -> Plan:
    """Decide on every job of a request, waiting or running.

    No job waits forever: one that would still wait longer than `max_wait_s` is given to Slurm's own queue; without one
    behind the plan (`larger_than_a_node` is not "slurm"), it goes ahead of all others.

    Args:
        request: Jobs, nodes and time.
        policy: Name to put on the plan.
        key: Order of priority.
        options: Grouping options; the request may limit the group size further.
        model: Speed model; None: as the options say.
        in_order: Whether a job that no group takes in, or whose group finds no place, gets GPUs of its own ahead of all
            less urgent jobs. Otherwise it gets GPUs that they leave over.

    Raises:
        RequestError: The request contradicts itself.
    """
    check_request(request)
    with garbage_collector_paused():
        return _planned(request, policy, key, options, model, in_order=in_order)


def _planned(
    request: PlanRequest,
    policy: str,
    key: PriorityKey,
    options: PolicyOptions,
    model: SpeedModel | None,
    *,
    in_order: bool,
) -> Plan:
    if request.max_group_size < options.max_group_size:
        options = replace(options, max_group_size=request.max_group_size)
    queue = line_up(request, key, options)
    model = model or speed_model(options.speed_model, ordering=options.ordering, table=request.interference)
    grouper = Grouper(options, model, queue.shapes, request.interval_s, _memory_of(request.nodes))
    nodes = _by_pool(request)
    planners = [
        _PoolPlanner(pool, of_pool, request, options, grouper.forecasts, queue, in_order=in_order)
        for pool, of_pool in nodes.items()
    ]
    _deal(queue, planners)
    # All buckets of all pools at once: the speed model evaluates many groups in one call.
    tasks = [planner.tasks() for planner in planners]
    answers = iter(grouper.group([task for of_pool in tasks for task in of_pool]))
    groupings = [[next(answers) for _ in of_pool] for of_pool in tasks]
    decisions = [planner.decide(answer) for planner, answer in zip(planners, groupings, strict=True)]
    certificate = Certificate.total(grouping.certificate for of_pool in groupings for grouping in of_pool)
    return _plan(policy, queue, decisions, certificate)


def _memory_of(nodes: Iterable[FreeNode]) -> MemoryOf:
    """Return the smallest GPU memory among a running unit's nodes, infinite when unknown."""
    memory_gib = {node.name: node.gpu_mem_gib or float("inf") for node in nodes}
    return lambda unit: min(memory_gib[share.node] for share in unit.gpus)


def _by_pool(request: PlanRequest) -> dict[frozenset[str], list[FreeNode]]:
    """The nodes of each set of partitions that is planned by itself, in the order of `pools`."""
    nodes: dict[frozenset[str], list[FreeNode]] = {pool: [] for pool in pools(request)}
    pool_of = {partition: pool for pool in nodes for partition in pool}
    for node in request.nodes:
        # All partitions of a node are in one pool.
        for partition in node.partitions[:1]:
            nodes[pool_of[partition]].append(node)
    return nodes


def _deal(queue: Queue, planners: Iterable["_PoolPlanner"]) -> None:
    """Give every job to the planner of its pool."""
    of_partition = {partition: planner for planner in planners for partition in planner.pool}
    for contender in queue.contenders:
        of_partition[contender.bucket.partition].contenders.append(contender)
    for members in queue.fixed:
        of_partition[members[0].bucket.partition].fixed.append(members)


def _plan(policy: str, queue: Queue, decisions: Sequence[Decisions], certificate: Certificate) -> Plan:
    rank = {contender.job.job_id: contender.rank for contender in queue.contenders}

    def by_rank(item: Solo | Waiting) -> int:
        return rank.get(item.job_id, -1)

    return Plan(
        policy=policy,
        groups=tuple(group for part in decisions for group in part.groups),
        solo=tuple(sorted((item for part in decisions for item in part.solo), key=by_rank)),
        waiting=tuple(sorted((item for part in decisions for item in part.waiting), key=by_rank)),
        certificate=certificate,
    )


class _PoolPlanner:
    """Plans one set of partitions that shares no node with the others."""

    def __init__(
        self,
        pool: frozenset[str],
        nodes: Sequence[FreeNode],
        request: PlanRequest,
        options: PolicyOptions,
        forecasts: Forecasts,
        queue: Queue,
        *,
        in_order: bool,
    ) -> None:
        self.pool = pool
        self._nodes, self._in_order = nodes, in_order
        self._kept: dict[str, Contender] = {}
        self.contenders: list[Contender] = []
        self.fixed: list[Members] = []
        self._options = options
        self._sharing = options.max_group_size > 1
        self._free = FreeGpus(nodes, whole_nodes=request.larger_than_a_node != "slurm")
        self._partners: Counter[Bucket] = Counter()
        self._writer = DecisionWriter(
            forecasts, queue.shapes, self._partners, sharing=self._sharing, explained=request.explained
        )
        released = self._writer.decisions.solo
        self._slurm = SlurmQueue(request, self._free, options.max_wait_s, released, self._free.set_aside)
        self._memory_gib = cache(self._free.largest_memory_gib)
        self._held: set[int] = set()
        self._selection = Selection((), {}, complete=True)

    def tasks(self) -> list[Task]:
        """Select jobs, and return the buckets to be grouped."""
        self.contenders = self._set_aside()
        for unit in {id(item.unit): item.unit for item in self.contenders if item.unit is not None}.values():
            self._free.give_back(unit.gpus)
        eligible = self.contenders
        if self._held:
            eligible = [contender for contender in eligible if contender.rank not in self._held]
        open_units = [members for members in self.fixed if is_open(members, self._options)]
        if self.fixed and self._options.join and self._sharing and not self._in_order:
            eligible = self._with_first_places(eligible, open_units)
        self._partners.update([contender.bucket for contender in eligible if contender.shape is not None])
        self._selection = select(eligible, self._free, self._options.max_group_size)
        return [self._task(bucket, *found) for bucket, found in self._considered(eligible, open_units)]

    def _task(self, bucket: Bucket, choice: Choice, open_units: list[Members]) -> Task:
        memory_gib = self._memory_gib(bucket.partition, bucket.gpu_count)
        return Task(tuple(choice.members), choice.slots, memory_gib, tuple(open_units))

    def _with_first_places(self, eligible: list[Contender], open_units: Sequence[Members]) -> list[Contender]:
        """The jobs in the order in which they get GPUs; nodes that are kept for some of them take no others."""
        found = first_places(eligible, open_units, self.fixed, self._nodes, self._free, self._writer.left_s)
        for node, contender in found.kept:
            self._kept[node] = contender
            self._free.take_on(node, self._free.on_node(node))
        first = {contender.rank for contender in found.starts}
        return [*found.starts, *(contender for contender in eligible if contender.rank not in first)]

    def _considered(
        self, eligible: Sequence[Contender], open_units: Sequence[Members]
    ) -> list[tuple[Bucket, tuple[Choice, list[Members]]]]:
        """The buckets to be grouped: the selected jobs, and those that could join running units."""
        open_to: dict[Bucket, list[Members]] = {}
        for members in open_units:
            unit = members[0].unit
            if unit is not None and not any(share.node in self._kept for share in unit.gpus):
                open_to.setdefault(members[0].bucket, []).append(members)
        waiting: dict[Bucket, list[Contender]] = {}
        for contender in eligible:
            if contender.unit is None and contender.shape is not None and contender.bucket in open_to:
                waiting.setdefault(contender.bucket, []).append(contender)
        chosen = self._selection.buckets
        for bucket in sorted(waiting):
            seats = sum(self._options.max_group_size - len(members) for members in open_to[bucket])
            choice = chosen.get(bucket, Choice())
            chosen[bucket] = choice.with_joiners(waiting[bucket], JOINERS_PER_SEAT * seats)
        return [(bucket, (choice, open_to.get(bucket, []))) for bucket, choice in sorted(chosen.items())]

    def decide(self, groupings: Iterable[Grouping]) -> Decisions:
        """Place the groups and the other selected jobs; give reasons for the rest."""
        units = [_single(contender) for contender in self._selection.alone]
        left_out: dict[int, int] = {}
        joined: list[Unit] = []
        for grouping in groupings:
            units += grouping.units
            joined += grouping.joined
            considered = sum(len(unit.members) for unit in (*grouping.units, *grouping.joined)) + len(grouping.left)
            left_out |= {contender.rank: considered - 1 for contender in grouping.left}
        started = self._join(joined)
        if self._in_order:
            others = self._others(units, started)
            units = _without_hopeless_groups([*units, *self._going_on(units, others, started), *others], self._free)
        shared = any(len(unit.members) > 1 for unit in units)
        self._writer.room_for_all = self._selection.room_for_all and not shared
        for placement in place(units, self._free):
            self._writer.start(placement)
            started.update([member.rank for member in placement.unit.members])
        self._backfill(started)
        self._keep_waiting(started, left_out)
        return self._writer.decisions

    def _join(self, joined: Iterable[Unit]) -> set[int]:
        """Write down running units that are not up for decision; return the ranks of the jobs that join them."""
        grown = {id(unit.runs): unit for unit in joined}
        started: set[int] = set()
        for members in self.fixed:
            unit = grown.get(id(members[0].unit))
            if unit is None:
                self._writer.keep_fixed(members)
            else:
                self._writer.start(Placement(unit, unit.stays_on))
                started.update([member.rank for member in unit.joining])
        return started

    def _others(self, units: Iterable[Unit], started: set[int]) -> list[Unit]:
        """The waiting jobs of no unit, each by itself."""
        ranks = {member.rank for unit in units for member in unit.members} | self._held | started
        return [_single(item) for item in self.contenders if item.unit is None and item.rank not in ranks]

    def _going_on(self, units: Sequence[Unit], others: Sequence[Unit], started: set[int]) -> list[Unit]:
        """Running units that continue without being selected: less urgent jobs must not get their GPUs.

        `others` are waiting jobs of no unit, `started` the ranks of the jobs that join units that are not up for
        decision.
        """
        chosen = {member.rank for unit in units for member in unit.members} | started
        running = [members for members in self._running_units().values() if chosen.isdisjoint(_ranks(members))]
        free = self._free.copy()
        for unit in units:
            if unit.runs is not None:
                free.take_exactly(unit.stays_on)
        new = [unit for unit in units if unit.runs is None]
        going_on: list[Unit] = []
        full: set[tuple[str, int, float, int]] = set()
        for unit in sorted([*map(unit_of, filter(self._may_stay, running)), *new, *others], key=lambda unit: unit.rank):
            needs = (unit.partition, unit.gpu_count, unit.gpu_mem_gib, unit.node_count)
            if unit.runs is not None:
                if free.are_free(unit.stays_on):
                    free.take_exactly(unit.stays_on)
                    going_on.append(unit)
            elif needs not in full and free.take(*needs) is None:
                full.add(needs)
        return going_on

    def _set_aside(self) -> list[Contender]:
        """Release jobs larger than a node to Slurm; hold jobs without a profile."""
        remaining = []
        for contender in self.contenders:
            job = contender.job
            if contender.unit is None:
                if self._slurm.takes_larger(job):
                    continue
                if self._sharing and job.profile is None and job.may_share:
                    self._held.add(contender.rank)
            remaining.append(contender)
        return remaining

    def _backfill(self, started: set[int]) -> None:
        """Start jobs alone that still fit, such as members of groups that did not fit."""
        if not self._free.everywhere() and not self._slurm.is_there:
            return
        running = self._running_units()
        full: set[tuple[str, int, int]] = set()
        for contender in self.contenders:
            rank, bucket = contender.rank, contender.bucket
            if rank in started or rank in self._held:
                continue
            if contender.unit is not None and self._stay(running[id(contender.unit)], started):
                continue
            size = (bucket.partition, bucket.gpu_count, bucket.node_count)
            gpus = None if size in full else self._slurm.gpus_alone(contender.job)
            if gpus is None:
                full.add(size)
            else:
                self._writer.start_alone(contender, gpus, notes=_why_again(contender))
                started.add(rank)

    def _running_units(self) -> dict[int, Members]:
        units: dict[int, list[Contender]] = {}
        for contender in self.contenders:
            if contender.unit is not None:
                units.setdefault(id(contender.unit), []).append(contender)
        return {key: tuple(members) for key, members in units.items()}

    def _stay(self, members: Members, started: set[int]) -> bool:
        """Leave a running unit where it is, if its GPUs and its members have not been given away."""
        unit = unit_of(members)
        taken = not started.isdisjoint(_ranks(members))
        if taken or not self._may_stay(members) or unit.runs is None or not self._free.are_free(unit.stays_on):
            return False
        self._free.take_exactly(unit.stays_on)
        self._writer.start(Placement(unit, unit.stays_on))
        started.update([member.rank for member in members])
        return True

    def _may_stay(self, members: Members) -> bool:
        """Whether a running unit may continue unchanged."""
        groupable = len(members) == 1 or all(member.shape is not None for member in members)
        fits = len(members) <= self._options.max_group_size and may_share_gpus([member.job for member in members])
        return groupable and fits

    def _keep_waiting(self, started: set[int], left_out: Mapping[int, int]) -> None:
        """Give reasons to the waiting jobs, and leave those to Slurm's queue that have waited too long.

        `left_out` has the number of other jobs that a job without a group was considered with, by rank.
        """
        left = [contender for contender in self.contenders if contender.rank not in started]
        if self._slurm.is_there:
            left = [item for item in left if item.unit is not None or not self._slurm.takes_overdue(item.job)]
        why = self._why_waiting(left, left_out) if self._writer.explained else repeat(())
        self._writer.decisions.waiting += [
            Waiting(contender.job.job_id, of_job, contender.unit is not None)
            for contender, of_job in zip(left, why, strict=False)
        ]

    def _why_waiting(self, left: Iterable[Contender], left_out: Mapping[int, int]) -> Iterator[tuple[Reason, ...]]:
        why_waiting = reasons.WaitingReasons(self._free, whole_nodes=not self._slurm.is_there)
        kept_for = {contender.rank: node for node, contender in self._kept.items()}
        for contender in left:
            rank, job = contender.rank, contender.job
            if rank in self._held:
                yield (reasons.NEEDS_PROFILE,)
            else:
                why: tuple[Reason, ...] = (why_waiting.of(job),)
                node = kept_for.get(rank)
                if node is not None:
                    why = (*why, reasons.kept_free(node))
                if left_out.get(rank):
                    why = (*why, reasons.no_group_worth_it(left_out[rank]))
                yield (reasons.preempted(job), *why) if contender.unit is not None else why
            why_waiting.count(job)


def _without_hopeless_groups(units: list[Unit], free: FreeGpus) -> list[Unit]:
    """The units with every group dissolved that would find no place, so that its members keep their turns."""
    for _ in range(len(units)):
        placed = {placement.unit.rank for placement in place(units, free.copy())}
        hopeless = [unit for unit in units if len(unit.members) > 1 and unit.rank not in placed]
        if not hopeless:
            break
        dissolved = {unit.rank for unit in hopeless}
        units = [unit for unit in units if unit.rank not in dissolved]
        units += [_single(member) for unit in hopeless for member in unit.members]
    return units


def _ranks(members: Members) -> set[int]:
    return {member.rank for member in members}


def _single(contender: Contender) -> Unit:
    unit = unit_of((contender,))
    return unit if unit.runs is not None else replace(unit, notes=_why_again(contender))


def _why_again(contender: Contender) -> tuple[Reason, ...]:
    """Why a running job restarts alone."""
    if contender.unit is None:
        return ()
    return (reasons.MOVED if len(contender.unit.members) == 1 else reasons.SPLIT_UP,)
