"""Speed models by name, with two of them: fair sharing, and measured pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from muri.policies.options import MAX_GROUP_SIZE, SPEED_MODELS
from muri.policies.speed.lockstep import Lockstep, Reference
from muri.policies.speed.model import (
    Evaluation,
    Floats,
    Indices,
    Shape,
    SpeedModel,
    SpeedModelError,
    UnknownSpeedModelError,
    alone,
    checked_groups,
    chunks,
    figures_of,
    used_share,
)
from muri.policies.traits import InterferenceTable

MAX_MEMBERS: Final = 64  # Progressive filling takes as many steps as there are members; far more than can share a GPU


@dataclass(frozen=True, slots=True)
class Fair:
    """Max-min fair normalized speeds of a work-conserving runtime.

    u_i^j is the share of its time alone during which member i uses resource j. Speeds s_i ≤ 1 are possible when Σ_i s_i
    · u_i^j ≤ 1 for every resource j. All speeds rise together; when a resource is full, its users keep their speed and
    the others rise further. Waiting for a stage in progress is taken to cost nothing: a runtime comes close with short
    stages.
    """

    name: ClassVar = "fair"

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of any number of resources; γ is the mean over resources of Σ_i s_i · u_i^j."""
        figures = figures_of(shapes)
        checked = checked_groups(groups, len(shapes), MAX_MEMBERS)
        count, members = checked.shape
        if members == 1:
            return alone(figures, checked, has_period=False)
        share = figures.share
        speed = np.empty((members, count))
        for part, index in chunks(checked):
            speed[:, part] = _filled([share[:, row] for row in index])
        return Evaluation(speed.T, used_share(figures, checked, speed.T), np.full(count, np.nan))

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The identity: the member that is furthest behind goes first."""
        return tuple(range(len(members)))


def _filled(share: Sequence[Floats]) -> Floats:
    """Array (members, groups) of max-min fair speeds, from each member's array (resources, groups) of u_i^j."""
    speed = np.zeros((len(share), share[0].shape[1]))
    rising = np.ones_like(speed)  # 1 while a member's speed still rises, then 0
    level = np.zeros(speed.shape[1])
    while rising.any():
        level_of = _full_at(share, speed, rising)
        # Rounding in what is left of a nearly full resource must not lower a level reached before.
        level = np.maximum(level, np.minimum(1.0, level_of.min(axis=0)))
        full = level_of <= level
        for member, uses in enumerate(share):
            np.copyto(speed[member], level, where=rising[member] > 0)
            rising[member, (full & (uses > 0)).any(axis=0) | (level >= 1)] = 0
    return speed


def _full_at(share: Sequence[Floats], speed: Floats, rising: Floats) -> Floats:
    """Array (resources, groups): the common speed at which each resource is full; infinite from 1 on."""
    used = np.zeros_like(share[0])
    wanted = np.zeros_like(share[0])
    for uses, of_member, still in zip(share, speed, rising, strict=True):
        used += uses * (of_member * (1 - still))
        wanted += uses * still
    free = 1 - used
    return np.divide(free, wanted, out=np.full_like(used, np.inf), where=wanted > np.maximum(free, 0))


_UNKNOWN: Final = -1  # Stands for a model that the table doesn't have


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds from a table of pairs, and from another model where the table has none.

    For three or four members a member's speed is the product of its speeds with each of the others. That takes the
    slow-downs for independent, which overstates them where two partners want the same resource at different times, and
    understates them where memory or caches give way. Missing pairs of a group get their speeds from the other model; so
    does a group without any measured pair as a whole.

    Attributes:
        table: The measured pairs.
        fallback: Model for missing pairs, and for the ordering.
    """

    name: ClassVar = "measured"
    table: InterferenceTable
    fallback: SpeedModel

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of up to four members; γ is the mean over resources of Σ_i s_i · u_i^j."""
        figures = figures_of(shapes)
        checked = checked_groups(groups, len(shapes), MAX_GROUP_SIZE)
        if checked.shape[1] == 1:
            return alone(figures, checked, has_period=False)
        speed = self._speeds(shapes, checked)
        return Evaluation(speed, used_share(figures, checked, speed), np.full(len(checked), np.nan))

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The other model's: a table of speeds has no ordering."""
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
        return self.fallback.evaluate(shapes, groups).speed if len(groups) else np.ones(groups.shape)


@dataclass(frozen=True, slots=True)
class PairLookup:
    """The part of a table that concerns given shapes, as arrays; speeds that were not measured are NaN."""

    model_of: Indices
    speed: Floats

    @staticmethod
    def of(table: InterferenceTable, shapes: Sequence[Shape]) -> "PairLookup":
        """The entries of a table for the models of these shapes."""
        present = sorted({shape.model for shape in shapes} & table.models)
        number = {model: index for index, model in enumerate(present)}
        speed = np.full((len(present) + 1, len(present) + 1), np.nan)
        for (model_a, model_b), (speed_a, speed_b) in table.pairs.items():
            if model_a in number and model_b in number:
                speed[number[model_a], number[model_b]] = speed_a
                speed[number[model_b], number[model_a]] = speed_b
        return PairLookup(np.array([number.get(shape.model, _UNKNOWN) for shape in shapes], dtype=np.intp), speed)

    def known(self, pairs: Indices) -> NDArray[np.bool_]:
        """Which pairs of shapes were measured; the last row and column stand for unknown models."""
        models = self.model_of[pairs]
        return np.isfinite(self.speed[models[:, 0], models[:, 1]])

    def speeds(self, pairs: Indices) -> Floats:
        """Array (n, 2) of the speeds of both."""
        models = self.model_of[pairs]
        return np.stack([self.speed[models[:, 0], models[:, 1]], self.speed[models[:, 1], models[:, 0]]], axis=1)


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
    raise UnknownSpeedModelError(f"speed_model is {name!r}; valid are: {', '.join(SPEED_MODELS)}")
