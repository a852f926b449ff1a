"""The decision of each group: take turns, share plainly, or leave the GPUs to one member."""

from collections.abc import Sequence
from itertools import combinations
from typing import Final, Literal, NamedTuple

from muri.policies.cycle.bucket import worth_of
from muri.policies.hybrid.prediction import Predictor, weighted
from muri.policies.types import PlanJob

_GAIN: Final = 1e-9
"""Relative gain below which another way than interleaving is only a rounding error."""


class Way(NamedTuple):
    """One way of using a group's GPUs.

    Attributes:
        name: "interleave", "plain" or "alone".
        members: The jobs that run; those left out count nothing.
        speeds: Speed of each, 1 = as fast as alone.
        value: Σ worth × speed.
    """

    name: Literal["interleave", "plain", "alone"]
    members: tuple[PlanJob, ...]
    speeds: tuple[float, ...]
    value: float


class Choice(NamedTuple):
    """The three ways of a group.

    Attributes:
        interleave: All members take turns.
        plain: All of them, or the best two, side by side without turns; None where no pair's speeds are known.
        alone: The most worthwhile one.
        may_leave_out: Whether running one alone may be chosen.
    """

    interleave: Way
    plain: Way | None
    alone: Way
    may_leave_out: bool = True

    @property
    def best(self) -> Way:
        """The most valuable way; on a tie the one that the fewest changes lead to: interleaving, then plain."""
        chosen = self.interleave
        for way in (self.plain, self.alone if self.may_leave_out else None):
            if way is not None and way.value > chosen.value * (1 + _GAIN):
                chosen = way
        return chosen


def ways_of(jobs: Sequence[PlanJob], predictor: Predictor, *, may_leave_out: bool = True) -> Choice:
    """What a group could do, each with its weighted speed at the GPU-proportional share.

    Args:
        jobs: The members, in the ordering in which they would interleave.
        predictor: Their speeds.
        may_leave_out: Whether members may be left out: by running one alone, or the best two of several plainly.
    """
    members = tuple(jobs)
    speeds = predictor.usual(members, "interleave")
    first = min(members, key=lambda job: (-worth_of(job), job.submit_s, job.job_id))
    return Choice(
        Way("interleave", members, speeds, weighted(members, speeds)),
        _plain(members, predictor, may_leave_out=may_leave_out),
        Way("alone", (first,), (1.0,), worth_of(first)),
        may_leave_out,
    )


def _plain(members: tuple[PlanJob, ...], predictor: Predictor, *, may_leave_out: bool) -> Way | None:
    pairs = combinations(members, 2) if may_leave_out and len(members) > 2 else ()
    ways = []
    for jobs in (members, *pairs):
        speeds = predictor.plain(jobs)
        if speeds is not None:
            ways.append(Way("plain", jobs, speeds, weighted(jobs, speeds)))
    # Of equal ones the first, which leaves nobody out.
    return max(ways, key=lambda way: way.value, default=None)
