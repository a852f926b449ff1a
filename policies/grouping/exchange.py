"""Exchanges of members that make groups better, and the joins of waiting jobs to what runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from muri.policies.grouping.problem import Appraiser, BucketProblem, Kind, Members
from muri.policies.options import PolicyOptions
from muri.policies.speed import Floats, Indices, SpeedModel

# Share of a new member's speed and value alone that its join must add to the unit's total speed and to the objective:
# with less it would mostly take from the others.
LEAST_GAIN: Final = 0.2
# Places whose members a unit gives up; with none it may take in a job that is left over. The other three pairs only
# swap the two halves.
_PLACES: Final = ((), (0, 1), (0, 2), (0, 3), (0,), (1,), (2,), (3,))
_CHUNK: Final = 250  # Units that exchange members with each other; the most urgent ones first
_EVALUATIONS: Final = 4_000_000  # Most groups to evaluate, about a second: a limit that is the same on every machine
_GAIN: Final = 1e-4  # Relative gain below which a turn counts as idle
_ROUNDING: Final = 1e-9
_FORBIDDEN: Final = -1e9
_URGENT: Final = 1e6  # Added for handing out a job that must not be left over; outweighs every value and no ban


@dataclass(frozen=True, slots=True)
class Assembly:
    """New groups by their most urgent member, the jobs that join each open unit, and the value of both."""

    groups: tuple[Members, ...]
    joins: tuple[Members, ...]
    value: float


class _Row(NamedTuple):
    """A unit, new or open, while members are exchanged.

    Attributes:
        members: The jobs that it takes in.
        base: Kinds of its running members, as indices.
        base_value: Their value.
        base_speed: Their total speed.
        memory_gib: GPU memory of all members.
        spare_mem_gib: Host memory for new members.
        closed_to: Jobs that must not join it.
        open_unit: Index of the open unit; None for a new group.
    """

    members: Members
    base: tuple[int, ...] = ()
    base_value: float = 0.0
    base_speed: float = 0.0
    memory_gib: float = float("inf")
    spare_mem_gib: float = float("inf")
    closed_to: frozenset[int] = frozenset()
    open_unit: int | None = None


class Exchange:
    """Exchanges members between the units of a bucket: every unit gives up a part, and the parts are assigned again.

    Algorithm 1 never takes a pair apart again. Here every unit gives up the members at some places (two, one or none),
    and the best way to distribute these parts and the jobs left over is an assignment problem. The old units are one of
    its solutions, so the value never falls. Places take turns until nothing improves. Running members of open units
    stay.

    Args:
        problem: The jobs, which of them are urgent, and the open units.
        options: Objective, margin and group size.
        model: The speed model.
    """

    def __init__(self, problem: BucketProblem, options: PolicyOptions, model: SpeedModel) -> None:
        self._problem = problem
        self._max_group_size = options.max_group_size
        running = (kind for unit in problem.open_units for kind in unit.members)
        self.kinds: tuple[Kind, ...] = tuple(sorted({*problem.jobs, *running}))
        number = {kind: index for index, kind in enumerate(self.kinds)}
        self._kind_of_job = np.array([number[kind] for kind in problem.jobs], dtype=np.intp)
        self._mem_gib = np.array(problem.mem_gib if any(problem.mem_gib) else ())
        # Units differ in their GPUs' memory, so rows have the limits.
        self.appraiser = Appraiser(self.kinds, options, model, float("inf"))
        self._open = self._open_rows()

    def improve(self, groups: Sequence[Members], left: Members) -> Assembly:
        """Exchange members between the new groups, and with the jobs left over, as long as the value rises."""
        # Units with the most urgent members first; what runs has a place already and comes after what starts.
        rows = [_Row(members, memory_gib=self._problem.memory_limit_gib) for members in sorted(groups)] + self._open
        done: list[_Row] = []
        rest, total, budget = left, 0.0, _EVALUATIONS
        for start in range(0, len(rows), _CHUNK):
            part, rest, value, budget = self._improved(rows[start : start + _CHUNK], rest, budget)
            done += part
            total += value
        joins = {row.open_unit: row.members for row in done if row.open_unit is not None}
        formed = sorted(row.members for row in done if row.open_unit is None and row.members)
        return Assembly(tuple(formed), tuple(joins[index] for index in range(len(self._open))), total)

    @property
    def base_value(self) -> float:
        """Value of the open units without new members."""
        return sum(row.base_value for row in self._open)

    def _open_rows(self) -> list[_Row]:
        number = {kind: index for index, kind in enumerate(self.kinds)}
        units = self._problem.open_units
        bases = [tuple(sorted([number[kind] for kind in unit.members])) for unit in units]
        alone: dict[tuple[int, ...], tuple[float, float]] = {}
        for size in sorted(set(map(len, bases))):
            listed = sorted({base for base in bases if len(base) == size})
            found = self.appraiser.appraise(np.array(listed, dtype=np.intp))
            alone |= zip(listed, zip(found.value.tolist(), found.total_speed.tolist(), strict=True), strict=True)
        return [
            _Row((), base, *alone[base], unit.memory_limit_gib, unit.spare_mem_gib, unit.closed_to, index)
            for index, (base, unit) in enumerate(zip(bases, units, strict=True))
        ]

    def _improved(self, rows: list[_Row], left: Members, budget: int) -> tuple[list[_Row], Members, float, int]:
        """Better units, the jobs then left over, the value, and the rest of the budget."""
        total = float(self._matrix(rows, [()])[:, 0].sum())
        idle = 0
        tried: set[tuple[Members, ...]] = set()
        for places in cycle(_PLACES):
            cost = len(rows) * (len(rows) + len(left))
            if idle == len(_PLACES) or budget < cost:
                break
            budget -= cost
            parts = _parts(rows, left, places)
            if parts in tried:
                # Where units are small, several turns give up the same parts.
                idle += 1
                continue
            tried.add(parts)
            changed, unused, value = self._handed_out(rows, left, places, parts)
            idle = 0 if value > total + _GAIN * max(abs(total), _ROUNDING) else idle + 1
            if value > total:
                rows, left, total = changed, unused, value
                tried.clear()
        return rows, left, total, budget

    def _handed_out(
        self, rows: Sequence[_Row], left: Members, places: tuple[int, ...], parts: tuple[Members, ...]
    ) -> tuple[list[_Row], Members, float]:
        """The units after the best exchange of the members at some places, the jobs then left over, and the value."""
        kept = [
            _with(row, tuple([job for place, job in enumerate(row.members) if place not in places])) for row in rows
        ]
        value = self._matrix(kept, parts)
        urgent = np.array([any(job < self._problem.slots for job in part) for part in parts])
        chosen, columns = linear_sum_assignment(value + _URGENT * urgent[None, :], maximize=True)
        changed = [
            _with(kept[row], tuple(sorted(kept[row].members + parts[column])))
            for row, column in zip(chosen, columns, strict=True)
        ]
        used = set(columns.tolist())
        unused = [job for column, part in enumerate(parts) if column not in used for job in part]
        rest = unused if len(places) < 2 else [*unused, *left]
        return changed, tuple(sorted(rest)), float(value[chosen, columns].sum())

    def _matrix(self, kept: Sequence[_Row], parts: Sequence[Members]) -> Floats:
        """Array (kept, parts): value of each unit with each part; very low where forbidden."""
        matrix = np.full((len(kept), len(parts)), _FORBIDDEN)
        kept_size = np.array([(len(row.base), len(row.members)) for row in kept]).reshape(-1, 2)
        part_size = np.array([len(members) for members in parts])
        for base, size_a in sorted({(base, size) for base, size in kept_size.tolist()}):
            rows = np.flatnonzero((kept_size == (base, size_a)).all(axis=1))
            for size_b in sorted(set(part_size.tolist())):
                columns = np.flatnonzero(part_size == size_b)
                if 0 < base + size_a + size_b <= self._max_group_size:
                    cells = self._values([kept[row] for row in rows.tolist()], [parts[c] for c in columns.tolist()])
                    matrix[np.ix_(rows, columns)] = cells
                elif base + size_a + size_b == 0 or size_a + size_b == 0:
                    matrix[np.ix_(rows, columns)] = 0.0
        return matrix

    def _values(self, kept: Sequence[_Row], parts: Sequence[Members]) -> Floats:
        """Array (kept, parts); all of either have the same size."""
        shape, base_size = (len(kept), len(parts)), len(kept[0].base)
        base = np.array([row.base for row in kept], dtype=np.intp).reshape(len(kept), -1)
        members = np.array([row.members for row in kept], dtype=np.intp).reshape(len(kept), -1)
        first = np.concatenate([base, self._kind_of_job[members]], axis=1)
        second = self._kind_of_job[np.array(parts, dtype=np.intp).reshape(len(parts), -1)]
        groups = np.concatenate([np.repeat(first, shape[1], axis=0), np.tile(second, (shape[0], 1))], axis=1)
        appraisal = self.appraiser.appraise(groups)
        value = appraisal.value - np.repeat([row.base_value for row in kept], shape[1])
        if groups.shape[1] == 1 or groups.shape[1] == base_size:
            return np.asarray(value).reshape(shape)
        allowed = appraisal.keeps_promises & self.appraiser.fits(groups)
        if base_size:
            base_speed = np.repeat([row.base_speed for row in kept], shape[1])
            allowed &= self._gains_enough(appraisal.total_speed - base_speed, value, groups[:, base_size:])
        else:
            allowed &= self.appraiser.pays(appraisal)
        allowed = allowed.reshape(shape) & self._takes(kept, parts, groups)
        return np.where(allowed, value.reshape(shape), _FORBIDDEN)

    def _gains_enough(self, speed: Floats, value: Floats, new: Indices) -> NDArray[np.bool_]:
        """Which joins add enough of their new members' speed and value alone; `new`: array (n, p) of kinds."""
        least = LEAST_GAIN * self.appraiser.coefficient[new].sum(axis=1)
        return np.asarray((speed >= LEAST_GAIN * new.shape[1] - _ROUNDING) & (value >= least * (1 - _ROUNDING)))

    def _takes(self, kept: Sequence[_Row], parts: Sequence[Members], groups: Indices) -> NDArray[np.bool_]:
        """Array (kept, parts): which parts each unit has the memory for, and is not closed to.

        `groups` is an array (kept · parts, size): kinds of the members of each unit with each part.
        """
        takes = np.ones((len(kept), len(parts)), dtype=np.bool_)
        limits_gib = np.array([[row.memory_gib] for row in kept])
        if np.isfinite(limits_gib).any():
            takes &= self.appraiser.memory_gib(groups).reshape(takes.shape) <= limits_gib
        if len(self._mem_gib):
            taken, wanted = self._needs_gib([row.members for row in kept]), self._needs_gib(parts)
            takes &= taken[:, None] + wanted <= np.array([[row.spare_mem_gib] for row in kept]) + _ROUNDING
        if any(row.closed_to for row in kept):
            takes &= np.array([[row.closed_to.isdisjoint(part) for part in parts] for row in kept])
        return takes

    def _needs_gib(self, parts: Sequence[Members]) -> Floats:
        """Array (parts,): host memory of parts of equal size."""
        return np.asarray(self._mem_gib[np.array(parts, dtype=np.intp)].sum(axis=1))


def _with(row: _Row, members: Members) -> _Row:
    return _Row(members, *row[1:])


def _parts(rows: Sequence[_Row], left: Members, places: tuple[int, ...]) -> tuple[Members, ...]:
    """The members that each unit gives up in a turn and, where that is one at most, the jobs left over."""
    given = [tuple([job for place, job in enumerate(row.members) if place in places]) for row in rows]
    return tuple(given + [(job,) for job in left] if len(places) < 2 else given)
