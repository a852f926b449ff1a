"""Two profiles side by side: ratios, and which differences are more than noise. Pure."""

import math
from typing import Final, NamedTuple

from muri.profiler.records import STAGES, StageProfile

STANDARD_ERRORS: Final = 3.0
"""A difference of two means counts when it is more than this many of its standard errors (Welch, 1947)."""


class Row(NamedTuple):
    """One figure of both profiles.

    Attributes:
        name: A stage, or "iteration".
        first_s: Seconds per iteration in the first profile.
        second_s: And in the second.
        ratio: Second over first, None when the first is 0.
        differs: Whether the difference is beyond the noise of the iterations; None when that was not measured.
    """

    name: str
    first_s: float
    second_s: float
    ratio: float | None
    differs: bool | None


def compare(first: StageProfile, second: StageProfile) -> tuple[Row, ...]:
    """Every stage, and the iteration."""
    return tuple(
        Row(name, one, other, other / one if one else None, _differs(one_error, other_error, other - one))
        for name, (one, one_error), (other, other_error) in zip(
            (*STAGES, "iteration"), _means(first), _means(second), strict=True
        )
    )


def _means(profile: StageProfile) -> list[tuple[float, float | None]]:
    """Each mean with its standard error, None where the variation was not measured."""
    detail = profile.detail
    variations = (*(detail.stage_cv or (None,) * len(STAGES)), detail.iteration_cv)
    return [
        (value, None if cv is None or not profile.iterations else cv * value / math.sqrt(profile.iterations))
        for value, cv in zip((*profile.stage_s, profile.iteration_s), variations, strict=True)
    ]


def _differs(one: float | None, other: float | None, difference_s: float) -> bool | None:
    if one is None or other is None:
        return None
    return abs(difference_s) > STANDARD_ERRORS * math.hypot(one, other)
