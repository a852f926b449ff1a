"""Algorithm 1 of Muri: rounds of matching that merge jobs into groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from muri.policies.grouping.problem import Appraiser, BucketProblem, Kind, Kinds, Members
from muri.policies.grouping.solvers import match_types, match_weights
from muri.policies.options import PolicyOptions
from muri.policies.speed import Floats, Indices, SpeedModel

_BLOCK: Final = 4_000  # Units matched at once: a matrix of their pairs still fits the memory of a small machine
# The same where every job has a worth of its own: neighbors in the queue are then of similar worth, and hardly a pair
# of a short and a long job is worth making.
_BLOCK_BY_WORTH: Final = 500

_REPEATS: Final = 2

_MANY: Final = 400  # From so many units of each kind, and in all, matching works on kinds instead of on units
_REMEMBERED_UNITS: Final = 64
_REMEMBERED: Final = 512  # Matchings of up to so many units, and so many of them, are remembered: 10 MiB at most


@dataclass(frozen=True, slots=True)
class Unit:
    """One job, or several that will share GPUs.

    Attributes:
        members: Jobs by index, ascending: the most urgent first.
        kinds: Their kinds, ascending.
        total_speed: Sum of their speeds: 1 for a job alone.
        value: Value of the unit under the objective.
    """

    members: Members
    kinds: tuple[int, ...]
    total_speed: float
    value: float


class Merge(NamedTuple):
    """Two units that a matching chose, and the unit that they become."""

    weight: float
    unit: Unit
    first: Unit
    second: Unit


class Rounds:
    """Algorithm 1 on one bucket, round by round."""

    def __init__(self, problem: BucketProblem, kinds: Kinds, options: PolicyOptions, model: SpeedModel) -> None:
        self._problem = problem
        self._options = options
        self._model = model
        self.kinds = kinds
        self.appraiser = Appraiser(kinds.kinds, options, model, problem.memory_limit_gib)
        self.units: list[Unit] = self._single_jobs()
        self._kind_of = {job: kind for kind, jobs in enumerate(kinds.jobs) for job in jobs}

    @property
    def fits(self) -> bool:
        """Whether there is a slot for every unit."""
        return len(self.units) <= self._problem.slots

    @property
    def gpus(self) -> int:
        """GPUs that all units need together."""
        return len(self.units) * self._problem.gpu_count

    def merge(self, *, as_needed: bool) -> bool:
        """Run one round (`as_needed`: only the best pairs that it takes to fit the slots); whether it merged any."""
        merges = sorted(self._matched(), key=lambda item: (-round(item.weight, 9), item.unit.members))
        if as_needed:
            merges = merges[: max(0, len(self.units) - self._problem.slots)]
        gone = {unit.members[0] for item in merges for unit in (item.first, item.second)}
        kept = [unit for unit in self.units if unit.members[0] not in gone]
        self.units = sorted([*kept, *(item.unit for item in merges)], key=lambda unit: unit.members)
        return bool(merges)

    def chosen(self) -> list[Unit]:
        """The units that get a slot: those with an urgent job first, then the most urgent of the others.

        A job that the matchings have left alone takes the best partner among those without a slot.
        """
        slots = self._problem.slots
        units, left = self.units[:slots], sorted(job for unit in self.units[slots:] for job in unit.members)
        for place, unit in enumerate(units):
            if len(unit.members) == 1 and left:
                units[place] = self._with_partner(unit, left)
                left = [job for job in left if job not in units[place].members]
        return units

    def _with_partner(self, unit: Unit, left: Sequence[int]) -> Unit:
        """A job alone with the one of these that adds most, the most urgent of its kind; alone where none pays."""
        most_urgent: dict[int, int] = {}
        for job in left:
            most_urgent.setdefault(self._kind_of[job], job)
        groups = np.array([sorted((*unit.kinds, kind)) for kind in most_urgent], dtype=np.intp)
        appraisal = self.appraiser.appraise(groups)
        admitted = self.appraiser.pays(appraisal, unit.total_speed) & self.appraiser.fits(groups)
        gain = np.where(admitted, appraisal.value - unit.value, 0.0)
        best, (kind, job) = min(enumerate(most_urgent.items()), key=lambda item: (-round(gain[item[0]], 9), item[1][1]))
        if gain[best] <= 0:
            return unit
        total_speed, value = float(appraisal.total_speed[best]), float(appraisal.value[best])
        return Unit(tuple(sorted((*unit.members, job))), tuple(sorted((*unit.kinds, kind))), total_speed, value)

    def _single_jobs(self) -> list[Unit]:
        groups = np.arange(len(self.kinds.kinds), dtype=np.intp)[:, None]
        alone = self.appraiser.appraise(groups)
        units = [
            Unit((job,), (kind,), float(alone.total_speed[kind]), float(alone.value[kind]))
            for kind, jobs in enumerate(self.kinds.jobs)
            for job in jobs
        ]
        return sorted(units, key=lambda unit: unit.members)

    def _matched(self) -> list[Merge]:
        merges = []
        block = _BLOCK_BY_WORTH if self._options.objective == "jct" else _BLOCK
        for start in range(0, len(self.units), block):
            merges += self._match_block(self.units[start : start + block])
        return merges

    def _match_block(self, units: Sequence[Unit]) -> list[Merge]:
        kinds = self.kinds.kinds
        alike = tuple([_Alike(tuple([kinds[k] for k in unit.kinds]), unit.total_speed, unit.value) for unit in units])
        matched = _matched if len(units) <= _REMEMBERED_UNITS else _matched.__wrapped__
        found = matched(alike, self._options, self._model, self._problem.memory_limit_gib)
        merges = []
        for merge in found:
            first, second = units[merge.first.members[0]], units[merge.second.members[0]]
            members, kinds_of = sorted(first.members + second.members), sorted(first.kinds + second.kinds)
            merged = replace(merge.unit, members=tuple(members), kinds=tuple(kinds_of))
            merges.append(Merge(merge.weight, merged, first, second))
        return merges


class _Alike(NamedTuple):
    """A unit as far as matching tells units apart."""

    kinds: tuple[Kind, ...]
    total_speed: float
    value: float


@lru_cache(maxsize=_REMEMBERED)
def _matched(
    units: tuple[_Alike, ...], options: PolicyOptions, model: SpeedModel, memory_limit_gib: float
) -> tuple[Merge, ...]:
    """Match units known by their kinds alone: while a queue changes little, the same ones meet again and again.

    The units are given by urgency. Members of the resulting units are their places among the given ones.
    """
    kinds = sorted({kind for unit in units for kind in unit.kinds})
    number = {kind: index for index, kind in enumerate(kinds)}
    placed = [
        Unit((place,), tuple([number[kind] for kind in unit.kinds]), unit.total_speed, unit.value)
        for place, unit in enumerate(units)
    ]
    return tuple(_Matcher(Appraiser(kinds, options, model, memory_limit_gib), options).match(placed))


class _Matcher:
    """Matches the units of one round; the appraiser is that of the kinds that units name."""

    def __init__(self, appraiser: Appraiser, options: PolicyOptions) -> None:
        self._appraiser = appraiser
        self._options = options

    def match(self, units: Sequence[Unit]) -> list[Merge]:
        """Maximum-weight matching of units."""
        by_kind: dict[tuple[int, ...], list[Unit]] = {}
        for unit in units:
            by_kind.setdefault(unit.kinds, []).append(unit)
        unit_kinds = sorted(by_kind)
        place = {kinds: index for index, kinds in enumerate(unit_kinds)}
        figures = self._merges([by_kind[kinds][0] for kinds in unit_kinds])
        if self._options.matching == "certified" and len(units) >= max(_MANY, _REPEATS * len(unit_kinds)):
            pairs = _pairs_of_kinds(figures[0], [by_kind[kinds] for kinds in unit_kinds])
        else:
            of_unit = np.array([place[unit.kinds] for unit in units])
            matching = match_weights(figures[0][np.ix_(of_unit, of_unit)], self._options.matching)
            pairs = [(units[first], units[second]) for first, second in matching.pairs]
        merges = []
        for first, second in pairs:
            weight, value, total_speed = figures[:, place[first.kinds], place[second.kinds]].tolist()
            members, kinds = sorted(first.members + second.members), sorted(first.kinds + second.kinds)
            merges.append(Merge(weight, Unit(tuple(members), tuple(kinds), total_speed, value), first, second))
        return merges

    def _merges(self, units: Sequence[Unit]) -> Floats:
        """Array (3, units, units): weight (NaN where two may not merge), value and total speed of merged units."""
        figures = np.full((3, len(units), len(units)), np.nan)
        sizes = np.array([len(unit.kinds) for unit in units])
        for size_a in sorted(set(sizes.tolist())):
            for size_b in sorted(set(sizes.tolist())):
                if size_a <= size_b and size_a + size_b <= self._options.max_group_size:
                    self._fill(figures, units, np.flatnonzero(sizes == size_a), np.flatnonzero(sizes == size_b))
        return figures

    def _fill(self, figures: Floats, units: Sequence[Unit], rows: Indices, columns: Indices) -> None:
        """Evaluate merging each unit of `rows` with each of `columns`; all of either have the same size."""
        first, second = (grid.ravel() for grid in np.meshgrid(rows, columns, indexing="ij"))
        if np.array_equal(rows, columns):
            once = first <= second
            first, second = first[once], second[once]
        groups = np.concatenate([_kinds_of(units, rows, first), _kinds_of(units, columns, second)], axis=1)
        appraisal = self._appraiser.appraise(groups)
        total_speed, value = np.array([(unit.total_speed, unit.value) for unit in units]).T
        faster = np.maximum(total_speed[first], total_speed[second])
        admitted = self._appraiser.pays(appraisal, faster) & self._appraiser.fits(groups)
        # The paper weighs a pair by its γ alone. Elsewhere it counts what merging adds to leaving the lesser one out.
        instead = 0.0 if self._options.objective == "efficiency" else np.maximum(value[first], value[second])
        weight = np.where(admitted, appraisal.value - instead, np.nan)
        merged = np.stack([weight, appraisal.value, appraisal.total_speed])
        figures[:, first, second] = figures[:, second, first] = merged


def _kinds_of(units: Sequence[Unit], rows: Indices, which: Indices) -> Indices:
    """Array (n, size): the kinds of each unit of `which`, all of which are among `rows`."""
    return np.array([units[row].kinds for row in rows], dtype=np.intp)[np.searchsorted(rows, which)]


def _pairs_of_kinds(weight: Floats, units: Sequence[Sequence[Unit]]) -> list[tuple[Unit, Unit]]:
    """Match kinds of units, and take the units of a kind in order of urgency."""
    queues = [iter(of_kind) for of_kind in units]
    matching = match_types(weight, [len(of_kind) for of_kind in units])
    return [
        (next(queues[first]), next(queues[second])) for first, second, count in matching.pairs for _ in range(count)
    ]


def form_units(
    problems: Sequence[tuple[BucketProblem, Kinds]], options: PolicyOptions, model: SpeedModel
) -> list[Rounds]:
    """Merge jobs into groups (Algorithm 1): ⌈log2 k⌉ rounds for groups of up to k.

    With `merge: as-needed` every bucket stops when its units fit its slots, and its last round merges only the best
    pairs that it takes. With `whole-rounds`, as in the paper, all matched pairs of all buckets are merged, until the
    GPUs of all slots are enough for all units together.
    """
    buckets = [Rounds(problem, kinds, options, model) for problem, kinds in problems]
    room = sum(problem.slots * problem.gpu_count for problem, _ in problems)
    for _ in range(math.ceil(math.log2(options.max_group_size))):
        if options.merge == "whole-rounds":
            if sum(bucket.gpus for bucket in buckets) <= room:
                break
            for bucket in buckets:
                bucket.merge(as_needed=False)
        else:
            for bucket in buckets:
                if not bucket.fits:
                    bucket.merge(as_needed=True)
    return buckets
