"""The public Muri simulator's formula for the speed of a group, to reproduce its published results.

It treats storage and CPU as one resource, lets the loads of two jobs overlap, and multiplies the period by
factors that the paper does not mention, so it is not a model to plan a real cluster with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, permutations
from typing import Final

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE, ORDERINGS, OptionsError
from muri.policies.speed.lockstep import first_extreme
from muri.policies.speed.model import (
    Evaluation,
    Figures,
    Floats,
    Indices,
    Shape,
    SpeedModelError,
    alone,
    checked_groups,
    chunks,
    figures_of,
    member_rows,
    one_group,
)
from muri.profiler.records import STAGES

ALONE_OVERHEAD: Final = 1.015
"""What the simulator multiplies every job's own iteration time by."""

MULTIPLIERS: Final = (1.33 / ALONE_OVERHEAD, 1.5 / ALONE_OVERHEAD, 1.37 / ALONE_OVERHEAD)
"""The simulator's factors on the period of two, three and four members: 1.310, 1.478 and 1.350."""

MULTIPLIERS_NO_BLOSSOM: Final = (*MULTIPLIERS[:2], 1.3 / ALONE_OVERHEAD)
"""The same for its variant without Blossom: 1.281 for four members."""

_SLOTS: Final = 4
_STEPS: Final = 2 * _SLOTS
_CONVERGED: Final = 1e-3
_FEW: Final = 256
"""Groups of which the numbers take less time than the calls."""


@dataclass(frozen=True, slots=True)
class Reference:
    """All members advance one iteration per period of a pipeline of four slots over three resources.

    Attributes:
        ordering: "best" takes the permutation with the shortest period, "worst" the longest.
        multipliers: Factors on the period of two, three and four members.
        capped: Whether no member is faster than alone. The simulator has no such limit: take False to reproduce
            it to the digit.
    """

    ordering: str = "best"
    multipliers: tuple[float, float, float] = MULTIPLIERS
    capped: bool = True

    def __post_init__(self) -> None:
        """Refuse parameters that make no sense.

        Raises:
            OptionsError: The ordering is unknown.
            SpeedModelError: There are not three multipliers above 0.
        """
        if self.ordering not in ORDERINGS:
            raise OptionsError(f"ordering is {self.ordering!r}; valid are: {', '.join(ORDERINGS)}")
        if len(self.multipliers) != MAX_GROUP_SIZE - 1 or not all(0 < factor < np.inf for factor in self.multipliers):
            raise SpeedModelError(
                f"multipliers are {self.multipliers}; give three finite numbers above 0, for 2, 3 and 4"
            )

    @property
    def name(self) -> str:
        """The name by which options select the model."""
        return "reference"

    def evaluate(self, shapes: Sequence[Shape], groups: Indices, believed: Sequence[Shape] | None = None) -> Evaluation:
        """Evaluate many groups of up to four jobs with the four stages of Muri; see `SpeedModel`.

        Args:
            shapes: What the jobs are.
            groups: As in `SpeedModel`.
            believed: What each is taken for when the permutation is chosen; None: the same.

        Returns:
            Speeds, γ = Σ resource time / (4 T), and T with its multiplier.
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
        for part in chunks(count):
            index = member_rows(checked, part)
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
        """The first permutation with the shortest (or longest) period.

        Raises:
            ProfileError: A shape has an impossible time.
            SpeedModelError: There are no members, more than four, or other than four stages.
        """
        return _order(tuple(members), self.ordering == "worst")

    def _periods(self, members: Sequence[Floats], believed: Sequence[Floats]) -> Floats:
        """T of each group in the permutation whose believed T is best or worst; see `_ways`."""
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
    """When each slot of the first two turns ends; a load spans two slots, empty positions are skipped."""
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
