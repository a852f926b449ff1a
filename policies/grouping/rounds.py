"""Algorithm 1 of Muri, rounds of matching that merge jobs into groups, and exchanges that make its groups better."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from muri.policies.grouping.problem import Appraiser, BucketProblem, Kinds, Members
from muri.policies.matching.solve import match_types, match_weights
from muri.policies.options import PolicyOptions
from muri.policies.speed.model import Floats, Indices, SpeedModel

_BLOCK: Final = 4_000
"""Units matched at once: a matrix of their pairs still fits the memory of a small machine."""

_BLOCK_BY_WORTH: Final = 500
"""The same where every job has a worth of its own: neighbours in the queue are then of similar worth, and
hardly a pair of a short and a long job is worth making."""

_REPEATS: Final = 2

_MANY: Final = 400
"""From so many units of each kind, and in all, matching works on kinds instead of on units."""

_PLACES: Final = ((0, 1), (0, 2), (0, 3), (0,), (1,), (2,), (3,))
"""Which members a group gives up. The other three pairs only swap the two halves."""

_CHUNK: Final = 250
"""Groups that exchange members with each other; the most urgent ones first."""

_EVALUATIONS: Final = 4_000_000
"""Groups to evaluate at most, about a second: a limit that is the same on every machine."""

_GAIN: Final = 1e-4
"""Relative gain below which a turn counts as idle."""

_FORBIDDEN: Final = -1e9

_URGENT: Final = 1e6
"""Added for handing out a job that must not be left over; outweighs every value and no ban."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One job, or several that will share GPUs.

    Attributes:
        members: Jobs by index, ascending: the most urgent first.
        kinds: Their kinds, ascending.
        total_speed: Sum of their speeds: 1 for a job alone.
        value: What the unit is worth under the objective.
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
    """Algorithm 1 on one bucket, round by round.

    Args:
        problem: The jobs and the slots.
        kinds: The jobs by kind.
        options: Group size, matching, objective.
        model: How fast members are.
    """

    def __init__(self, problem: BucketProblem, kinds: Kinds, options: PolicyOptions, model: SpeedModel) -> None:
        self._problem = problem
        self._options = options
        self.kinds = kinds
        self.appraiser = Appraiser(kinds.shapes, kinds.worth, kinds.largest, options, model, problem.memory_limit_gib)
        self.units: list[Unit] = self._single_jobs()

    @property
    def fits(self) -> bool:
        """Whether there is a slot for every unit."""
        return len(self.units) <= self._problem.slots

    @property
    def gpus(self) -> int:
        """GPUs that all units need together."""
        return len(self.units) * self._problem.gpu_count

    def merge(self, *, as_needed: bool) -> bool:
        """Run one round; the result says whether anything was merged.

        Args:
            as_needed: Merge no more pairs than it takes to fit the slots, the best ones.
        """
        merges = sorted(self._matched(), key=lambda item: (-round(item.weight, 9), item.unit.members))
        if as_needed:
            merges = merges[: max(0, len(self.units) - self._problem.slots)]
        gone = {unit.members[0] for item in merges for unit in (item.first, item.second)}
        kept = [unit for unit in self.units if unit.members[0] not in gone]
        self.units = sorted([*kept, *(item.unit for item in merges)], key=lambda unit: unit.members)
        return bool(merges)

    def chosen(self) -> list[Unit]:
        """The units that get a slot: those with an urgent job first, then the most urgent of the others."""
        return self.units[: self._problem.slots]

    def _single_jobs(self) -> list[Unit]:
        groups = np.arange(len(self.kinds.shapes), dtype=np.intp)[:, None]
        value, speed = self.appraiser.appraise(groups)
        units = [
            Unit((job,), (kind,), float(speed[kind]), float(value[kind]))
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
        """Maximum-weight matching among some units."""
        by_kind: dict[tuple[int, ...], list[Unit]] = {}
        for unit in units:
            by_kind.setdefault(unit.kinds, []).append(unit)
        unit_kinds = sorted(by_kind)
        table = self._merge_table([by_kind[kinds][0] for kinds in unit_kinds])
        if self._options.matching == "certified" and len(units) >= max(_MANY, _REPEATS * len(unit_kinds)):
            pairs = _pairs_of_kinds(table.weight, [by_kind[kinds] for kinds in unit_kinds])
        else:
            position = {kinds: index for index, kinds in enumerate(unit_kinds)}
            of_unit = np.array([position[unit.kinds] for unit in units])
            matching = match_weights(table.weight[np.ix_(of_unit, of_unit)], self._options.matching)
            pairs = [(units[first], units[second]) for first, second in matching.pairs]
        index = {kinds: place for place, kinds in enumerate(unit_kinds)}
        return [table.merge(first, second, index[first.kinds], index[second.kinds]) for first, second in pairs]

    def _merge_table(self, units: Sequence[Unit]) -> "_MergeTable":
        """What comes of merging any two of the units, each of another kind."""
        count = len(units)
        table = _MergeTable(*(np.full((count, count), np.nan) for _ in range(3)))
        sizes = np.array([len(unit.kinds) for unit in units])
        for size_a in sorted(set(sizes.tolist())):
            for size_b in sorted(set(sizes.tolist())):
                if size_a <= size_b and size_a + size_b <= self._options.max_group_size:
                    self._fill(table, units, np.flatnonzero(sizes == size_a), np.flatnonzero(sizes == size_b))
        return table

    def _fill(self, table: "_MergeTable", units: Sequence[Unit], rows: Indices, columns: Indices) -> None:
        """Evaluate merging each unit of `rows` with each of `columns`; all of either have the same size."""
        first, second = (grid.ravel() for grid in np.meshgrid(rows, columns, indexing="ij"))
        if np.array_equal(rows, columns):
            once = first <= second
            first, second = first[once], second[once]
        groups = np.concatenate([_kinds_of(units, rows, first), _kinds_of(units, columns, second)], axis=1)
        value, total_speed = self.appraiser.appraise(groups)
        faster = _larger_of([unit.total_speed for unit in units], first, second)
        admitted = self.appraiser.pays(total_speed, faster) & self.appraiser.fits(groups)
        # The paper weighs a pair by its γ alone. Elsewhere it counts what merging adds to leaving the lesser one out.
        instead = (
            0.0 if self._options.objective == "efficiency" else _larger_of([u.value for u in units], first, second)
        )
        weight = np.where(admitted, value - instead, np.nan)
        table.put(first, second, _MergeTable(weight, value, total_speed))


def _kinds_of(units: Sequence[Unit], rows: Indices, which: Indices) -> Indices:
    """Array (n, size): the kinds of each unit of `which`, all of which are among `rows`."""
    return np.array([units[row].kinds for row in rows], dtype=np.intp)[np.searchsorted(rows, which)]


def _larger_of(figure: Sequence[float], first: Indices, second: Indices) -> Floats:
    array = np.array(figure)
    return np.asarray(np.maximum(array[first], array[second]))


@dataclass(frozen=True, slots=True)
class _MergeTable:
    """What comes of merging: symmetric arrays over kinds of units.

    Attributes:
        weight: Weight of the pair in the matching; NaN where it may not be merged.
        value: What the merged unit is worth.
        total_speed: Sum of its members' speeds.
    """

    weight: Floats
    value: Floats
    total_speed: Floats

    def put(self, first: Indices, second: Indices, figures: "_MergeTable") -> None:
        """Write the figures of some pairs."""
        for name in ("weight", "value", "total_speed"):
            array, one_way = getattr(self, name), getattr(figures, name)
            array[first, second] = one_way
            array[second, first] = one_way

    def merge(self, first: Unit, second: Unit, row: int, column: int) -> Merge:
        """Merge two units, of the kinds of this row and column."""
        unit = Unit(
            members=tuple(sorted(first.members + second.members)),
            kinds=tuple(sorted(first.kinds + second.kinds)),
            total_speed=float(self.total_speed[row, column]),
            value=float(self.value[row, column]),
        )
        return Merge(float(self.weight[row, column]), unit, first, second)


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

    With `merge: as-needed` every bucket stops when its units fit its slots, and its last round merges
    only the best pairs that it takes. With `whole-rounds`, as in the paper, all matched pairs of
    all buckets are merged, until the GPUs of all slots are enough for all units together.

    Args:
        problems: One for each bucket, with its jobs by kind.
        options: Group size, matching, merging, objective.
        model: How fast members are.
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


class Improver:
    """Exchanges members between the groups of a bucket: every group gives up a part, and the parts are assigned again.

    Where there are too many kinds of jobs to list all groups, Algorithm 1 forms them in rounds and never takes a pair
    apart again. Here every group gives up the members at some places (one member, or two), and the best way to hand
    these parts out is an assignment problem. The old groups are one of its solutions, so the value never falls. Places
    take turns until nothing improves any more.

    Args:
        problem: The jobs, and which of them are urgent.
        kinds: The problem's kinds.
        appraiser: What groups are worth.
        max_group_size: Most members of a group.
    """

    def __init__(self, problem: BucketProblem, kinds: Kinds, appraiser: Appraiser, max_group_size: int) -> None:
        self._slots = problem.slots
        self._appraiser = appraiser
        self._max_group_size = max_group_size
        self._kind_of_job = np.empty(len(problem.shapes), dtype=np.intp)
        for kind, jobs in enumerate(kinds.jobs):
            self._kind_of_job[list(jobs)] = kind

    def improve(self, groups: Sequence[Members], left: Members) -> tuple[list[Members], float]:
        """Exchange members between groups, and with the jobs left over, as long as the value rises.

        Args:
            groups: The groups, single jobs among them.
            left: Jobs in no group.

        Returns:
            As many groups as before, and their total value.
        """
        best: list[Members] = []
        rest, total, budget = left, 0.0, _EVALUATIONS
        for start in range(0, len(groups), _CHUNK):
            part, rest, value, budget = self._improved(list(groups[start : start + _CHUNK]), rest, budget)
            best += part
            total += value
        return sorted(best), total

    def _improved(self, groups: list[Members], left: Members, budget: int) -> tuple[list[Members], Members, float, int]:
        """Better groups, the jobs then left over, the value, and what is left of the budget."""
        total = float(self._matrix(groups, [()])[:, 0].sum())
        idle = 0
        for places in _turns():
            cost = len(groups) * (len(groups) + len(left))
            if idle == len(_PLACES) or budget < cost:
                break
            budget -= cost
            changed, unused, value = self._handed_out(groups, left, places)
            idle = 0 if value > total * (1.0 + _GAIN) else idle + 1
            if value > total:
                groups, left, total = changed, unused, value
        return groups, left, total, budget

    def _handed_out(
        self, groups: Sequence[Members], left: Members, places: tuple[int, ...]
    ) -> tuple[list[Members], Members, float]:
        """The groups after the best exchange of the members at some places, the jobs then left over, and the value."""
        kept = [tuple(job for place, job in enumerate(group) if place not in places) for group in groups]
        parts = [tuple(job for place, job in enumerate(group) if place in places) for group in groups]
        if len(places) == 1:
            parts += [(job,) for job in left]
        value = self._matrix(kept, parts)
        urgent = np.array([any(job < self._slots for job in part) for part in parts])
        rows, columns = linear_sum_assignment(value + _URGENT * urgent[None, :], maximize=True)
        changed = [tuple(sorted(kept[row] + parts[column])) for row, column in zip(rows, columns, strict=True)]
        used = set(columns.tolist())
        unused = [job for column, part in enumerate(parts) if column not in used for job in part]
        rest = unused if len(places) == 1 else [*unused, *left]
        return changed, tuple(sorted(rest)), float(value[rows, columns].sum())

    def _matrix(self, kept: Sequence[Members], parts: Sequence[Members]) -> Floats:
        """Array (kept, parts): what each would be worth with each part; forbidden groups very little."""
        matrix = np.full((len(kept), len(parts)), _FORBIDDEN)
        kept_size = np.array([len(members) for members in kept])
        part_size = np.array([len(members) for members in parts])
        for size_a in sorted(set(kept_size.tolist())):
            for size_b in sorted(set(part_size.tolist())):
                rows, columns = np.flatnonzero(kept_size == size_a), np.flatnonzero(part_size == size_b)
                if 0 < size_a + size_b <= self._max_group_size:
                    cells = self._values(
                        [kept[row] for row in rows.tolist()], [parts[column] for column in columns.tolist()]
                    )
                    matrix[np.ix_(rows, columns)] = cells
                elif size_a + size_b == 0:
                    matrix[np.ix_(rows, columns)] = 0.0
        return matrix

    def _values(self, kept: Sequence[Members], parts: Sequence[Members]) -> Floats:
        first = self._kind_of_job[np.array(kept, dtype=np.intp).reshape(len(kept), -1)]
        second = self._kind_of_job[np.array(parts, dtype=np.intp).reshape(len(parts), -1)]
        groups = np.concatenate([np.repeat(first, len(parts), axis=0), np.tile(second, (len(kept), 1))], axis=1)
        value, total_speed = self._appraiser.appraise(groups)
        if groups.shape[1] > 1:
            allowed = self._appraiser.pays(total_speed) & self._appraiser.fits(groups)
            value = np.where(allowed, value, _FORBIDDEN)
        return np.asarray(value).reshape(len(kept), len(parts))


def _turns() -> Iterator[tuple[int, ...]]:
    """The places in turn, without end."""
    while True:
        yield from _PLACES
