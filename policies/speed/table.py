"""Speeds of groups looked up: while the same few shapes meet again and again, each group is evaluated once."""

from functools import lru_cache
from typing import Final

import numpy as np

from muri.policies.speed.model import Evaluation, Indices, Shape, SpeedModel

_CELLS: Final = 4_096
"""Most groups of a table: those of 4 out of 8 shapes, and all pairs of 64. Of more, hardly all are ever asked for."""

_TABLES: Final = 128
"""Tables that are kept; each takes at most 200 KiB."""


def evaluate(model: SpeedModel, shapes: tuple[Shape, ...], groups: Indices) -> Evaluation:
    """What the model says of some groups, from a table where there are few shapes.

    Args:
        model: The speed model.
        shapes: The distinct shapes, sorted, so that the same ones find the same table.
        groups: As for `SpeedModel.evaluate`.
    """
    count, size = len(shapes), groups.shape[1]
    if count**size > _CELLS:
        return model.evaluate(shapes, groups)
    table = _table(model, shapes, size)
    row = groups[:, 0]
    for place in range(1, size):
        row = row * count + groups[:, place]
    return Evaluation(table.speed[row], table.efficiency[row], table.period_s[row])


@lru_cache(maxsize=_TABLES)
def _table(model: SpeedModel, shapes: tuple[Shape, ...], size: int) -> Evaluation:
    """All groups of a size in every order of their members, so that a look-up gives the very figures of the model."""
    return model.evaluate(shapes, np.indices((len(shapes),) * size).reshape(size, -1).T)
