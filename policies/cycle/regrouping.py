"""Which jobs share and how fast they run, and whether regrouping running jobs pays for its restarts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from muri.policies.cycle import reasons
from muri.policies.cycle.placing import MemoryOf, Unit, unit_of
from muri.policies.cycle.queue import Contender, Members, worth_of
from muri.policies.grouping.engine import group_buckets
from muri.policies.grouping.problem import BucketGroups, BucketProblem, Kind, OpenUnit
from muri.policies.options import PolicyOptions
from muri.policies.speed import Shape, SpeedModel
from muri.policies.types import Certificate, Reason, may_share_gpus
from muri.profiler.records import ProfileKey

Composition = tuple[int, ...]  # The members' shapes as indices, ascending
_MOST_KNOWN: Final = 65_536  # Forecasts that are cached from plan to plan, some 50 MiB
_GAIN: Final = 1e-9  # Relative gain below which a regrouping is only a rounding error
_MOST_GUESSES: Final = 64  # Models without a measurement that are told apart, so that kinds stay few


class Forecast(NamedTuple):
    """Predicted figures of a group; members are sorted by shape, then by rank.

    Attributes:
        order: Indices of the members by position of the rotation.
        speed: Speed of each member, 1 = as fast as alone.
        efficiency: γ of Eq. 4.
        period_s: T of Eq. 3; 0 where the model has no period.
    """

    order: tuple[int, ...]
    speed: tuple[float, ...]
    efficiency: float
    period_s: float


@lru_cache(maxsize=4)
def _known_of(model: SpeedModel) -> dict[tuple[Shape, ...], Forecast]:
    """The model's forecasts so far: the same few shapes meet again in plan after plan."""
    return {}


class Forecasts:
    """Forecasts by composition; contenders refer to `shapes`."""

    def __init__(self, model: SpeedModel, shapes: Sequence[Shape]) -> None:
        self._model = model
        self._shapes = shapes
        self._known: dict[Composition, Forecast] = {}
        self._known_before = _known_of(model)

    def prepare(self, groups: Iterable[Members]) -> None:
        """Predict all of these groups at once."""
        by_size: dict[int, set[Composition]] = {}
        for group in groups:
            composition = tuple(sorted(shapes_of(group)))
            if composition not in self._known:
                by_size.setdefault(len(composition), set()).add(composition)
        for new in by_size.values():
            self._ask(sorted(new))

    def of(self, group: Members) -> tuple[Members, Forecast]:
        """The members sorted as in the forecast, and the forecast."""
        shapes = shapes_of(group)
        composition = tuple(sorted(shapes))
        if composition not in self._known:
            self._ask([composition])
        members = group
        if composition != shapes:
            members = tuple(member for _, _, member in sorted(zip(shapes, range(len(group)), group, strict=True)))
        return members, self._known[composition]

    def _ask(self, compositions: Sequence[Composition]) -> None:
        before = self._known_before
        new: list[tuple[Composition, tuple[Shape, ...]]] = []
        for composition in compositions:
            shapes = tuple([self._shapes[index] for index in composition])
            known = before.get(shapes)
            if known is None:
                new.append((composition, shapes))
            else:
                self._known[composition] = known
        if not new:
            return
        if len(before) + len(new) > _MOST_KNOWN:
            before.clear()
        answer = self._model.evaluate(self._shapes, np.array([composition for composition, _ in new], dtype=np.intp))
        speeds, gammas = answer.speed.tolist(), answer.efficiency.tolist()
        periods = np.nan_to_num(answer.period_s, nan=0.0).tolist()
        for number, (composition, shapes) in enumerate(new):
            forecast = Forecast(self._model.order(shapes), tuple(speeds[number]), gammas[number], periods[number])
            self._known[composition] = before[shapes] = forecast


def shapes_of(group: Members) -> Composition:
    """Indices of the members' shapes."""
    return tuple([member.shape for member in group if member.shape is not None])


@dataclass(frozen=True, slots=True)
class Task:
    """One bucket to be grouped: selected jobs by rank, the number of new groups that fit and their GPU memory, and
    open units.
    """

    members: Members
    slots: int
    memory_limit_gib: float = float("inf")
    open_units: tuple[Members, ...] = ()


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of one bucket: units to place, open units that new members join, jobs left, and the proof."""

    units: tuple[Unit, ...]
    joined: tuple[Unit, ...]
    left: Members
    certificate: Certificate


class _Way(NamedTuple):
    """One way of grouping a bucket.

    Attributes:
        units: Its groups, single jobs among them.
        left: The jobs in none.
        joined: The open units that new members join, each with these.
    """

    units: tuple[Unit, ...]
    left: Members
    joined: tuple[Members, ...] = ()

    @property
    def before(self) -> tuple[Members, ...]:
        """The open units without their new members."""
        return tuple([tuple([item for item in group if item.unit is group[0].unit]) for group in self.joined])

    @property
    def groups(self) -> tuple[Members, ...]:
        """All groups whose speeds count."""
        return (*[unit.members for unit in self.units], *self.joined, *self.before)


class Grouper:
    """Groups the buckets of one plan; a regrouping must pay within `interval_s`."""

    def __init__(
        self, options: PolicyOptions, model: SpeedModel, shapes: Sequence[Shape], interval_s: float, memory_of: MemoryOf
    ) -> None:
        self._options, self._model, self._shapes = options, model, shapes
        self._interval_s, self._memory_of = interval_s, memory_of
        self._guesses: dict[ProfileKey, int] = {}
        self.forecasts = Forecasts(model, shapes)

    def group(self, tasks: Sequence[Task]) -> tuple[Grouping, ...]:
        """Group every bucket anew; where that breaks up running units, compare it with leaving them.

        Where all have GPUs of their own and had them before, there is nothing to choose.
        """
        apart = [self._is_apart(task) for task in tasks]
        pairs = list(zip(tasks, apart, strict=True))
        chosen = iter(self._choose([task for task, is_apart in pairs if not is_apart]))
        return tuple(self._apart(task) if is_apart else next(chosen) for task, is_apart in pairs)

    def _is_apart(self, task: Task) -> bool:
        """Whether each job of a bucket gets GPUs of its own, and none of them has shared so far."""
        if len(task.members) > task.slots or (self._options.max_group_size > 1 and self._options.merge != "as-needed"):
            return False
        return all(member.unit is None or len(member.unit.members) == 1 for member in task.members)

    def _apart(self, task: Task) -> Grouping:
        """Every job by itself, at full speed."""
        groups = [(member,) for member in task.members]
        value = 0.0
        if self._options.certify:
            self.forecasts.prepare(groups)
            value = self._worth(groups)
        return Grouping(tuple(map(unit_of, groups)), (), (), Certificate(value, value))

    def _choose(self, tasks: Sequence[Task]) -> list[Grouping]:
        answers = self._solve(tasks)
        fresh = [self._way(task, answer) for task, answer in zip(tasks, answers, strict=True)]
        self.forecasts.prepare(group for way in fresh for group in way.groups)
        settled = [self._settled(task) for task in tasks]
        torn = [number for number, way in enumerate(fresh) if self._restarted(settled[number], way)]
        stays = dict(zip(torn, self._stays([tasks[n] for n in torn], [settled[n] for n in torn]), strict=True))
        groupings = []
        for number, answer in enumerate(answers):
            proven = answer.certificate.upper_bound
            if number in stays:
                groupings.append(self._weigh(fresh[number], stays[number], settled[number], proven))
            else:
                groupings.append(self._grouping(fresh[number], self._value(fresh[number]), proven))
        return groupings

    def _stays(self, tasks: Sequence[Task], settled: Sequence[tuple[Members, ...]]) -> list[_Way]:
        """The ways in which the buckets' running units stay, and others join them or are grouped."""
        parts = [_stay(task, units) for task, units in zip(tasks, settled, strict=True)]
        rests = [
            replace(rest, open_units=(*rest.open_units, *(unit for unit in units if is_open(unit, self._options))))
            for units, rest in parts
        ]
        answers = iter(self._solve([rest for rest in rests if rest.members]))
        ways = []
        for (units, task), rest in zip(parts, rests, strict=True):
            way = self._way(rest, next(answers)) if rest.members else _Way((), ())
            ways.append(self._with_units(way, units, task.open_units))
        self.forecasts.prepare(group for way in ways for group in way.groups)
        return ways

    def _way(self, task: Task, answer: BucketGroups) -> _Way:
        members = task.members
        groups = [tuple([members[index] for index in group]) for group in answer.groups]
        left = tuple([members[index] for index in answer.left])
        joins = [(unit, new) for unit, new in zip(task.open_units, answer.joins, strict=True) if new]
        joined = tuple([(*unit, *(members[index] for index in new)) for unit, new in joins])
        return _Way(tuple(map(self._unit, groups)), left, joined)

    def _with_units(self, way: _Way, staying: Sequence[Members], fixed: Sequence[Members]) -> _Way:
        """A way of grouping the others with the units that stay: those that others join are groups of their own."""
        is_fixed = {id(members[0].unit) for members in fixed}
        grown = [tuple(sorted(group)) for group in way.joined if id(group[0].unit) not in is_fixed]
        taken = {id(group[0].unit) for group in way.joined}
        same = [members for members in staying if id(members[0].unit) not in taken]
        units = [*map(self._unit, (*same, *grown)), *way.units]
        joined = tuple([group for group in way.joined if id(group[0].unit) in is_fixed])
        return _Way(tuple(sorted(units, key=lambda unit: unit.rank)), way.left, joined)

    def _weigh(self, fresh: _Way, stay: _Way, settled: Sequence[Members], proven: float) -> Grouping:
        """Regroup only if that gains more until the next plan than its restarts lose (both: objective × seconds)."""
        value, of_fresh = self._value(stay), self._value(fresh)
        gain = (of_fresh - value) * self._interval_s
        cost = self._restart_cost(settled, fresh) - self._restart_cost(settled, stay)
        if gain - cost > _GAIN * value * self._interval_s:
            return self._grouping(fresh, of_fresh, proven, moving=reasons.moving_pays(gain, cost))
        return self._grouping(stay, value, proven, staying=reasons.restart_would_not_pay(gain, cost))

    def _grouping(
        self,
        way: _Way,
        value: float,
        proven: float,
        *,
        moving: Reason = reasons.REGROUPED,
        staying: Reason | None = None,
    ) -> Grouping:
        """Units with their proof, and with the reason why running jobs among them move or stay."""
        certificate = Certificate(value, max(value, proven))
        proof = reasons.proven(certificate)
        units = []
        for unit in way.units:
            moves = any(member.unit is not None and member.unit is not unit.runs for member in unit.members)
            notes = [proof] if len(unit.members) > 1 else []
            notes += [staying] if staying is not None and unit.runs is not None else []
            notes += [moving] if moves else []
            units.append(replace(unit, notes=tuple(notes)) if notes else unit)
        joined = [Unit(group, self._memory_gib(group), group[0].unit, (proof,)) for group in way.joined]
        return Grouping(tuple(units), tuple(joined), way.left, certificate)

    def _unit(self, group: Members) -> Unit:
        return unit_of(group, self._memory_gib(group), memory_of=self._memory_of if self._options.join else None)

    def _solve(self, tasks: Sequence[Task]) -> tuple[BucketGroups, ...]:
        """Solve all buckets at once."""
        problems = [
            BucketProblem(
                jobs=tuple([self._kind(member) for member in task.members]),
                gpu_count=task.members[0].bucket.gpu_count,
                slots=task.slots,
                memory_limit_gib=task.memory_limit_gib,
                open_units=tuple([self._open_unit(unit, task.members) for unit in task.open_units]),
                mem_gib=tuple([member.job.mem_gib for member in task.members]) if task.open_units else (),
            )
            for task in tasks
        ]
        return group_buckets(problems, self._options, self._model)

    def _kind(self, member: Contender) -> Kind:
        job, options, guess = member.job, self._options, 0
        assert member.shape is not None
        if job.profile is not None and job.profile.is_unmeasured:
            guess = 1 + self._guesses.setdefault(job.profile.key, len(self._guesses)) % _MOST_GUESSES
        return Kind(
            shape=self._shapes[member.shape],
            worth=worth_of(job) if options.objective == "jct" else 1.0,
            largest=min(options.max_group_size, job.largest_group),
            min_speed=max(options.min_speed, job.min_speed),
            guess=guess,
        )

    def _open_unit(self, members: Members, waiting: Members) -> OpenUnit:
        unit = members[0].unit
        assert unit is not None
        kinds, closed = tuple(map(self._kind, members)), unit.closed_to
        closed_to = [index for index, item in enumerate(waiting) if item.job.job_id in closed] if closed else ()
        return OpenUnit(kinds, self._memory_of(unit), unit.spare_mem_gib, frozenset(closed_to))

    def _settled(self, task: Task) -> tuple[Members, ...]:
        """Running units whose members are all selected: they may stay as they are."""
        # Units by identity: comparing them by their members would be slow, and one request has each unit once.
        present = Counter(id(member.unit) for member in task.members if member.unit is not None)
        units: dict[int, list[Contender]] = {}
        for member in task.members:
            unit = member.unit
            if unit is None or len(unit.members) > self._options.max_group_size:
                continue
            if present[id(unit)] == len(unit.members) and may_share_gpus(unit.members):
                units.setdefault(id(unit), []).append(member)
        return tuple(sorted(tuple(unit) for unit in units.values()))

    def _value(self, way: _Way) -> float:
        groups = [unit.members for unit in way.units]
        return self._worth(groups) + self._worth(way.joined) - self._worth(way.before)

    def _worth(self, groups: Iterable[Members]) -> float:
        return sum(sum(self._rates(group)) for group in groups)

    def _rates(self, group: Members) -> tuple[float, ...]:
        """Each member's contribution to the objective; of γ every member gets the same share."""
        members, forecast = self.forecasts.of(group)
        if self._options.objective == "efficiency":
            return (forecast.efficiency / len(group),) * len(group)
        if self._options.objective == "throughput":
            return forecast.speed
        return tuple(worth_of(member.job) * speed for member, speed in zip(members, forecast.speed, strict=True))

    def _restarted(self, settled: Iterable[Members], way: _Way) -> list[Members]:
        """The running units that stop where a bucket is grouped so."""
        staying = {id(unit.runs) for unit in way.units if unit.runs is not None}
        return [group for group in settled if id(group[0].unit) not in staying]

    def _restart_cost(self, settled: Iterable[Members], way: _Way) -> float:
        """The loss by restarts, in units of the objective × seconds."""
        return sum(
            sum(member.job.restart_s * rate for member, rate in zip(members, self._rates(members), strict=True))
            for members, _ in map(self.forecasts.of, self._restarted(settled, way))
        )

    def _memory_gib(self, group: Members) -> float:
        """GPU memory that placement must find."""
        members = group if len(group) > 1 else ()
        return sum(self._shapes[member.shape].gpu_mem_gib for member in members if member.shape is not None)


def is_open(members: Members, options: PolicyOptions) -> bool:
    """Whether a running unit takes new members: it may, its speeds are known, and it is not full."""
    unit = members[0].unit
    largest = min(options.max_group_size, *(member.job.largest_group for member in members))
    return (
        options.join
        and unit is not None
        and unit.joinable
        and unit.mode == "interleave"
        and len(members) < largest
        and all(member.shape is not None and member.bucket == members[0].bucket for member in members)
    )


def _stay(task: Task, settled: Sequence[Members]) -> tuple[tuple[Members, ...], Task]:
    """The running units that may stay, and the task of grouping the other jobs.

    The first `slots` jobs must all find a place. A unit with one of them takes no place from them; any other takes one,
    so it stays only while there are places to spare.
    """
    urgent = {member.rank for member in task.members[: task.slots]}
    covered = [sum(member.rank in urgent for member in unit) for unit in settled]
    spare = sum(count - 1 for count in covered if count)
    units = []
    for unit, count in zip(settled, covered, strict=True):
        if count or spare > 0:
            spare -= not count
            units.append(unit)
    staying = {member.rank for unit in units for member in unit}
    others = tuple([member for member in task.members if member.rank not in staying])
    return tuple(units), replace(task, members=others, slots=task.slots - len(units))
