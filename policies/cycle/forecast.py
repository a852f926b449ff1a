"""What the speed model says of groups: each distinct set of members is asked for once, all together."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from muri.policies.cycle.queue import Contender
from muri.policies.speed.model import Shape, SpeedModel

Members = tuple[Contender, ...]
"""The members of one group by rank; all of them have a shape."""

Composition = tuple[int, ...]
"""The members' shapes as indices, ascending."""


class Forecast(NamedTuple):
    """How a group gets on; members are sorted by shape, then by rank.

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


class Forecasts:
    """Forecasts by composition.

    Args:
        model: The speed model.
        shapes: The distinct shapes that contenders refer to.
    """

    def __init__(self, model: SpeedModel, shapes: Sequence[Shape]) -> None:
        self._model = model
        self._shapes = shapes
        self._known: dict[Composition, Forecast] = {}

    def prepare(self, groups: Iterable[Members]) -> None:
        """Ask for all of these groups at once."""
        by_size: dict[int, set[Composition]] = {}
        for group in groups:
            composition = tuple(sorted(shapes_of(group)))
            if composition not in self._known:
                by_size.setdefault(len(composition), set()).add(composition)
        for new in by_size.values():
            self._ask(sorted(new))

    def of(self, group: Members) -> tuple[Members, Forecast]:
        """The members sorted as the forecast has them, and the forecast."""
        shapes = shapes_of(group)
        composition = tuple(sorted(shapes))
        if composition not in self._known:
            self._ask([composition])
        members = group
        if composition != shapes:
            members = tuple(member for _, _, member in sorted(zip(shapes, range(len(group)), group, strict=True)))
        return members, self._known[composition]

    def _ask(self, compositions: Sequence[Composition]) -> None:
        answer = self._model.evaluate(self._shapes, np.array(compositions, dtype=np.intp))
        speeds, gammas = answer.speed.tolist(), answer.efficiency.tolist()
        periods = np.nan_to_num(answer.period_s, nan=0.0).tolist()
        for number, composition in enumerate(compositions):
            order = self._model.order([self._shapes[index] for index in composition])
            self._known[composition] = Forecast(order, tuple(speeds[number]), gammas[number], periods[number])


def shapes_of(group: Members) -> Composition:
    """Indices of the members' shapes."""
    return tuple([member.shape for member in group if member.shape is not None])
