"""Speed models by name, and those in which members rotate: Muri's Eq. 3, and its public simulator's formula."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, permutations
from typing import ClassVar, Final

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE, ORDERINGS, SPEED_MODELS, OptionsError
from muri.policies.speed import (
    Evaluation,
    Fair,
    Figures,
    Floats,
    Indices,
    Measured,
    Shape,
    SpeedModel,
    SpeedModelError,
    alone,
    checked_groups,
    chunks,
    figures_of,
    one_group,
)
from muri.policies.traits import InterferenceTable
from muri.profiler.records import STAGES

MAX_RESOURCES: Final = 6  # Every ordering is tried, and there are (k − 1)! of k members: 120 for six
Positions = tuple[int, ...]  # Position of each member in the rotation of k slots
_TIE: Final = 1e-12  # Relative difference below which two periods count as equal, so that rounding decides nothing


@dataclass(frozen=True, slots=True)
class Lockstep:
    """All members advance one iteration per period of the chosen ordering (Muri, Eq. 3).

    No member is faster than alone: where stages cover only part of an iteration, the longest iteration bounds the
    period from below.

    Attributes:
        ordering: "best" takes the ordering with the shortest period, "worst" the longest.
    """

    name: ClassVar = "lockstep"
    ordering: str = "best"

    def __post_init__(self) -> None:
        """Refuse an unknown ordering."""
        if self.ordering not in ORDERINGS:
            raise OptionsError(f"ordering is {self.ordering!r}; valid are: {', '.join(ORDERINGS)}")

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of at most as many members as resources; see `SpeedModel`.

        γ and the period count the period as no shorter than the longest iteration.
        """
        figures = figures_of(shapes, max_resources=MAX_RESOURCES)
        checked = checked_groups(groups, len(shapes), figures.resource_count)
        if checked.shape[1] == 1:
            return alone(figures, checked)
        count, members = checked.shape
        ways = placements(members, figures.resource_count)
        turns = [_relative(positions, figures.resource_count) for positions in ways]
        # One row per member keeps writes contiguous; the caller sees the transposed view.
        speed = np.empty((members, count))
        efficiency = np.empty(count)
        period = np.empty(count)
        for part, index in chunks(checked):
            chosen = _chosen_periods(figures, index, turns, worst=self.ordering == "worst")
            _pace(figures, index, chosen, (speed[:, part], efficiency[part], period[part]))
        return Evaluation(speed.T, efficiency, period)

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """Indices of the members by their position in the rotation, in the first of several equally good ways."""
        placed = _positions(tuple(members), self.ordering == "worst")
        return tuple(sorted(range(len(placed)), key=placed.__getitem__))


@lru_cache(maxsize=64)
def placements(members: int, resources: int) -> tuple[Positions, ...]:
    """All ways of placing members in the rotation, without gaps, that can differ in their period.

    Turning all members by a position changes nothing, so of ways that differ by a turn only one is listed.
    """
    inverse = (tuple(sorted(range(members), key=order.__getitem__)) for order in permutations(range(members)))
    listed: dict[Positions, Positions] = {}
    for positions in inverse:
        listed.setdefault(_relative(positions, resources), positions)
    return tuple(listed.values())


def _relative(positions: Positions, resources: int) -> Positions:
    """The same placement, turned so that the first member is at position 0."""
    return tuple((position - positions[0]) % resources for position in positions)


def _chosen_periods(figures: Figures, index: Indices, turns: Sequence[Positions], *, worst: bool) -> Floats:
    """T of Eq. 3 of the best or worst placement, for a chunk of groups."""
    resources = figures.resource_count
    stages = [_twice_around(figures.stage_s, row) for row in index]
    slots = np.empty((resources, index.shape[1]))
    total = np.empty(index.shape[1])
    chosen = np.full(index.shape[1], -np.inf if worst else np.inf)
    pick = np.maximum if worst else np.minimum
    for positions in turns:
        np.maximum(stages[0][:resources], _from_position(stages[1], positions[1]), out=slots)
        for stage_s, position in zip(stages[2:], positions[2:], strict=True):
            np.maximum(slots, _from_position(stage_s, position), out=slots)
        np.add.reduce(slots, axis=0, out=total)
        pick(chosen, total, out=chosen)
    return chosen


def _twice_around(stage_s: Floats, row: Indices) -> Floats:
    """A member's stages in each group, k rows and all but the last again: any k in turn are a view."""
    resources = len(stage_s)
    stages = np.empty((2 * resources - 1, len(row)))
    # The indices are checked; mode "clip" only spares NumPy a copy of the result.
    np.take(stage_s, row, axis=1, out=stages[:resources], mode="clip")
    stages[resources:] = stages[: resources - 1]
    return stages


def _from_position(stages: Floats, position: int) -> Floats:
    """The stages of a member at this position in slots 0 to k − 1."""
    return stages[position : position + (len(stages) + 1) // 2]


def _pace(figures: Figures, index: Indices, chosen: Floats, out: tuple[Floats, Floats, Floats]) -> None:
    """Write speeds, γ and period of a chunk of groups whose T of Eq. 3 is given."""
    speed, efficiency, period = out
    for row, of_member in zip(index, speed, strict=True):
        np.take(figures.iteration_s, row, out=of_member, mode="clip")
    np.max(speed, axis=0, out=period)
    np.maximum(period, chosen, out=period)
    speed /= period
    efficiency[:] = figures.busy_s[index[0]]
    for row in index[1:]:
        efficiency += figures.busy_s[row]
    efficiency /= period
    efficiency /= figures.resource_count
    np.minimum(efficiency, 1.0, out=efficiency)


@lru_cache(maxsize=4096)
def _positions(members: tuple[Shape, ...], worst: bool) -> Positions:
    """The first placement whose period is the extreme one; a plan asks for the same few groups many times."""
    figures = figures_of(members, max_resources=MAX_RESOURCES)
    checked_groups(one_group(len(members)), len(members), figures.resource_count)
    ways = placements(len(members), figures.resource_count)
    stage_s = [member.stage_s for member in members]
    return ways[first_extreme([period_s(stage_s, positions) for positions in ways], worst=worst)]


def period_s(stage_s: Sequence[Sequence[float]], positions: Sequence[int] | None = None) -> float:
    """Period of a group: T = Σ_{j<k} max_i t_i^{(i+j) mod k} (Muri, section 4.2, Eq. 3).

    In slot j of a period the member at position i holds resource (i + j) mod k, so a slot lasts as long as the slowest
    of its stages.

    Args:
        stage_s: For each member, its seconds on each of the k resources.
        positions: Distinct positions of the members in the rotation; by default 0, 1, … as in the paper.
    """
    resources = len(stage_s[0])
    placed = list(zip(range(len(stage_s)) if positions is None else positions, stage_s, strict=True))
    return sum(max(member[(position + slot) % resources] for position, member in placed) for slot in range(resources))


def first_extreme(periods: Sequence[float], *, worst: bool) -> int:
    """Index of the first of the shortest periods (or the longest), those that differ by rounding counting as equal."""
    if worst:
        limit = max(periods) * (1 - _TIE)
        return next(index for index, period in enumerate(periods) if period >= limit)
    limit = min(periods) * (1 + _TIE)
    return next(index for index, period in enumerate(periods) if period <= limit)


ALONE_OVERHEAD: Final = 1.015  # The public simulator's factor on every job's own iteration time
# Its factors on the period of two, three and four members: 1.310, 1.478 and 1.350.
MULTIPLIERS: Final = (1.33 / ALONE_OVERHEAD, 1.5 / ALONE_OVERHEAD, 1.37 / ALONE_OVERHEAD)

_SLOTS: Final = 4
_STEPS: Final = 2 * _SLOTS
_CONVERGED: Final = 1e-3
_FEW: Final = 256  # Groups of which the numbers take less time than the calls


@dataclass(frozen=True, slots=True)
class Reference:
    """The public Muri simulator's formula, to reproduce its published results.

    All members advance one iteration per period of a pipeline of four slots over three resources: storage and CPU are
    one resource, the loads of two jobs overlap, and factors that the paper does not mention multiply the period.

    Attributes:
        ordering: "best" takes the permutation with the shortest period, "worst" the longest.
        multipliers: Factors on the period of two, three and four members.
        capped: Whether no member is faster than alone; False reproduces the simulator to the digit.
    """

    name: ClassVar = "reference"
    ordering: str = "best"
    multipliers: tuple[float, float, float] = MULTIPLIERS
    capped: bool = True

    def __post_init__(self) -> None:
        """Refuse an unknown ordering, and multipliers that are not three finite numbers above 0."""
        if self.ordering not in ORDERINGS:
            raise OptionsError(f"ordering is {self.ordering!r}; valid are: {', '.join(ORDERINGS)}")
        if len(self.multipliers) != MAX_GROUP_SIZE - 1 or not all(0 < factor < np.inf for factor in self.multipliers):
            raise SpeedModelError(
                f"multipliers are {self.multipliers}; give three finite numbers above 0, for 2, 3 and 4"
            )

    def evaluate(self, shapes: Sequence[Shape], groups: Indices, believed: Sequence[Shape] | None = None) -> Evaluation:
        """Evaluate many groups of up to four jobs with the four stages of Muri; see `SpeedModel`.

        Args:
            shapes: The jobs.
            groups: As in `SpeedModel`.
            believed: Shapes by which the permutation is chosen; None: the same.
        """
        figures = _figures(shapes)
        checked = checked_groups(groups, len(shapes), MAX_GROUP_SIZE)
        count, members = checked.shape
        if members == 1:
            return alone(figures, checked)
        resource_s = _three_resources(figures)
        believed_s = resource_s if believed is None else _three_resources(_figures(believed))
        speed = np.empty((members, count))
        efficiency = np.empty(count)
        period = np.empty(count)
        for part, index in chunks(checked):
            of, by = ([times_s[:, row] for row in index] for times_s in (resource_s, believed_s))
            chosen = self._periods(of, of if believed is None else by) * self.multipliers[members - 2]
            # Members that use no resource have no period; they don't slow each other down.
            period[part] = np.where(chosen > 0, chosen, figures.iteration_s[index].max(axis=0))
            speed[:, part] = figures.iteration_s[index] / period[part]
            efficiency[part] = figures.busy_s[index].sum(axis=0) / (_SLOTS * period[part])
        if self.capped:
            np.minimum(speed, 1.0, out=speed)
        return Evaluation(speed.T, np.minimum(efficiency, 1.0), period)

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The first permutation with the shortest (or longest) period."""
        return _order(tuple(members), self.ordering == "worst")

    def _periods(self, members: Sequence[Floats], believed: Sequence[Floats]) -> Floats:
        """T of each group in the permutation whose believed T is best or worst."""
        periods = _ways(members)
        if believed is not members:
            judged = _ways(believed)
            first = judged.argmax(axis=0) if self.ordering == "worst" else judged.argmin(axis=0)
            return np.asarray(np.take_along_axis(periods, first[None], axis=0)[0])
        return np.asarray(periods.max(axis=0) if self.ordering == "worst" else periods.min(axis=0))


def _ways(members: Sequence[Floats]) -> Floats:
    """Array (ways, groups): T of each permutation and, of two jobs, half a turn apart."""
    ways, groups = list(permutations(members)), members[0].shape[1]
    if groups <= _FEW:  # all permutations at once
        ways = [tuple(np.concatenate(jobs, axis=1) for jobs in zip(*ways, strict=True))]
    periods = np.concatenate([pipeline_period(way) for way in ways]).reshape(-1, groups)
    return np.vstack([periods, _half_a_turn_apart(*members)]) if len(members) == 2 else periods


@lru_cache(maxsize=4096)
def _order(members: tuple[Shape, ...], worst: bool) -> tuple[int, ...]:
    """The first permutation with the extreme period; a plan asks for the same few groups many times."""
    resource_s = _three_resources(_figures(members))
    checked_groups(one_group(len(members)), len(members), MAX_GROUP_SIZE)
    ways = list(permutations(range(len(members))))
    periods = pipeline_period([resource_s[:, list(at_position)] for at_position in zip(*ways, strict=True)])
    return ways[first_extreme(periods.tolist(), worst=worst)]


def _figures(shapes: Sequence[Shape]) -> Figures:
    figures = figures_of(shapes)
    if figures.resource_count != len(STAGES):
        raise SpeedModelError(
            f"shapes have {figures.resource_count} stages; the reference model needs {len(STAGES)}: {', '.join(STAGES)}"
        )
    return figures


def _three_resources(figures: Figures) -> Floats:
    """The simulator's resources: load with preprocess, propagate, synchronize."""
    return np.stack([figures.stage_s[0] + figures.stage_s[1], figures.stage_s[2], figures.stage_s[3]])


def _half_a_turn_apart(first: Floats, second: Floats) -> Floats:
    """Period of two jobs of which one loads while the other computes and communicates."""
    period: Floats = np.maximum(first[0], second[1] + second[2]) + np.maximum(second[0], first[1] + first[2])
    return period


def pipeline_period(members: Sequence[Floats]) -> Floats:
    """T of a permutation: the pipeline's period once two in a row agree, else its second turn.

    Args:
        members: By position, an array (3, groups) of seconds on load with preprocess, propagate and synchronize.

    Returns:
        Array (groups,) of seconds, without a multiplier.
    """
    end = _slot_ends(members)
    turn = [end[step + 1] - end[step + 1 - _SLOTS] for step in range(_SLOTS - 1, _STEPS)]
    period = turn[-1].copy()
    # From the last to the first, so that the earliest agreement is what remains.
    for before, after in reversed(list(pairwise(turn))):
        agree = np.abs(after - before) <= _CONVERGED * np.maximum(np.abs(after), np.abs(before))
        np.copyto(period, after, where=agree)
    return period


def _slot_ends(members: Sequence[Floats]) -> list[Floats]:
    """The end of each slot of the first two turns; a load spans two slots, empty positions are skipped."""
    end = [np.zeros(members[0].shape[1])]
    for step in range(_STEPS):
        latest = np.zeros_like(end[0])
        network, gpu, load = ((step + ahead) % _SLOTS for ahead in (1, 2, 3))
        if network < len(members):
            np.maximum(latest, end[step] + members[network][2], out=latest)
        if gpu < len(members):
            np.maximum(latest, end[step] + members[gpu][1], out=latest)
        if step > 0 and load < len(members):
            np.maximum(latest, end[step - 1] + members[load][0], out=latest)
        end.append(latest)
    return end


def speed_model(name: str, *, ordering: str = "best", table: InterferenceTable | None = None) -> SpeedModel:
    """Make a speed model.

    Args:
        name: One of `muri.policies.options.SPEED_MODELS`.
        ordering: "best" or "worst"; the model "fair" has no ordering and ignores it.
        table: Measured pairs, which only "measured" needs.

    Raises:
        OptionsError: The name or the ordering is unknown.
        SpeedModelError: "measured" needs a table.
    """
    match name:
        case "lockstep":
            return Lockstep(ordering)
        case "fair":
            return Fair()
        case "reference":
            return Reference(ordering)
        case "measured":
            if table is None:
                raise SpeedModelError(
                    "speed model 'measured' needs a table of measured pairs; give one, or take 'lockstep' or 'fair'"
                )
            # Few sites measure every pair: lockstep, the paper's model, gives the speeds of the others.
            return Measured(table, Lockstep(ordering))
    raise OptionsError(f"speed_model is {name!r}; valid are: {', '.join(SPEED_MODELS)}")
