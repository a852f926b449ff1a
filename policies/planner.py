"""The cycle that all queue policies share: rank, select, group, place, explain."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from muri.policies import reasons
from muri.policies.grouping.algorithm1 import Bucket, GroupingRules, bucket_of, can_share, form_groups
from muri.policies.options import PolicyOptions
from muri.policies.placement import FreeGpus, Placement, fits, place
from muri.policies.priority import Candidate, PriorityKey, rank_jobs
from muri.policies.selection import pools, select
from muri.policies.types import Group, NodeShare, Plan, PlanJob, PlanRequest, Solo, Waiting
from muri.policies.validation import check_request


def plan_queue(request: PlanRequest, policy: str, key: PriorityKey, options: PolicyOptions) -> Plan:
    """Decide on every job of a request.

    Args:
        request: Jobs, nodes and time.
        policy: Name to put on the plan.
        key: Order of priority.
        options: Grouping options; a group is as large as both they and the request allow, and
            with a size of 1 nobody shares and no profile is needed.

    Raises:
        RequestError: The request contradicts itself.
    """
    check_request(request)
    size = min(options.max_group_size, request.max_group_size)
    ranked = rank_jobs(request.jobs, key)
    plans = [_PoolPlanner(pool, request, replace(options, max_group_size=size)).plan(ranked) for pool in pools(request)]
    rank = {candidate.job.job_id: candidate.rank for candidate in ranked}
    return Plan(
        policy=policy,
        groups=tuple(group for plan in plans for group in plan.groups),
        solo=tuple(sorted((solo for plan in plans for solo in plan.solo), key=lambda item: rank[item.job_id])),
        waiting=tuple(sorted((item for plan in plans for item in plan.waiting), key=lambda item: rank[item.job_id])),
    )


@dataclass
class _Decisions:
    """What has been decided so far for one pool."""

    groups: list[Group] = field(default_factory=list)
    solo: list[Solo] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


class _PoolPlanner:
    """Plans one set of partitions that shares no node with the others."""

    def __init__(self, pool: frozenset[str], request: PlanRequest, options: PolicyOptions) -> None:
        self._pool = pool
        self._request = request
        self._options = options
        self._sharing = options.max_group_size > 1
        self._free = FreeGpus(node for node in request.nodes if not pool.isdisjoint(node.partitions))
        self._decisions = _Decisions()
        self._partners: Counter[Bucket] = Counter()
        self._room_for_all = False

    def plan(self, ranked: Iterable[Candidate]) -> _Decisions:
        """Decide on the pool's jobs among the ranked ones."""
        mine = [candidate for candidate in ranked if candidate.job.partition in self._pool]
        held, contenders = self._set_aside(mine)
        self._partners.update(self._bucket(item.job) for item in contenders if can_share(item.job))
        selection = select(
            contenders,
            self._free,
            group_size=self._options.max_group_size,
            same_user=self._request.same_user,
        )
        units = form_groups(selection.chosen, self._rules())
        self._room_for_all = not selection.rest and not any(unit.is_group for unit in units)
        placed = place(units, self._free)
        self._free = placed.free
        for placement in placed.placements:
            self._start(placement)
        started = {member.rank for placement in placed.placements for member in placement.unit.members}
        left = [candidate for candidate in contenders if candidate.rank not in started]
        self._keep_waiting(held, self._backfill(left))
        return self._decisions

    def _set_aside(self, mine: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Release what is larger than a node; part jobs without a profile from the contenders."""
        held, contenders = [], []
        for candidate in mine:
            job = candidate.job
            largest = self._free.largest_node(job.partition)
            if largest is not None and job.gpu_count > largest:
                self._free.take_spanning(job.partition, job.gpu_count)
                self._decisions.solo.append(Solo(job.job_id, reasons.larger_than_a_node(job, largest)))
            elif self._sharing and job.groupable and job.profile is None:
                held.append(candidate)
            else:
                contenders.append(candidate)
        return held, contenders

    def _rules(self) -> GroupingRules:
        free = self._free
        return GroupingRules(
            options=self._options,
            same_user=self._request.same_user,
            memory_limit_gib=lambda bucket: free.largest_memory_gib(bucket.partition, bucket.gpu_count),
            fits=partial(fits, free=free),
        )

    def _start(self, placement: Placement) -> None:
        unit, node = placement
        if not unit.is_group:
            self._start_alone(unit.head, node)
            return
        interleaving = unit.interleaving(self._options)
        job_ids = [member.job.job_id for member in unit.members]
        self._decisions.groups.append(
            Group(
                members=tuple(job_ids[index] for index in interleaving.order),
                gpus=(NodeShare(node, unit.head.gpu_count),),
                gpu_count=unit.head.gpu_count,
                period_s=interleaving.period_s,
                efficiency=interleaving.efficiency,
                speed=dict(sorted(zip(job_ids, interleaving.speed, strict=True))),
                reasons=reasons.grouped(unit, interleaving, node),
            )
        )

    def _start_alone(self, job: PlanJob, node: str) -> None:
        partners = self._partners[self._bucket(job)] - 1
        why = reasons.alone(job, partners, sharing=self._sharing, room_for_all=self._room_for_all)
        self._decisions.solo.append(Solo(job.job_id, why, (NodeShare(node, job.gpu_count),) if node else ()))

    def _backfill(self, left: Iterable[Candidate]) -> list[Candidate]:
        """Start alone whatever still fits, members of groups that did not fit among them."""
        waiting = []
        for candidate in left:
            node = self._take_alone(candidate.job)
            if node is None:
                waiting.append(candidate)
            else:
                self._start_alone(candidate.job, node)
        return waiting

    def _take_alone(self, job: PlanJob) -> str | None:
        node = self._free.take(job.partition, job.gpu_count)
        if node is None and not job.groupable and self._free.largest_node(job.partition) is None:
            # Nobody said how large the nodes are: the job may be one for several of them.
            return "" if self._free.take_spanning(job.partition, job.gpu_count) else None
        return node

    def _keep_waiting(self, held: Iterable[Candidate], waiting: Iterable[Candidate]) -> None:
        """Give reasons, and to Slurm whatever has waited too long."""
        unprofiled = {candidate.rank for candidate in held}
        ahead: Counter[str] = Counter()
        for candidate in sorted((*held, *waiting), key=lambda item: item.rank):
            job = candidate.job
            waited_s = self._request.now_s - job.submit_s
            if waited_s > self._options.max_wait_s:
                why = reasons.aged(waited_s, self._options.max_wait_s)
                self._decisions.solo.append(Solo(job.job_id, why))
                continue
            if candidate.rank in unprofiled:
                why = (reasons.NEEDS_PROFILE,)
            else:
                why = reasons.waiting(job, ahead[job.partition], self._free)
            self._decisions.waiting.append(Waiting(job.job_id, why))
            ahead[job.partition] += 1

    def _bucket(self, job: PlanJob) -> Bucket:
        return bucket_of(job, same_user=self._request.same_user)
