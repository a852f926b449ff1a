"""The cycle that all queue policies share: rank, select, group, place, explain."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import Final

from muri.inherited import garbage_collector_paused
from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import DecisionWriter, SlurmQueue
from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.cycle.placing import Placement, Unit, first_places, place, unit_of
from muri.policies.cycle.queue import Bucket, Choice, Contender, Members, Queue, Selection, line_up, pools, select
from muri.policies.cycle.regrouping import Grouper, Grouping, Task, is_open
from muri.policies.cycle.validation import check_request
from muri.policies.lockstep import speed_model
from muri.policies.options import PolicyOptions
from muri.policies.speed import SpeedModel
from muri.policies.types import Certificate, FreeNode, Plan, PlanRequest, PriorityKey, Reason, Waiting, may_share_gpus

JOINERS_PER_SEAT: Final = 4  # Waiting jobs that are considered for each free place in running units


@garbage_collector_paused()
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
    options = replace(options, max_group_size=min(options.max_group_size, request.max_group_size))
    queue = line_up(request, key, options)
    model = model or speed_model(options.speed_model, ordering=options.ordering, table=request.interference)
    memory_gib = {node.name: node.gpu_mem_gib or float("inf") for node in request.nodes}
    grouper = Grouper(
        options, model, queue.shapes, request.interval_s, lambda unit: min(memory_gib[g.node] for g in unit.gpus)
    )
    sharing = options.max_group_size > 1
    writer = DecisionWriter(grouper.forecasts, queue.shapes, sharing=sharing, explained=request.explained)
    planners = _planners(request, queue, options, writer, in_order=in_order)
    # All buckets of all pools at once: the speed model evaluates many groups in one call.
    tasks = [planner.tasks() for planner in planners]
    groupings = grouper.group([task for of_pool in tasks for task in of_pool])
    answers = iter(groupings)
    for planner, of_pool in zip(planners, tasks, strict=True):
        planner.decide([next(answers) for _ in of_pool])
    rank = {contender.job.job_id: contender.rank for contender in queue.contenders}
    proofs = [grouping.certificate for grouping in groupings]
    return Plan(
        policy=policy,
        groups=tuple(writer.groups),
        solo=tuple(sorted(writer.solo, key=lambda item: rank.get(item.job_id, -1))),
        waiting=tuple(sorted(writer.waiting, key=lambda item: rank[item.job_id])),
        certificate=Certificate(sum(proof.value for proof in proofs), sum(proof.upper_bound for proof in proofs)),
    )


def _planners(
    request: PlanRequest, queue: Queue, options: PolicyOptions, writer: DecisionWriter, *, in_order: bool
) -> list["_PoolPlanner"]:
    """A planner for each pool, with its nodes and jobs, in the order of `pools`."""
    nodes: dict[frozenset[str], list[FreeNode]] = {pool: [] for pool in pools(request)}
    pool_of = {partition: pool for pool in nodes for partition in pool}
    for node in request.nodes:
        # All partitions of a node are in one pool.
        for partition in node.partitions[:1]:
            nodes[pool_of[partition]].append(node)
    planners = {
        pool: _PoolPlanner(of_pool, request, options, writer, in_order=in_order) for pool, of_pool in nodes.items()
    }
    for contender in queue.contenders:
        planners[pool_of[contender.bucket.partition]].contenders.append(contender)
    for members in queue.fixed:
        planners[pool_of[members[0].bucket.partition]].fixed.append(members)
    return list(planners.values())


class _PoolPlanner:
    """Plans one set of partitions that shares no node with the others."""

    def __init__(
        self,
        nodes: Sequence[FreeNode],
        request: PlanRequest,
        options: PolicyOptions,
        writer: DecisionWriter,
        *,
        in_order: bool,
    ) -> None:
        self.contenders: list[Contender] = []
        self.fixed: list[Members] = []
        self._nodes, self._options, self._writer, self._in_order = nodes, options, writer, in_order
        self._sharing = options.max_group_size > 1
        self._free = FreeGpus(nodes, whole_nodes=request.larger_than_a_node != "slurm")
        self._slurm = SlurmQueue(request, self._free, options.max_wait_s, writer.solo, self._free.set_aside)
        self._kept: dict[str, Contender] = {}
        self._held: set[int] = set()
        self._selection = Selection((), {}, complete=True)

    def tasks(self) -> list[Task]:
        """Select jobs, and return the buckets to be grouped."""
        takes_larger = self._slurm.takes_larger
        self.contenders = [item for item in self.contenders if item.unit is not None or not takes_larger(item.job)]
        if self._sharing:
            self._held = {
                item.rank
                for item in self.contenders
                if item.unit is None and item.job.profile is None and item.job.may_share
            }
        for unit in {id(item.unit): item.unit for item in self.contenders if item.unit is not None}.values():
            self._free.give_back(unit.gpus)
        eligible = self.contenders
        if self._held:
            eligible = [contender for contender in eligible if contender.rank not in self._held]
        open_units = [members for members in self.fixed if is_open(members, self._options)]
        if self.fixed and self._options.join and self._sharing and not self._in_order:
            eligible = self._with_first_places(eligible, open_units)
        self._writer.partners.update([contender.bucket for contender in eligible if contender.shape is not None])
        self._selection = select(eligible, self._free, self._options.max_group_size)
        memory_gib = cache(self._free.largest_memory_gib)
        return [
            Task(tuple(choice.members), choice.slots, memory_gib(bucket.partition, bucket.gpu_count), tuple(units))
            for bucket, choice, units in self._considered(eligible, open_units)
        ]

    def _with_first_places(self, eligible: list[Contender], open_units: Sequence[Members]) -> list[Contender]:
        """The jobs in the order in which they get GPUs; nodes that are kept for some of them take no others."""
        left_s = self._writer.left_s
        starts, self._kept = first_places(eligible, open_units, self.fixed, self._nodes, self._free, left_s)
        for node in self._kept:
            self._free.take_on(node, self._free.on_node(node))
        first = {contender.rank for contender in starts}
        return [*starts, *(contender for contender in eligible if contender.rank not in first)]

    def _considered(
        self, eligible: Sequence[Contender], open_units: Sequence[Members]
    ) -> list[tuple[Bucket, Choice, list[Members]]]:
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
        return [(bucket, choice, open_to.get(bucket, [])) for bucket, choice in sorted(chosen.items())]

    def decide(self, groupings: Iterable[Grouping]) -> None:
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
            ranks = {member.rank for unit in units for member in unit.members} | self._held | started
            others = [_single(item) for item in self.contenders if item.unit is None and item.rank not in ranks]
            units = _without_hopeless_groups([*units, *self._going_on(units, others, started), *others], self._free)
        shared = any(len(unit.members) > 1 for unit in units)
        self._writer.room_for_all = self._selection.room_for_all and not shared
        for placement in place(units, self._free):
            self._writer.start(placement)
            started.update([member.rank for member in placement.unit.members])
        self._backfill(started)
        self._keep_waiting(started, left_out)

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
            if unit.runs is not None:
                if free.are_free(unit.stays_on):
                    free.take_exactly(unit.stays_on)
                    going_on.append(unit)
            elif unit.needs not in full and free.take(*unit.needs) is None:
                full.add(unit.needs)
        return going_on

    def _backfill(self, started: set[int]) -> None:
        """Start jobs alone that still fit, such as members of groups that did not fit."""
        if not self._free.everywhere() and not self._slurm.is_there:
            return
        running = self._running_units()
        full: set[tuple[str, int, int]] = set()
        for contender in self.contenders:
            if contender.rank in started or contender.rank in self._held:
                continue
            if contender.unit is not None and self._stay(running[id(contender.unit)], started):
                continue
            gpus = None if contender.bucket.size in full else self._slurm.gpus_alone(contender.job)
            if gpus is None:
                full.add(contender.bucket.size)
            else:
                self._writer.start_alone(contender, gpus, notes=_why_again(contender))
                started.add(contender.rank)

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
        """Give reasons to waiting jobs, and overdue ones to Slurm; `left_out`: other jobs considered, by rank."""
        left = [contender for contender in self.contenders if contender.rank not in started]
        if self._slurm.is_there:
            left = [item for item in left if item.unit is not None or not self._slurm.takes_overdue(item.job)]
        why = self._why_waiting(left, left_out) if self._writer.explained else repeat(())
        self._writer.waiting += [
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
                why = [reasons.preempted(job)] if contender.unit is not None else []
                why.append(why_waiting.of(job))
                if rank in kept_for:
                    why.append(reasons.kept_free(kept_for[rank]))
                if left_out.get(rank):
                    why.append(reasons.no_group_worth_it(left_out[rank]))
                yield tuple(why)
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
