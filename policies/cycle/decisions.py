"""From placements to decisions: groups, single jobs and waiting jobs, each with its reasons."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from muri.policies.cycle import reasons
from muri.policies.cycle.bucket import Bucket
from muri.policies.cycle.forecast import Forecasts, Members
from muri.policies.cycle.placement import Shares
from muri.policies.cycle.placing import Placement
from muri.policies.cycle.queue import Contender
from muri.policies.cycle.units import Unit, running_unit
from muri.policies.reason import Reason
from muri.policies.speed.model import Shape
from muri.policies.types import Group, Running, Solo, Waiting
from muri.profiler.records import RESOURCES


@dataclass
class Decisions:
    """What has been decided so far."""

    groups: list[Group] = field(default_factory=list)
    solo: list[Solo] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


class Clerk:
    """Writes down decisions with their reasons.

    Args:
        forecasts: How groups get on.
        shapes: The distinct shapes that contenders refer to.
        partners: How many contenders each bucket has that can share.
        sharing: Whether jobs share at all.
    """

    def __init__(
        self, forecasts: Forecasts, shapes: Sequence[Shape], partners: Counter[Bucket], *, sharing: bool
    ) -> None:
        self.decisions = Decisions()
        self.room_for_all = False
        self._forecasts = forecasts
        self._bottlenecks = [_bottleneck(shape) for shape in shapes]
        self._partners = partners
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
        where = reasons.kept(job.gpu_count, gpus) if kept else reasons.given(job, gpus)
        why = (where, *self._why_alone(contender), *notes)
        self.decisions.solo.append(Solo(job.job_id, why, gpus, kept))

    def keep_fixed(self, members: Members) -> None:
        """A running unit that is not up for decision."""
        unit = running_unit(members)
        assert unit is not None
        notes = (reasons.NOT_STOPPED,)
        gpus, gpu_count = unit.gpus, unit.members[0].gpu_count
        if len(members) == 1:
            why = (reasons.kept(gpu_count, gpus), *notes)
            self.decisions.solo.append(Solo(members[0].job.job_id, why, gpus, kept=True))
        elif all(member.shape is not None for member in members):
            self._group(Placement(Unit(members, stays_on=gpus, notes=notes), gpus))
        else:
            self._group_of_unknown_speed(unit, notes)

    def _group(self, placement: Placement) -> None:
        unit = placement.unit
        members, forecast = self._forecasts.of(unit.members)
        job_ids = [member.job.job_id for member in unit.members]
        resources = [self._bottlenecks[member.shape] for member in unit.members if member.shape is not None]
        running = running_unit(unit.members) if placement.kept else None
        if running is None:
            ordered = tuple(members[index].job.job_id for index in forecast.order)
        else:
            ordered = tuple(job.job_id for job in running.members)
        where = reasons.kept if placement.kept else reasons.sharing
        self.decisions.groups.append(
            Group(
                members=ordered,
                gpus=placement.gpus,
                gpu_count=unit.gpu_count,
                period_s=forecast.period_s,
                efficiency=forecast.efficiency,
                speed=dict(sorted(zip((member.job.job_id for member in members), forecast.speed, strict=True))),
                reasons=(
                    reasons.grouped(job_ids, forecast.efficiency, sum(forecast.speed)),
                    reasons.bottlenecks(job_ids, resources),
                    where(unit.gpu_count, placement.gpus),
                    *unit.notes,
                ),
                kept=placement.kept,
            )
        )

    def _group_of_unknown_speed(self, unit: Running, notes: tuple[Reason, ...]) -> None:
        """A group that runs although nothing is known of a member, say one whose profile was deleted."""
        job_ids = tuple(job.job_id for job in unit.members)
        gpu_count = unit.members[0].gpu_count
        why = (reasons.kept(gpu_count, unit.gpus), reasons.UNKNOWN_SPEED, *notes)
        speed = dict.fromkeys(sorted(job_ids), 1 / len(job_ids))
        self.decisions.groups.append(Group(job_ids, unit.gpus, gpu_count, 0.0, 0.0, speed, why, kept=True))

    def _why_alone(self, contender: Contender) -> tuple[Reason, ...]:
        job = contender.job
        if not self._sharing:
            return ()
        if not job.groupable:
            return (reasons.must_run_alone(job),)
        if contender.shape is None:
            return (reasons.NOTHING_KNOWN if job.profile is not None else reasons.NEEDS_PROFILE_TO_SHARE,)
        if self.room_for_all:
            return (reasons.ROOM_FOR_ALL,)
        partners = self._partners[contender.bucket] - 1
        return (reasons.no_better_use(partners) if partners else reasons.no_partner(job),)


def _bottleneck(shape: Shape) -> str:
    """The resource that an iteration holds longest; the earlier one on a tie."""
    return RESOURCES[shape.stage_s.index(max(shape.stage_s))]
