"""Fair sharing: no resource idles while a member wants it, and no member can gain without slowing a slower one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import linprog

from muri.policies.speed.model import (
    Evaluation,
    Floats,
    Indices,
    Shape,
    SpeedModelError,
    alone,
    checked_groups,
    chunks,
    figures_of,
    member_rows,
    used_share,
)

MAX_MEMBERS: Final = 64
"""Progressive filling takes as many steps as there are members; far more than can share a GPU."""


@dataclass(frozen=True, slots=True)
class Fair:
    """Max-min fair normalized speeds of a work-conserving runtime.

    u_i^j is the share of its time alone during which member i uses resource j. Speeds s_i ≤ 1 are
    possible when Σ_i s_i · u_i^j ≤ 1 for every resource j. All speeds rise together; when a
    resource is full, its users stay where they are and the others go on.

    It is a bound in that waiting for a stage in progress costs nothing: a runtime comes close with short stages.
    """

    @property
    def name(self) -> str:
        """The name by which options select the model."""
        return "fair"

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of any number of resources; see `SpeedModel`.

        Returns:
            Speeds and γ, here the mean over resources of Σ_i s_i · u_i^j; there is no period (NaN).
        """
        figures = figures_of(shapes)
        checked = checked_groups(groups, len(shapes), MAX_MEMBERS)
        count, members = checked.shape
        if members == 1:
            return alone(figures, checked, has_period=False)
        share = figures.share
        speed = np.empty((members, count))
        for part in chunks(count):
            speed[:, part] = _filled([share[:, row] for row in member_rows(checked, part)])
        return Evaluation(speed.T, used_share(figures, checked, speed.T), np.full(count, np.nan))

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The identity: the member that is furthest behind goes first, there is no rotation."""
        return tuple(range(len(members)))


def _filled(share: Sequence[Floats]) -> Floats:
    """Max-min fair speeds by progressive filling.

    Args:
        share: For each member, an array (resources, groups) of u_i^j.

    Returns:
        Array (members, groups) of speeds.
    """
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


def throughput_bound(members: Sequence[Shape]) -> float:
    """Greatest total speed that any way of sharing can reach: max Σ s_i with Σ_i s_i · u_i^j ≤ 1 and s_i ≤ 1.

    A linear program; it may starve a member, so it bounds a runtime and is not a model of one.

    Args:
        members: The shapes of one group.

    Raises:
        ProfileError: A shape has an impossible time.
        SpeedModelError: There are no members, or the solver failed.
    """
    share = figures_of(members).share
    solved = linprog(-np.ones(len(members)), A_ub=share, b_ub=np.ones(len(share)), bounds=(0, 1), method="highs")
    if not solved.success or solved.fun is None:
        raise SpeedModelError(f"no bound on the throughput of {len(members)} members: {solved.message}")
    return -float(solved.fun)
