"""From placements to decisions, each with its reasons: start, wait, or go to Slurm's own queue."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from muri.policies.cycle import reasons
from muri.policies.cycle.free_gpus import FreeGpus, Shares
from muri.policies.cycle.placing import Placement, Unit
from muri.policies.cycle.queue import Bucket, Contender, Members
from muri.policies.cycle.regrouping import Forecast, Forecasts
from muri.policies.speed import Shape
from muri.policies.types import Group, PlanJob, PlanRequest, Reason, Solo, Waiting, waited_s
from muri.profiler.records import RESOURCES


class DecisionWriter:
    """Collects decisions with their reasons.

    Attributes:
        partners: Number of contenders of each bucket that can share.
        room_for_all: Whether each job can have GPUs of its own.
        explained: Whether to give reasons.
    """

    def __init__(self, forecasts: Forecasts, shapes: Sequence[Shape], *, sharing: bool, explained: bool) -> None:
        self.groups: list[Group] = []
        self.solo: list[Solo] = []
        self.waiting: list[Waiting] = []
        self.partners: Counter[Bucket] = Counter()
        self.room_for_all = False
        self.explained = explained
        self._forecasts = forecasts
        # The resource that an iteration holds longest; the earlier one on a tie.
        self._bottlenecks = [RESOURCES[shape.stage_s.index(max(shape.stage_s))] for shape in shapes]
        self._sharing = sharing

    def start(self, placement: Placement) -> None:
        """A unit that starts, or stays."""
        if len(placement.unit.members) > 1:
            self._group(placement)
        else:
            self.start_alone(placement.unit.members[0], placement.gpus, notes=placement.unit.notes, kept=placement.kept)

    def start_alone(
        self, contender: Contender, gpus: Shares, *, notes: tuple[Reason, ...] = (), kept: bool = False
    ) -> None:
        """A job that runs by itself; without GPUs it queues in Slurm."""
        job = contender.job
        why: tuple[Reason, ...] = ()
        if self.explained:
            where = reasons.kept(job.gpu_count, gpus) if kept else reasons.given(job, gpus)
            why = (where, *self._why_alone(contender), *notes)
        self.solo.append(Solo(job.job_id, why, gpus, kept))

    def keep_fixed(self, members: Members) -> None:
        """A running unit that is not up for decision, and that no job joins."""
        unit = members[0].unit
        assert unit is not None
        job_ids, gpu_count = tuple(job.job_id for job in unit.members), unit.members[0].gpu_count
        why: tuple[Reason, ...] = ()
        if self.explained:
            why = (reasons.kept(gpu_count, unit.gpus), reasons.NOT_STOPPED)
        if len(members) == 1:
            self.solo.append(Solo(job_ids[0], why, unit.gpus, kept=True))
        elif all(member.shape is not None for member in members):
            self._group(Placement(Unit(members, runs=unit, notes=(reasons.NOT_STOPPED,)), unit.gpus))
        else:
            # The speed is unknown, for example of a job whose profile was deleted.
            why = (why[0], reasons.UNKNOWN_SPEED, *why[1:]) if why else ()
            speed = dict.fromkeys(sorted(job_ids), 1 / len(job_ids))
            self.groups.append(Group(job_ids, unit.gpus, gpu_count, 0.0, 0.0, speed, why, kept=True))

    def left_s(self, members: Members) -> float:
        """Predicted seconds until a running unit ends; infinite where a duration or a speed is unknown."""
        if any(member.job.remaining_s is None or (member.shape is None and len(members) > 1) for member in members):
            return float("inf")
        if len(members) == 1:
            return members[0].job.remaining_s or 0.0
        ordered, forecast = self._forecasts.of(members)
        return max(
            (member.job.remaining_s or 0.0) / speed if speed > 0 else float("inf")
            for member, speed in zip(ordered, forecast.speed, strict=True)
        )

    def _group(self, placement: Placement) -> None:
        unit = placement.unit
        members, forecast = self._forecasts.of(unit.members)
        ordered = tuple(members[index].job.job_id for index in forecast.order)
        if unit.runs is not None and placement.kept:
            ordered = tuple(job.job_id for job in unit.runs.members)
        self.groups.append(
            Group(
                members=ordered,
                gpus=placement.gpus,
                gpu_count=unit.gpu_count,
                period_s=forecast.period_s,
                efficiency=forecast.efficiency,
                speed=dict(sorted(zip((member.job.job_id for member in members), forecast.speed, strict=True))),
                reasons=self._why_grouped(placement, forecast) if self.explained else (),
                kept=placement.kept,
                joining=tuple(member.job.job_id for member in unit.joining),
            )
        )

    def _why_grouped(self, placement: Placement, forecast: Forecast) -> tuple[Reason, ...]:
        unit, gpus = placement.unit, placement.gpus
        job_ids = [member.job.job_id for member in unit.members]
        if unit.runs is None:
            where = reasons.sharing(unit.gpu_count, gpus)
        elif placement.kept:
            where = reasons.kept(unit.gpu_count, gpus)
        else:
            joining = [member.job.job_id for member in unit.joining]
            where = reasons.joined(joining, [job.job_id for job in unit.runs.members], unit.gpu_count, gpus)
        return (
            reasons.grouped(job_ids, forecast.efficiency, sum(forecast.speed)),
            reasons.bottlenecks(job_ids, [self._bottleneck_of(member) for member in unit.members]),
            where,
            *unit.notes,
        )

    def _bottleneck_of(self, member: Contender) -> str:
        shape, profile = member.shape, member.job.profile
        known = shape is not None and profile is not None and not profile.is_unmeasured
        return self._bottlenecks[shape] if shape is not None and known else ""

    def _why_alone(self, contender: Contender) -> tuple[Reason, ...]:
        job = contender.job
        if not self._sharing:
            return ()
        if not job.may_share:
            return (reasons.must_run_alone(job),)
        if contender.shape is None:
            return (reasons.NOTHING_KNOWN if job.profile is not None else reasons.NEEDS_PROFILE_TO_SHARE,)
        if self.room_for_all:
            return (reasons.ROOM_FOR_ALL,)
        partners = self.partners[contender.bucket] - 1
        return (reasons.no_better_use(partners) if partners else reasons.no_partner(job),)


class SlurmQueue:
    """Slurm's queue behind a plan, absent unless `larger_than_a_node` is "slurm".

    `released` lists the jobs that it takes; `set_aside` keeps GPUs free for a job that is larger than any node.
    """

    def __init__(
        self,
        request: PlanRequest,
        free: FreeGpus,
        max_wait_s: float,
        released: list[Solo],
        set_aside: Callable[[PlanJob], object],
    ) -> None:
        self.is_there = request.larger_than_a_node == "slurm"
        self._now_s, self._max_wait_s = request.now_s, max_wait_s
        self._released, self._set_aside = released, set_aside
        self._free, self._largest_node = free, cache(free.largest_node)

    def is_overdue(self, job: PlanJob) -> bool:
        """Whether a job has waited longer than the aging bound."""
        return waited_s(job, self._now_s) > self._max_wait_s

    def takes_larger(self, job: PlanJob) -> bool:
        """Take a waiting job that is larger than any node; GPUs are set aside for it."""
        largest = self._largest_node(job.partition)  # (None while the size of one of its nodes is unknown)
        if not self.is_there or largest is None or job.gpu_count // job.node_count <= largest:
            return False
        self._set_aside(job)
        self._released.append(Solo(job.job_id, (reasons.larger_than_a_node(job, largest), reasons.QUEUES_IN_SLURM)))
        return True

    def takes_overdue(self, job: PlanJob) -> bool:
        """Take a waiting job that found no place and has waited longer than the aging bound."""
        if not self.is_there or not self.is_overdue(job):
            return False
        aged = reasons.aged(waited_s(job, self._now_s), self._max_wait_s)
        self._released.append(Solo(job.job_id, (aged, reasons.QUEUES_IN_SLURM)))
        return True

    def gpus_alone(self, job: PlanJob) -> Shares | None:
        """Take free GPUs for a job alone; empty where Slurm finds them, None where there are none.

        Where the size of a node is unknown, a job that finds no node and must run alone may need several: Slurm gets
        it, and GPUs are set aside for it.
        """
        gpus = self._free.take(job.partition, job.gpu_count, node_count=job.node_count)
        if gpus is not None or not self.is_there or job.may_share or self._largest_node(job.partition) is not None:
            return gpus
        return () if self._set_aside(job) else None
