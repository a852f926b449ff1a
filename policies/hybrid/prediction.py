"""How fast the members of a unit get on with some way of sharing, some CPUs and some memory."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from muri.policies.allocation.demand import enough
from muri.policies.allocation.effect import shape_with, throughput_ratio
from muri.policies.cycle.bucket import worth_of
from muri.policies.hybrid.speed import side_by_side
from muri.policies.speed.interference import InterferenceTable
from muri.policies.speed.model import Shape, SpeedModel, shape_of
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import PlanJob

Mode = Literal["interleave", "plain"]
Speeds = tuple[float, ...]
"""Speed of each member, 1 = as fast as alone with the GPU-proportional share."""

Member = tuple[Shape, Sensitivity | None]
"""What a job's speed depends on."""

UNKNOWN: Final = Shape((0.0, 0.0, 0.0, 0.0), 1.0)
"""Stands for a job that runs alone and whose profile nobody knows."""

_CACHED: Final = 4096


class Predictor:
    """Speeds of units, as the simulator makes them true: the stages of a member scale with the unit's share.

    Args:
        model: Speeds of members that take turns.
        table: Speeds of pairs without turns; None knows none.
    """

    def __init__(self, model: SpeedModel, table: InterferenceTable | None) -> None:
        self._model, self._table = model, table

    def plain(self, jobs: Sequence[PlanJob]) -> Speeds | None:
        """Speeds without turns, with the proportional share; None where a pair is unknown."""
        return side_by_side(self._table, [_member(job)[0].model for job in jobs])

    def usual(self, jobs: Sequence[PlanJob], mode: Mode) -> Speeds:
        """Speeds with the GPU-proportional share."""
        return self.speeds(jobs, mode, (Demand(0.0, 0.0),), Demand(0.0, 0.0))[0]

    def speeds(self, jobs: Sequence[PlanJob], mode: Mode, shares: Sequence[Demand], fair: Demand) -> tuple[Speeds, ...]:
        """Speeds with each of several shares.

        Args:
            jobs: The members.
            mode: How they share their GPUs.
            shares: CPUs and memory of the unit, for each of its GPUs.
            fair: The GPU-proportional share; 0 of what is unknown of the node, and then makes no difference.
        """
        members = tuple(_member(job) for job in jobs)
        given = tuple(enough(share, fair) for share in shares)
        return _speeds(self._model, members, self._beside(jobs, mode), given, enough(fair, fair))

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
