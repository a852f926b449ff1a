"""SJF-BSBF's figures: how much slower two models run side by side (ξ), and how times grow with the batch.

The estimate. Two jobs that share plainly, without taking turns by stage, are a closed network of two customers whose
stations are the four resources; where both want one, each gets half (processor sharing). Alone, job b is at resource r
for the share u_b,r of its time. The arrival theorem (mean value analysis: Reiser and Lavenberg 1980; processor sharing
with any distribution of demands: Baskett et al. 1975) says that this is how often job a meets it there, and each
meeting makes a's use of r twice as long. So

    ξ_a = ξ_b = 1 + Σ_r u_a,r · u_b,r

which is 2 for two jobs that both need one resource all the time, and 1 where they share none. It cannot be less than
max_r (u_a,r + u_b,r), the bound of the best possible interleaving, and it never is.

The model takes a resource for used up by one job at a time. It knows nothing of memory bandwidth, caches, and kernels
too small to fill a GPU; a measured ratio always comes first.

The lines. t_comp = α + β B and t_comm = α' + β' M, with B the batch size per GPU and M the size of what the ranks
exchange. Both coefficients of a line are ≥ 0: a larger batch is never faster, and nothing takes less than no time.

The overlap. An iteration takes (t_comp^δ + t_comm^δ)^(1/δ): δ = 1 adds both up, δ = ∞ hides the shorter one.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from muri.profiler.errors import FitError, InterferenceError
from muri.profiler.records import (
    ITERATION_S,
    ITERATIONS,
    RATIO,
    SHARE,
    TIME_S,
    VARIATION,
    Document,
    ProfileKey,
    StageProfile,
    first_fault,
    reproducible,
)

if TYPE_CHECKING:
    from muri.profiler.store import ProfileStore  # a simulation, which estimates ratios, needs no SQLite

log = logging.getLogger("muri.profiler")

PAIRS: Final = "interference"
"""Kind of the store's documents that hold pairs."""

MEASURED: Final = "measured"
LEARNED: Final = "learned"


def estimated_ratio(a: StageProfile, b: StageProfile) -> float:
    """ξ of two jobs side by side, the same for both; 1 ≤ ξ ≤ 5."""
    return 1 + sum(share_a * share_b for share_a, share_b in zip(busy_shares(a), busy_shares(b), strict=True))


def busy_shares(profile: StageProfile) -> tuple[float, ...]:
    """Share of an iteration in which each resource is used, hidden behind another or not."""
    used_s = profile.detail.busy_s or profile.stage_s
    return tuple(min(1.0, value / profile.iteration_s) for value in used_s)


@dataclass(frozen=True, slots=True)
class Side:
    """One of two models that shared a device."""

    key: ProfileKey  # What ran
    solo_s: float  # Seconds per iteration alone
    shared_s: float  # Seconds per iteration beside the other
    # ξ ≥ 1, how much longer an iteration takes beside the other. Never below 1: no job gains from company, though
    # measurements scatter
    ratio: float
    # 95 % confidence half-width of the ratio, as a share of it; None when there were too few rounds
    spread: float | None
    confidence: float  # Probability that the ratio is right within 5 %, given the rounds' scatter
    iterations: int  # Iterations beside the other that were measured

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give."""
        checks = (
            ("time alone", ITERATION_S, self.solo_s),
            ("time side by side", ITERATION_S, self.shared_s),
            ("interference ratio", RATIO, self.ratio),
            ("spread", VARIATION, self.spread or 0.0),
            ("confidence", SHARE, self.confidence),
            ("number of iterations", ITERATIONS, self.iterations),
        )
        if fault := first_fault(checks):
            raise InterferenceError(f"{self.key}: {fault}")


@dataclass(frozen=True, slots=True)
class Interference:
    """Two models that shared a device, measured."""

    a: Side
    b: Side
    rounds: int  # How often it was measured alone and side by side in turn
    measured_s: float  # Seconds that the measurement ran both scripts steadily, alone and side by side together
    measured_at: str  # UTC time, ISO-8601
    source: str = MEASURED  # Measured by `muri-lab pair`, or learned from jobs that shared GPUs
    turns: bool = False  # Whether they took turns by stage, and did not share as plain processes do
    # Of a learned pair, both ratios of each round that counts, the oldest first
    samples: tuple[tuple[float, float], ...] = ()

    @property
    def pair(self) -> tuple[ProfileKey, ProfileKey]:
        """Both keys, the lesser first."""
        return ordered(self.a.key, self.b.key)

    @property
    def confidence(self) -> float:
        """The confidence of the less certain ratio."""
        return min(self.a.confidence, self.b.confidence)

    def seen_from(self, key: ProfileKey) -> "Interference":
        """The pair with that key as `a`."""
        if self.a.key == key:
            return self
        return replace(self, a=self.b, b=self.a, samples=tuple((b, a) for a, b in self.samples))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Interference":
        """Read what `asdict` made (InterferenceError: something is missing or cannot be true)."""
        try:
            a, b = (_side(values[name]) for name in ("a", "b"))
            measured_s = float(values["measured_s"])
            # Older documents don't say; what was learned took no seconds of its own.
            source = str(values.get("source") or (MEASURED if measured_s else LEARNED))
            source = LEARNED if source == "learnt" else source  # as 0.2 spells it
            samples = tuple((float(ratio_a), float(ratio_b)) for ratio_a, ratio_b in values.get("samples", ()))
            made = int(values["rounds"]), measured_s, str(values["measured_at"]), source
            return cls(a, b, *made, turns=bool(values.get("turns", False)), samples=samples)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InterferenceError(f"a stored pair is incomplete: {error!r}") from error


def _side(values: Mapping[str, Any]) -> Side:
    spread = values["spread"]
    return Side(
        key=ProfileKey(**values["key"]),
        solo_s=float(values["solo_s"]),
        shared_s=float(values["shared_s"]),
        ratio=float(values["ratio"]),
        spread=None if spread is None else float(spread),
        confidence=float(values["confidence"]),
        iterations=int(values["iterations"]),
    )


Pairs = Mapping[tuple[ProfileKey, ProfileKey], Interference]
"""Measured pairs by their keys, the lesser first."""


def ordered(key_a: ProfileKey, key_b: ProfileKey) -> tuple[ProfileKey, ProfileKey]:
    """The lesser key first."""
    return (key_a, key_b) if key_a <= key_b else (key_b, key_a)


def put(store: "ProfileStore", found: Interference) -> None:
    """Store a pair; an older measurement of it is replaced."""
    store.put_document(PAIRS, to_document(found))


def to_document(found: Interference) -> Document:
    """A pair as the store keeps it; in turns and without are two."""
    name = " + ".join(map(str, found.pair)) + (" in turns" if found.turns else "")
    return Document(name, found.measured_at, asdict(found))


def known_pairs(store: "ProfileStore") -> tuple[Interference, ...]:
    """All pairs that shared as plain processes, by name."""
    return tuple(pair for pair in every_pair(store) if not pair.turns)


def every_pair(store: "ProfileStore") -> tuple[Interference, ...]:
    """All pairs of the store, by name; one that cannot be understood is left out, and the log names it."""
    found: list[Interference] = []
    for document in store.documents(PAIRS):
        try:
            found.append(Interference.from_dict(document.body))
        except InterferenceError as error:
            log.warning("pair %s is not used: %s", document.name, error)
    return tuple(found)


def by_pair(known: Iterable[Interference]) -> Pairs:
    """Pairs by their keys, for `find`."""
    return {item.pair: item for item in known}


def find(known: Pairs, key_a: ProfileKey, key_b: ProfileKey) -> Interference | None:
    """The pair of two keys with the first as `a`; None when it was not measured.

    A published key stands for a user's own where there is nothing nearer.
    """
    for a, b in product(key_a.lookup_order, key_b.lookup_order):
        if (found := known.get(ordered(a, b))) is not None:
            return found.seen_from(a)
    return None


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LinearFit":
        """Read what `asdict` made (FitError: a figure is missing, not a number, or cannot be true)."""
        try:
            points = tuple(Point(float(item["size"]), float(item["seconds"])) for item in values["points"])
            names = ("fixed_s", "per_unit_s", "r_squared", "residual_s")
            fixed_s, per_unit_s, r_squared, residual_s = (float(values[name]) for name in names)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FitError(f"a stored fit is incomplete: {error!r}") from error
        if fault := first_fault((("fixed_s", TIME_S, fixed_s), ("per_unit_s", TIME_S, per_unit_s))):
            raise FitError(f"a stored fit: {fault}")
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
    fixed_s, per_unit_s, r_squared, residual_s = map(reproducible, found)
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
    return reproducible(1 / inverse)
