"""How times grow with the batch, and how far computing and communicating overlap (SJF-BSBF). Pure.

The lines. t_comp = α + β B and t_comm = α' + β' M, with B the batch size per GPU and M the size of what the ranks
exchange. Both coefficients of a line are ≥ 0: a larger batch is never faster, and nothing takes less than no time.

The overlap. An iteration takes (t_comp^δ + t_comm^δ)^(1/δ): δ = 1 adds both up, δ = ∞ hides the shorter one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from muri.profiler import figures
from muri.profiler.errors import FitError
from muri.profiler.records import ProfileKey, StageProfile

FITS: Final = "batch-fit"
"""Kind of the store's documents that hold lines over batch sizes."""

LEAST_POINTS: Final = 2
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a size (batch size, or MiB) and the seconds that it took."""

    size: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Seconds = `fixed_s` + `per_unit_s` × size."""

    fixed_s: float  # α, seconds whatever the size
    per_unit_s: float  # β, seconds per sample or per MiB
    # Share of the points' variance that the line explains; 1 where they do not vary, may be below 0 where the line is
    # worse than the mean
    r_squared: float
    residual_s: float  # Root mean square distance of the points from the line
    points: tuple[Point, ...]  # What the line was fitted to, by size

    def seconds(self, size: float) -> float:
        """What the line says for a size."""
        return self.fixed_s + self.per_unit_s * size

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LinearFit":
        """Read what `to_dict` made (FitError: a figure is missing, not a number, or cannot be true)."""
        try:
            points = tuple(Point(float(item["size"]), float(item["seconds"])) for item in values["points"])
            names = ("fixed_s", "per_unit_s", "r_squared", "residual_s")
            fixed_s, per_unit_s, r_squared, residual_s = (float(values[name]) for name in names)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FitError(f"a stored fit is incomplete: {error!r}") from error
        for name, value in (("fixed_s", fixed_s), ("per_unit_s", per_unit_s)):
            if fault := figures.TIME_S.fault(value):
                raise FitError(f"a stored fit: {name} {fault}")
        return cls(fixed_s, per_unit_s, r_squared, residual_s, points)


def fit_line(points: Iterable[Point], what: str = "points") -> LinearFit:
    """Least squares with coefficients ≥ 0 (scipy.optimize.nnls); `what` names the points in errors.

    Raises:
        FitError: There are too few, they all have one size, or one is not a possible measurement.
    """
    import numpy as np  # only fits need it
    from scipy.optimize import nnls

    kept = _checked(points, what)
    sizes = np.array([point.size for point in kept])
    times = np.array([point.seconds for point in kept])
    scale = float(sizes.max())  # so that both columns are of one magnitude
    (fixed_s, slope), _ = nnls(np.column_stack([np.ones_like(sizes), sizes / scale]), times)
    left = times - (fixed_s + slope * sizes / scale)
    spread = float(((times - times.mean()) ** 2).sum())
    squares = float((left**2).sum())
    tiny = 1e-18 * float((times**2).sum())
    r_squared = 1 - squares / spread if spread > tiny else 1.0
    found = (float(fixed_s), float(slope) / scale, r_squared, math.sqrt(squares / len(kept)))
    fixed_s, per_unit_s, r_squared, residual_s = map(figures.reproducible, found)
    return LinearFit(fixed_s, per_unit_s, r_squared, residual_s, kept)


def _checked(points: Iterable[Point], what: str) -> tuple[Point, ...]:
    kept = sorted(points, key=lambda point: (point.size, point.seconds))
    for point in kept:
        if not all(math.isfinite(value) and value >= 0 for value in (point.size, point.seconds)):
            raise FitError(f"size {point.size}, {point.seconds} s: both must be finite and ≥ 0")
    sizes = sorted({point.size for point in kept})
    if len(sizes) < LEAST_POINTS:
        found = f"all have size {sizes[0]:g}" if sizes else "there are none"
        raise FitError(f"a line needs {what}, of at least {LEAST_POINTS} different sizes; {found}")
    return tuple(kept)


def fit_computation(profiles: Iterable[StageProfile]) -> LinearFit:
    """α and β of one model from profiles with different batch sizes.

    t_comp is all of an iteration but what the network owns, so that a script that loads slowly is
    described as well; for one that the GPU bounds it is the paper's computation time.

    Raises:
        FitError: The profiles do not determine the line, or are of different models, GPU counts or types.
    """
    measured = [item for item in profiles if not item.is_estimate and item.key.batch_size > 0]
    owners = {(item.key.model, item.key.gpu_count, item.key.gpu_type) for item in measured}
    if len(owners) > 1:
        raise FitError("a fit over batch sizes is of one model, one GPU count and one GPU type")
    points = (Point(item.key.batch_size, max(0.0, item.iteration_s - item.synchronize_s)) for item in measured)
    return fit_line(points, "measured profiles with a known batch size")


def computation_name(key: ProfileKey) -> str:
    """Name of the document of a model's fit over batch sizes."""
    return f"{key.name} ({key.gpu_count} × {key.gpu_type})"


def overlap_exponent(profile: StageProfile) -> float | None:
    """δ ≥ 1 of one model and batch size, how far it hides computing and communicating behind each other; None on one
    GPU, or where nothing is exchanged.

    t_comp is as in `fit_computation`; t_comm is the time in which the network is used, also while computing goes on.
    Where a profile doesn't say that, only the rest is known, and δ is 1.

    Source: SJF-BSBF ("wise resource sharing"), Eq. 7 with s = 1, solved for δ.
    """
    compute_s, communicate_s = max(0.0, profile.iteration_s - profile.synchronize_s), profile.network_busy_s
    longer_s, shorter_s = max(compute_s, communicate_s), min(compute_s, communicate_s)
    if profile.key.gpu_count == 1 or communicate_s <= 0:
        return None
    if profile.iteration_s >= (1 - _ROUNDING) * (compute_s + communicate_s):
        return 1.0
    if profile.iteration_s <= (1 + _ROUNDING) * longer_s:
        return math.inf
    from scipy.optimize import brentq  # only fits need it

    log_whole, part = math.log(profile.iteration_s / longer_s), shorter_s / longer_s
    inverse = brentq(lambda guess: guess * math.log1p(part ** (1 / guess)) - log_whole, _ROUNDING, 1.0)
    return figures.reproducible(1 / inverse)
