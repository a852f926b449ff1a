"""Algorithm 1 of Muri: rounds of matching that merge jobs into groups."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Final, NamedTuple

import numpy as np

from muri.policies.grouping.problem import Appraiser, BucketProblem, Kind, Kinds, Members
from muri.policies.grouping.solvers import match_types, match_weights
from muri.policies.options import PolicyOptions
from muri.policies.speed import Floats, SpeedModel

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


class Rounds:
    """Algorithm 1 on one bucket, round by round."""

    def __init__(self, problem: BucketProblem, kinds: Kinds, options: PolicyOptions, model: SpeedModel) -> None:
        self._problem = problem
        self._options = options
        self._model = model
        self.kinds = kinds
        self._appraiser = Appraiser(kinds.kinds, options, model, problem.memory_limit_gib)
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

    def merge(self, *, as_needed: bool) -> None:
        """Run one round (`as_needed`: only the best pairs that it takes to fit the slots)."""
        merges = sorted(self._merges(), key=lambda item: (-round(item[0], 9), item[1].members))
        if as_needed:
            merges = merges[: max(0, len(self.units) - self._problem.slots)]
        gone = {job for _, unit in merges for job in unit.members}
        kept = [unit for unit in self.units if unit.members[0] not in gone]
        self.units = sorted([*kept, *(unit for _, unit in merges)], key=lambda unit: unit.members)

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
        appraisal = self._appraiser.appraise(groups)
        admitted = self._appraiser.pays(appraisal, unit.total_speed) & self._appraiser.fits(groups)
        gain = np.where(admitted, appraisal.value - unit.value, 0.0)
        best, (kind, job) = min(enumerate(most_urgent.items()), key=lambda item: (-round(gain[item[0]], 9), item[1][1]))
        if gain[best] <= 0:
            return unit
        total_speed, value = float(appraisal.total_speed[best]), float(appraisal.value[best])
        return Unit(tuple(sorted((*unit.members, job))), tuple(sorted((*unit.kinds, kind))), total_speed, value)

    def _single_jobs(self) -> list[Unit]:
        groups = np.arange(len(self.kinds.kinds), dtype=np.intp)[:, None]
        alone = self._appraiser.appraise(groups)
        units = [
            Unit((job,), (kind,), float(alone.total_speed[kind]), float(alone.value[kind]))
            for kind, jobs in enumerate(self.kinds.jobs)
            for job in jobs
        ]
        return sorted(units, key=lambda unit: unit.members)

    def _merges(self) -> list[tuple[float, Unit]]:
        """The units that matched ones become, and the weights of the matches."""
        kinds, merges = self.kinds.kinds, []
        block = _BLOCK_BY_WORTH if self._options.objective == "jct" else _BLOCK
        for start in range(0, len(self.units), block):
            units = self.units[start : start + block]
            alike = tuple(
                [_Alike(tuple([kinds[k] for k in unit.kinds]), unit.total_speed, unit.value) for unit in units]
            )
            matched = _matched if len(units) <= _REMEMBERED_UNITS else _matched.__wrapped__
            for pair in matched(alike, self._options, self._model, self._problem.memory_limit_gib):
                first, second = units[pair.first], units[pair.second]
                members, of_members = sorted(first.members + second.members), sorted(first.kinds + second.kinds)
                unit = Unit(tuple(members), tuple(of_members), pair.total_speed, pair.value)
                merges.append((pair.weight, unit))
        return merges


class _Alike(NamedTuple):
    """A unit as far as matching tells units apart."""

    kinds: tuple[Kind, ...]
    total_speed: float
    value: float


class _Pair(NamedTuple):
    """Two matched units by their places, and the figures of the unit that they become."""

    first: int
    second: int
    weight: float
    value: float
    total_speed: float


@lru_cache(maxsize=_REMEMBERED)
def _matched(
    units: tuple[_Alike, ...], options: PolicyOptions, model: SpeedModel, memory_limit_gib: float
) -> tuple[_Pair, ...]:
    """Match units, given by urgency, by their kinds alone: while a queue changes little, the same ones meet again."""
    kinds = sorted({kind for unit in units for kind in unit.kinds})
    number = {kind: index for index, kind in enumerate(kinds)}
    places_of: dict[tuple[int, ...], list[int]] = {}
    for place, unit in enumerate(units):
        places_of.setdefault(tuple([number[kind] for kind in unit.kinds]), []).append(place)
    listed = sorted(places_of.items())
    first_of_kind = [units[places[0]] for _, places in listed]
    appraiser = Appraiser(kinds, options, model, memory_limit_gib)
    figures = _figures([members for members, _ in listed], first_of_kind, appraiser, options)
    row = np.empty(len(units), dtype=np.intp)
    for index, (_, places) in enumerate(listed):
        row[places] = index
    pairs: Iterable[tuple[int, ...]]
    if options.matching == "certified" and len(units) >= max(_MANY, _REPEATS * len(listed)):
        # Kinds of units are matched; of a kind the most urgent units come first.
        queues = [iter(places) for _, places in listed]
        found = match_types(figures[0], [len(places) for _, places in listed]).pairs
        pairs = [(next(queues[one]), next(queues[other])) for one, other, count in found for _ in range(count)]
    else:
        pairs = match_weights(figures[0][np.ix_(row, row)], options.matching).pairs
    return tuple(_Pair(one, other, *figures[:, row[one], row[other]].tolist()) for one, other in pairs)


def _figures(
    members: Sequence[tuple[int, ...]], units: Sequence[_Alike], appraiser: Appraiser, options: PolicyOptions
) -> Floats:
    """Array (3, units, units): weight (NaN where two may not merge), value and total speed of any two units merged."""
    figures = np.full((3, len(units), len(units)), np.nan)
    total_speed, value = np.array([(unit.total_speed, unit.value) for unit in units]).T
    sizes = np.array([len(kinds) for kinds in members])
    of_size = {size: np.flatnonzero(sizes == size) for size in sorted(set(sizes.tolist()))}
    kinds_of = {size: np.array([kinds for kinds in members if len(kinds) == size], dtype=np.intp) for size in of_size}
    for small, large in combinations_with_replacement(of_size, 2):
        if small + large > options.max_group_size:
            continue
        one, other = np.indices((len(of_size[small]), len(of_size[large]))).reshape(2, -1)
        if small == large:
            one, other = one[one <= other], other[one <= other]
        first, second = of_size[small][one], of_size[large][other]
        groups = np.concatenate([kinds_of[small][one], kinds_of[large][other]], axis=1)
        appraisal = appraiser.appraise(groups)
        admitted = appraiser.pays(appraisal, np.maximum(total_speed[first], total_speed[second]))
        admitted &= appraiser.fits(groups)
        # The paper weighs a pair by its γ alone. Elsewhere it counts what merging adds to leaving the lesser one out.
        instead = 0.0 if options.objective == "efficiency" else np.maximum(value[first], value[second])
        weight = np.where(admitted, appraisal.value - instead, np.nan)
        merged = np.stack([weight, appraisal.value, appraisal.total_speed])
        figures[:, first, second] = figures[:, second, first] = merged
    return figures


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
