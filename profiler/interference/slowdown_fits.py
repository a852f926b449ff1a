"""f of Horus, fitted to the pairs that were measured on a type of GPU. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from muri.profiler import figures
from muri.profiler.errors import FitError
from muri.profiler.interference.slowdown import Parabola, Slowdown
from muri.profiler.records import StageProfile

KIND: Final = "slowdown"
"""Kind of the store's documents that hold fits, by type of GPU."""

LEAST_PAIRS: Final = 10
"""Of fewer pairs a parabola through a few accidents looks like a law."""

LEAST_RANGE: Final = 50.0
"""Per cent of a GPU by which the least and the most used pair must differ."""

_COEFFICIENTS: Final = 3
_LEAST_RISE: Final = 1e-3


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
