"""Speeds of members that run side by side without turns, and a model that takes the better way for each group."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.speed.figures import checked_groups, figures_of, used_share
from muri.policies.speed.interference import InterferenceTable
from muri.policies.speed.measured import PairLookup
from muri.policies.speed.model import Evaluation, Floats, Indices, Shape, SpeedModel

_GAIN = 1e-9
"""Relative gain below which plain sharing is no better than interleaving."""


@dataclass(frozen=True, slots=True)
class BetterOfBoth:
    """Of each group the speeds of interleaving or of plain sharing, whichever add up to more.

    So groups are chosen knowing that they may run either way. How a group really runs is decided afterwards, by the
    worth of its members.

    Attributes:
        interleaved: Speeds of members that take turns.
        table: Speeds of pairs without turns.
    """

    interleaved: SpeedModel
    table: InterferenceTable

    @property
    def name(self) -> str:
        """The name by which options select the model that speeds come from otherwise."""
        return self.interleaved.name

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of equal size at once.

        Args:
            shapes: The distinct shapes; their models are looked up in the table.
            groups: Array (n, p) of indices into `shapes`, p ≤ 4.

        Returns:
            For a group that is better off plain, γ is the mean over resources of Σ_i s_i · u_i^j, and there is no
            period (NaN).

        Raises:
            ProfileError: A shape has an impossible time.
            SpeedModelError: Groups or shapes are malformed.
        """
        answer = self.interleaved.evaluate(shapes, groups)
        checked = checked_groups(groups, len(shapes), MAX_GROUP_SIZE)
        if checked.shape[1] == 1:
            return answer
        plain = plain_speeds(self.table, shapes, checked)
        # Where a pair is unknown the sum is NaN, and no comparison with it is true.
        better = plain.sum(axis=1) > answer.speed.sum(axis=1) * (1 + _GAIN)
        if not better.any():
            return answer
        speed = np.where(better[:, None], plain, answer.speed)
        used = used_share(figures_of(shapes), checked, speed)
        return Evaluation(speed, np.where(better, used, answer.efficiency), np.where(better, np.nan, answer.period_s))

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """What the model of interleaving says: without turns there is no ordering."""
        return self.interleaved.order(members)


def plain_speeds(table: InterferenceTable, shapes: Sequence[Shape], groups: Indices) -> Floats:
    """Array (n, p): each member's product of its pair speeds with all others; NaN where the table lacks one."""
    pairs = PairLookup.of(table, shapes)
    speed = np.ones(groups.shape)
    for first, second in combinations(range(groups.shape[1]), 2):
        of_both = pairs.speeds(groups[:, (first, second)])
        speed[:, first] *= of_both[:, 0]
        speed[:, second] *= of_both[:, 1]
    return speed


def side_by_side(table: InterferenceTable | None, models: Sequence[str]) -> tuple[float, ...] | None:
    """Speed of each of these models beside the others, without turns; None where a pair is unknown."""
    speed = dict.fromkeys(range(len(models)), 1.0)
    for index, other in permutations(speed, 2):
        found = None if table is None else table.speeds(models[index], models[other])
        if found is None:
            return None
        speed[index] *= found[0]
    return tuple(speed.values())
