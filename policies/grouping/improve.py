"""Making given groups better: take a part out of every group at once, and hand the parts out anew, optimally.

Where there are too many kinds of jobs to list all groups, Algorithm 1 forms them in rounds and never takes a pair
apart again. Here every group gives up the members at some places (one member, or two), and the best way
to hand these parts out is an assignment problem. The old groups are one of its solutions, so the
value never falls. Places take turns until nothing improves any more.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from scipy.optimize import linear_sum_assignment

from muri.policies.grouping.appraisal import Appraiser
from muri.policies.grouping.kinds import Kinds
from muri.policies.grouping.problem import BucketProblem, Members
from muri.policies.speed.model import Floats

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


class Improver:
    """Exchanges members between the groups of one bucket.

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
    """The places in turn, for ever."""
    while True:
        yield from _PLACES
