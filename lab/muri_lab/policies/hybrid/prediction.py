"""How fast the members of a unit get on with some way of sharing, some CPUs and some memory."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import Final, Literal

import numpy as np

from muri.policies.cycle.queue import worth_of
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.siblings.shares import enough, shape_with, throughput_ratio
from muri.policies.speed import (
    Evaluation,
    Floats,
    Indices,
    PairLookup,
    Shape,
    SpeedModel,
    checked_groups,
    figures_of,
    shape_of,
    used_share,
)
from muri.policies.traits import Demand, InterferenceTable, Sensitivity
from muri.policies.types import PlanJob

Mode = Literal["interleave", "plain"]

Speeds = tuple[float, ...]  # Speed of each member, 1 = as fast as alone with the GPU-proportional share

Member = tuple[Shape, Sensitivity | None]  # Whatever a job's speed depends on

UNKNOWN: Final = Shape((0.0, 0.0, 0.0, 0.0), 1.0)  # Stands for a job that runs alone without a known profile
_CACHED: Final = 4096
_GAIN = 1e-9  # Relative gain from which plain sharing is better than interleaving


class Predictor:
    """Speeds of units, as the simulator makes them true: the stages of a member scale with the unit's share."""

    def __init__(self, model: SpeedModel, table: InterferenceTable | None) -> None:
        self._model, self._table = model, table

    def plain(self, jobs: Sequence[PlanJob]) -> Speeds | None:
        """Speeds without turns, with the proportional share; None where a pair is unknown."""
        return side_by_side(self._table, [_member(job)[0].model for job in jobs])

    def usual(self, jobs: Sequence[PlanJob], mode: Mode) -> Speeds:
        """Speeds with the GPU-proportional share."""
        return self.speeds(jobs, mode, (Demand(0.0, 0.0),), Demand(0.0, 0.0))[0]

    def speeds(self, jobs: Sequence[PlanJob], mode: Mode, shares: Sequence[Demand], fair: Demand) -> tuple[Speeds, ...]:
        """Speeds with each of several shares."""
        members = tuple(_member(job) for job in jobs)
        given = tuple(enough(share, fair) for share in shares)
        return _speeds(self._model, members, self._beside(jobs, mode), given, enough(fair, fair))

    def alike(self, jobs: Sequence[PlanJob], mode: Mode) -> Hashable:
        """What all predictions for these jobs depend on: equal for units of which nothing tells them apart."""
        return tuple(map(_member, jobs)), self._beside(jobs, mode)

    def _beside(self, jobs: Sequence[PlanJob], mode: Mode) -> Speeds | None:
        return self.plain(jobs) if mode == "plain" and len(jobs) > 1 else None


def weighted(jobs: Sequence[PlanJob], speeds: Sequence[float]) -> float:
    """Σ worth × speed."""
    return sum(worth_of(job) * speed for job, speed in zip(jobs, speeds, strict=True))


def _member(job: PlanJob) -> Member:
    return (UNKNOWN if job.profile is None else shape_of(job.profile), job.sensitivity)


@lru_cache(maxsize=_CACHED)
def _speeds(
    model: SpeedModel, members: tuple[Member, ...], plain: Speeds | None, given: tuple[Demand, ...], fair: Demand
) -> tuple[Speeds, ...]:
    ratios = np.array([[throughput_ratio(sensitivity, share, fair) for _, sensitivity in members] for share in given])
    if len(members) == 1:
        together = np.ones(ratios.shape)
    elif plain is not None:
        together = np.tile(plain, (len(given), 1))
    else:
        shapes = [shape_with(*member, share, fair) for share in given for member in members]
        groups = np.arange(len(shapes), dtype=np.intp).reshape(len(given), len(members))
        together = model.evaluate(shapes, groups).speed
    return tuple(tuple(row) for row in (together * ratios).tolist())


@dataclass(frozen=True, slots=True)
class BetterOfBoth:
    """Each group's speeds of interleaving or of plain sharing, whichever add up to more.

    The worth of its members decides later how a group really runs.
    """

    interleaved: SpeedModel  # Speeds of members that take turns
    table: InterferenceTable  # Speeds of pairs without turns

    @property
    def name(self) -> str:
        """The name by which options select the model that speeds come from otherwise."""
        return self.interleaved.name

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of up to four members, their models looked up in the table; see `SpeedModel`.

        Of a group that is better off plain, γ is the mean over resources of Σ_i s_i · u_i^j, and the period is NaN.
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
