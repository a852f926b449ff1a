"""f of Horus: how much longer jobs take on one GPU, by what they use of it alone; published, or fitted on a site. Pure.

The paper fits a parabola for each type of GPU to the slow-downs of pairs. It prints two of them, which hold until a
site has measured pairs of its own on a type of GPU. Their coefficients stand in reverse order in its footnotes 3 and 4:
as printed, two jobs would slow each other down 10,000-fold.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from muri.errors import UsageError
from muri.profiler import figures
from muri.profiler.errors import FitError
from muri.profiler.records import StageProfile

KIND: Final = "slowdown"
"""Kind of the store's documents that hold fits, by type of GPU."""

LEAST_PAIRS: Final = 10
"""Of fewer pairs a parabola through a few accidents looks like a law."""

LEAST_RANGE: Final = 50.0
"""Per cent of a GPU by which the least and the most used pair must differ."""

_COEFFICIENTS: Final = 3
_LEAST_RISE: Final = 1e-3


class UtilizationError(UsageError):
    """A GPU utilisation cannot be true."""


@dataclass(frozen=True, slots=True)
class Parabola:
    """constant + linear·x + square·x², x in per cent of a GPU.

    Attributes:
        constant: Its value at 0.
        linear: Per per cent.
        square: Per per cent squared; ≥ 0.
    """

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
    """How many times longer each of several jobs on one GPU takes than alone there.

    For two jobs or more; a job that has the GPU to itself is not slowed down at all.

    Attributes:
        parabolas: Their mean counts.
    """

    parabolas: tuple[Parabola, ...]

    def __call__(self, percent: float) -> float:
        """A factor ≥ 1 that rises with use.

        Args:
            percent: What all of the GPU's jobs use of it alone, added up: 0 to 100 for each job.

        Raises:
            UtilizationError: The utilisation is negative or not finite.
        """
        if not 0 <= percent < math.inf:
            raise UtilizationError(f"a GPU utilisation is {percent} %; it must be finite and ≥ 0")
        return sum(parabola(percent) for parabola in self.parabolas) / len(self.parabolas)


_PUBLISHED: Final = {
    "2080": Parabola(1.16664, -0.00302, 4e-5),
    "1080": Parabola(1.32198, -0.00728, 6e-5),
}
"""RTX 2080 and GTX 1080, by the number in the GPU's name. Source: Horus (TPDS 2021), footnotes 3 and 4."""


def slowdown_of(gpu_type: str, fitted: Mapping[str, Parabola]) -> Slowdown:
    """The f of a type of GPU: as fitted on this site, else as published, else the mean of the published ones.

    Args:
        gpu_type: As Slurm or the driver names it ("rtx2080", "NVIDIA GeForce GTX 1080 Ti"); empty: unknown.
        fitted: What was fitted here, by type of GPU.
    """
    return Slowdown((fitted[gpu_type],)) if gpu_type in fitted else published_slowdown(gpu_type)


@lru_cache(maxsize=256)
def published_slowdown(gpu_type: str = "") -> Slowdown:
    """The f of the paper, which fitted it on an RTX 2080 and a GTX 1080; every other type gets the mean of both.

    Where a curve falls with rising use (below 38 % and 61 %), its lowest value (1.11 and 1.10) is taken instead.
    """
    curves = [_PUBLISHED[number] for number in re.findall(r"\d{4}", gpu_type) if number in _PUBLISHED]
    return Slowdown(tuple(curves or _PUBLISHED.values()))


class PairPoint(NamedTuple):
    """One job of a measured pair.

    Attributes:
        percent: What both jobs use of the GPU alone, added up.
        ratio: How many times longer the job takes beside the other.
    """

    percent: float
    ratio: float


@dataclass(frozen=True, slots=True)
class SlowdownFit:
    """What was fitted to the pairs that were measured on one type of GPU.

    Attributes:
        curve: f.
        r_squared: Share of the points' variance that f explains.
        pairs: How many pairs it rests on; each gives two points.
        least_percent: What the jobs of the least used pair use together.
        most_percent: And those of the most used pair.
    """

    curve: Parabola
    r_squared: float
    pairs: int
    least_percent: float
    most_percent: float

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SlowdownFit":
        """Read what `to_dict` made.

        Raises:
            FitError: A figure is missing, no number, or cannot be true.
        """
        try:
            curve = Parabola(*(float(values["curve"][name]) for name in ("constant", "linear", "square")))
            rest = (float(values[name]) for name in ("r_squared", "least_percent", "most_percent"))
            r_squared, least_percent, most_percent = rest
            found = cls(curve, r_squared, int(values["pairs"]), least_percent, most_percent)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FitError(f"a stored slow-down is incomplete: {error!r}") from error
        if not all(map(math.isfinite, (curve.constant, curve.linear, curve.square))) or curve.square < 0:
            raise FitError(f"a stored slow-down cannot be true: {curve}")
        return found


def gpu_percent(profile: StageProfile) -> float:
    """What a model uses of its GPUs alone: as telemetry measured, else the propagate share of its iteration."""
    measured = profile.detail.gpu_utilisation
    share = profile.propagate_s / profile.iteration_s if measured is None and profile.iteration_s else measured or 0.0
    return 100 * min(1.0, share)


def fit_slowdown(points: Iterable[PairPoint]) -> SlowdownFit:
    """Fit f by least squares with coefficients ≥ 0, so that more use is never faster and over-commitment costs more.

    Without these bounds the best parabola may fall over half of what was measured; flat there instead, as `Parabola`
    is, it explains less than the best one that never falls.

    Source: Horus (TPDS 2021), section 3.2: a quadratic polynomial of cumulative utilisation.

    Args:
        points: Two of each pair, in any order.

    Raises:
        FitError: There are too few, they lie too close together, or more use does not mean slower.
    """
    import numpy as np  # only fits need it
    from scipy.optimize import nnls

    # In an order of their own, because sums depend on it to the last digit.
    kept = _checked(points)
    percent, ratio = (np.array(values) for values in zip(*kept, strict=True))
    least, most = kept[0].percent, kept[-1].percent
    share = percent / most  # so that all columns are of one magnitude
    (constant, linear, square), _ = nnls(np.column_stack([np.ones_like(share), share, share**2]), ratio)
    found = (constant, linear / most, square / most**2)
    curve = Parabola(*(figures.reproducible(float(value)) for value in found))
    if curve(most) - curve(least) < _LEAST_RISE:
        raise FitError("the measured pairs are not slower where they use more of the GPU; no curve explains them")
    return SlowdownFit(curve, r_squared(curve, kept), len(kept) // 2, least, most)


def r_squared(curve: Parabola | Slowdown, points: Iterable[tuple[float, float]]) -> float:
    """Share of the variance of measured ratios that a curve explains; below 0 where their mean explains more.

    Args:
        curve: f.
        points: Per cent of the GPU, and the ratio there.
    """
    pairs = [(float(percent), float(ratio)) for percent, ratio in points]
    mean = math.fsum(ratio for _, ratio in pairs) / len(pairs)
    left = math.fsum((ratio - curve(percent)) ** 2 for percent, ratio in pairs)
    spread = math.fsum((ratio - mean) ** 2 for _, ratio in pairs)
    return figures.reproducible(1 - left / spread) if spread else 1.0


def _checked(points: Iterable[PairPoint]) -> list[PairPoint]:
    kept = sorted(points)
    for point in kept:
        if not (math.isfinite(point.percent) and point.percent >= 0) or figures.RATIO.fault(point.ratio):
            raise FitError(f"a pair with {point.percent} % use and {point.ratio} times the time cannot be true")
    pairs = len(kept) // 2
    if pairs < LEAST_PAIRS:
        raise FitError(f"a curve needs {LEAST_PAIRS} measured pairs whose models have measured profiles, not {pairs}")
    apart = kept[-1].percent - kept[0].percent
    if apart < LEAST_RANGE or len({point.percent for point in kept}) < _COEFFICIENTS:
        raise FitError(
            f"all pairs use about the same of the GPU, {kept[0].percent:.0f} to {kept[-1].percent:.0f} %; a curve "
            f"needs {_COEFFICIENTS} or more different figures, at least {LEAST_RANGE:.0f} % apart"
        )
    return kept
