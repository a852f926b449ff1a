"""Measured interference: tables of the speeds of pairs, the text they come in, and a speed model that looks them up."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.speed.model import (
    Evaluation,
    Floats,
    Indices,
    Shape,
    SpeedModel,
    alone,
    checked_groups,
    figures_of,
    used_share,
)
from muri.policies.speed.pairs import InterferenceTable

_UNKNOWN: Final = -1
"""Stands for a model that the table doesn't have."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds from a table of pairs, and from another model where the table has none.

    For three or four members a member's speed is the product of its speeds with each of the others. That is
    an approximation: it takes the slow-downs for independent, which overstates them where
    two partners want the same resource at different times, and understates them where memory or
    caches give way. Within a group of which only some pairs were measured, the other model gives the
    speeds of the missing pairs; a group without any measured pair is left to it as a whole.

    Attributes:
        table: The measured pairs.
        fallback: Model for what the table doesn't have, and for the ordering.
    """

    table: InterferenceTable
    fallback: SpeedModel

    @property
    def name(self) -> str:
        """The name by which options select the model."""
        return "measured"

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of up to four members, their models looked up in the table; see `SpeedModel`.

        Returns:
            Speeds and γ, here the mean over resources of Σ_i s_i · u_i^j; there is no period (NaN).
        """
        figures = figures_of(shapes)
        checked = checked_groups(groups, len(shapes), MAX_GROUP_SIZE)
        if checked.shape[1] == 1:
            return alone(figures, checked, has_period=False)
        speed = self._speeds(shapes, checked)
        return Evaluation(speed, used_share(figures, checked, speed), np.full(len(checked), np.nan))

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """What the other model says: a table of speeds knows no ordering."""
        return self.fallback.order(members)

    def _speeds(self, shapes: Sequence[Shape], groups: Indices) -> Floats:
        by_model = PairLookup.of(self.table, shapes)
        pairs = list(combinations(range(groups.shape[1]), 2))
        known = [by_model.known(groups[:, pair]) for pair in pairs]
        any_known = np.logical_or.reduce(known)
        speed = np.ones(groups.shape)
        for pair, measured in zip(pairs, known, strict=True):
            both = groups[:, pair]
            missing = any_known & ~measured
            of_measured, of_missing = by_model.speeds(both[measured]), self._fallback_speeds(shapes, both[missing])
            for column, member in enumerate(pair):
                speed[measured, member] *= of_measured[:, column]
                speed[missing, member] *= of_missing[:, column]
        speed[~any_known] = self._fallback_speeds(shapes, groups[~any_known])
        return speed

    def _fallback_speeds(self, shapes: Sequence[Shape], groups: Indices) -> Floats:
        if len(groups) == 0:
            return np.ones(groups.shape)
        return self.fallback.evaluate(shapes, groups).speed


@dataclass(frozen=True, slots=True)
class PairLookup:
    """The part of a table that concerns given shapes, as arrays.

    Attributes:
        model_of: Array (shapes,): number of each shape's model, or `_UNKNOWN`.
        speed: Array (models, models): speed of the first next to the second; NaN where not measured.
    """

    model_of: Indices
    speed: Floats

    @staticmethod
    def of(table: InterferenceTable, shapes: Sequence[Shape]) -> "PairLookup":
        """What a table says of the models of these shapes."""
        present = sorted({shape.model for shape in shapes} & table.models)
        number = {model: index for index, model in enumerate(present)}
        speed = np.full((len(present) + 1, len(present) + 1), np.nan)
        for (model_a, model_b), (speed_a, speed_b) in table.pairs.items():
            if model_a in number and model_b in number:
                speed[number[model_a], number[model_b]] = speed_a
                speed[number[model_b], number[model_a]] = speed_b
        return PairLookup(np.array([number.get(shape.model, _UNKNOWN) for shape in shapes], dtype=np.intp), speed)

    def known(self, pairs: Indices) -> NDArray[np.bool_]:
        """Which of these pairs of shapes were measured; the last row and column stand for unknown models."""
        models = self.model_of[pairs]
        return np.isfinite(self.speed[models[:, 0], models[:, 1]])

    def speeds(self, pairs: Indices) -> Floats:
        """Array (n, 2) of the speeds of both."""
        models = self.model_of[pairs]
        return np.stack([self.speed[models[:, 0], models[:, 1]], self.speed[models[:, 1], models[:, 0]]], axis=1)
