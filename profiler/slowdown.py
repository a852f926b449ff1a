"""f of Horus: how much longer jobs take on one GPU, by their GPU utilization alone. Pure.

The paper fits a parabola for each type of GPU to the slow-downs of pairs. It prints two of them, which hold until a
site has measured pairs of its own on a type of GPU. Their coefficients stand in reverse order in its footnotes 3 and 4:
as printed, two jobs would slow each other down 10,000-fold.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from muri.errors import UsageError
from muri.profiler.errors import FitError

SLOWDOWNS: Final = "slowdown"
"""Kind of the store's documents that hold fits, by type of GPU."""


class UtilizationError(UsageError):
    """A GPU utilization cannot be true."""


@dataclass(frozen=True, slots=True)
class Parabola:
    """constant + linear·x + square·x², x in per cent of a GPU; square ≥ 0."""

    constant: float
    linear: float
    square: float

    def __call__(self, percent: float) -> float:
        """The parabola from its lowest point on, and the value there before it; never below 1."""
        # To the left of its vertex the parabola rises again, an artefact: less use would slow jobs down more.
        lowest = -self.linear / (2 * self.square) if self.square else 0.0
        percent = max(percent, lowest)
        return max(1.0, self.constant + percent * (self.linear + percent * self.square))


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times longer each of two or more jobs on one GPU takes than alone there: the mean of some parabolas."""

    parabolas: tuple[Parabola, ...]

    def __call__(self, percent: float) -> float:
        """A factor ≥ 1 that rises with use.

        Args:
            percent: What all of the GPU's jobs use of it alone, added up: 0 to 100 for each job.

        Raises:
            UtilizationError: The utilization is negative or not finite.
        """
        if not 0 <= percent < math.inf:
            raise UtilizationError(f"a GPU utilization is {percent} %; it must be finite and ≥ 0")
        return sum(parabola(percent) for parabola in self.parabolas) / len(self.parabolas)


@dataclass(frozen=True, slots=True)
class SlowdownFit:
    """The curve fitted to the pairs that were measured on one type of GPU."""

    curve: Parabola  # f
    r_squared: float  # Share of the points' variance that f explains
    pairs: int  # How many pairs it rests on; each gives two points
    least_percent: float  # What the jobs of the least used pair use together
    most_percent: float  # And those of the most used pair

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SlowdownFit":
        """Read what `asdict` made (FitError: a figure is missing, not a number, or cannot be true)."""
        try:
            curve = Parabola(*(float(values["curve"][name]) for name in ("constant", "linear", "square")))
            names = ("r_squared", "least_percent", "most_percent")
            r_squared, least_percent, most_percent = (float(values[name]) for name in names)
            found = cls(curve, r_squared, int(values["pairs"]), least_percent, most_percent)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FitError(f"a stored slow-down is incomplete: {error!r}") from error
        if not all(map(math.isfinite, (curve.constant, curve.linear, curve.square))) or curve.square < 0:
            raise FitError(f"a stored slow-down cannot be true: {curve}")
        return found


_PUBLISHED: Final = {
    "2080": Parabola(1.16664, -0.00302, 4e-5),
    "1080": Parabola(1.32198, -0.00728, 6e-5),
}
"""RTX 2080 and GTX 1080, by the number in the GPU's name. Source: Horus (TPDS 2021), footnotes 3 and 4."""


def slowdown_of(gpu_type: str, fitted: Mapping[str, Parabola]) -> Slowdown:
    """The f of a type of GPU, as Slurm or the driver names it: fitted on this site, else published."""
    return Slowdown((fitted[gpu_type],)) if gpu_type in fitted else published_slowdown(gpu_type)


@lru_cache(maxsize=256)
def published_slowdown(gpu_type: str = "") -> Slowdown:
    """The f of the paper, which fitted it on an RTX 2080 and a GTX 1080; every other type gets the mean of both.

    Where a curve falls with rising use (below 38 % and 61 %), its lowest value (1.11 and 1.10) is taken instead.
    """
    curves = [_PUBLISHED[number] for number in re.findall(r"\d{4}", gpu_type) if number in _PUBLISHED]
    return Slowdown(tuple(curves or _PUBLISHED.values()))
