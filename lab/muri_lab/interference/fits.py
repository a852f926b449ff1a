"""What follows from measured pairs and profiles: curves and lines fitted to them, and the pairs to measure next."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

from muri.profiler.errors import FitError
from muri.profiler.estimates import estimated
from muri.profiler.interference import (
    Interference,
    LinearFit,
    Point,
    by_pair,
    estimated_ratio,
    find,
    fit_line,
    known_pairs,
    ordered,
)
from muri.profiler.records import RATIO, ProfileKey, StageProfile, owned_name, reproducible
from muri.profiler.slowdown import Parabola, Slowdown, SlowdownFit
from muri.profiler.store import ProfileStore

LEAST_PAIRS: Final = 10  # Of fewer pairs a parabola through a few accidents looks like a law
LEAST_RANGE: Final = 50.0  # Per cent of a GPU by which the least and the most used pair must differ
_COEFFICIENTS: Final = 3
_LEAST_RISE: Final = 1e-3
ESTIMATED: Final = "estimated"
SURE: Final = 0.8  # A pair with this confidence need not be measured again


class PairPoint(NamedTuple):
    """One job of a measured pair."""

    percent: float  # What both jobs use of the GPU alone, added up
    ratio: float  # How many times longer the job takes beside the other


def gpu_percent(profile: StageProfile) -> float:
    """Return a model's use of its GPUs alone, by telemetry, else the propagate share of its iteration."""
    measured = profile.detail.gpu_utilization
    share = profile.propagate_s / profile.iteration_s if measured is None and profile.iteration_s else measured or 0.0
    return 100 * min(1.0, share)


def fit_slowdown(points: Iterable[PairPoint]) -> SlowdownFit:
    """Fit f by least squares with coefficients ≥ 0, so that more use is never faster and over-commitment costs more.

    Source: Horus (TPDS 2021), section 3.2: a quadratic polynomial of cumulative utilization.
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
    curve = Parabola(*(reproducible(float(value)) for value in found))
    if curve(most) - curve(least) < _LEAST_RISE:
        raise FitError("the measured pairs are not slower where they use more of the GPU; no curve explains them")
    return SlowdownFit(curve, r_squared(curve, kept), len(kept) // 2, least, most)


def r_squared(curve: Parabola | Slowdown, points: Iterable[tuple[float, float]]) -> float:
    """Share of the variance of measured ratios that a curve explains; below 0 where their mean explains more."""
    pairs = [(float(percent), float(ratio)) for percent, ratio in points]
    mean = math.fsum(ratio for _, ratio in pairs) / len(pairs)
    left = math.fsum((ratio - curve(percent)) ** 2 for percent, ratio in pairs)
    spread = math.fsum((ratio - mean) ** 2 for _, ratio in pairs)
    return reproducible(1 - left / spread) if spread else 1.0


def _checked(points: Iterable[PairPoint]) -> list[PairPoint]:
    kept = sorted(points)
    for point in kept:
        if not (math.isfinite(point.percent) and point.percent >= 0) or RATIO.fault(point.ratio):
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


def pair_points(store: ProfileStore, gpu_type: str) -> tuple[PairPoint, ...]:
    """Return joint use and slow-down, two points of each measured pair with measured profiles on a type of GPU."""
    found: list[PairPoint] = []
    for pair in known_pairs(store):
        profiles = [_stored(store, side.key) for side in (pair.a, pair.b)]
        measured = [profile for profile in profiles if profile is not None and not profile.is_estimate]
        if len(measured) == 2 and pair.a.key.gpu_type == gpu_type:
            percent = sum(map(gpu_percent, measured))
            found += [PairPoint(percent, pair.a.ratio), PairPoint(percent, pair.b.ratio)]
    return tuple(found)


def fit_communication(profiles: Iterable[StageProfile]) -> LinearFit:
    """α' and β' of one GPU count and type, from models that exchange different amounts."""
    measured = [item for item in profiles if not item.is_estimate and item.detail.gradient_mib and item.network_busy_s]
    if len({(item.key.gpu_count, item.key.gpu_type) for item in measured}) > 1:
        raise FitError("a fit of communication is of one GPU count and one GPU type")
    points = (Point(item.detail.gradient_mib or 0.0, item.network_busy_s) for item in measured)
    return fit_line(points, "measured profiles that synchronize and have a known gradient size")


def communication_name(key: ProfileKey) -> str:
    """Name of the document of the fit over gradient sizes, of all its user's models on so many GPUs of that type."""
    return f"{owned_name('communication', key.user)} ({key.gpu_count} × {key.gpu_type})"


@dataclass(frozen=True, slots=True)
class Expected:
    """Interference ratios of a pair."""

    a: ProfileKey  # One model
    b: ProfileKey  # The other
    ratio_a: float  # ξ of the first, ≥ 1
    ratio_b: float  # ξ of the second
    source: str  # "measured", "learned" or "estimated"
    confidence: float | None = None  # Of a measurement or of what was learned; None for an estimate


def _stored(store: ProfileStore, key: ProfileKey) -> StageProfile | None:
    """Return the stored profile of a key: its user's own, else a published one."""
    return next(filter(None, map(store.get, key.lookup_order)), None)


def best_known(store: ProfileStore, key: ProfileKey) -> StageProfile | None:
    """Return the measured profile of a key, its user's own or a published one, else an estimate, else None."""
    stored = _stored(store, key)
    if stored is not None and not stored.is_estimate:
        return stored
    estimate = estimated(store, key)
    return estimate.profile if estimate else stored


def expected(store: ProfileStore, a: ProfileKey, b: ProfileKey) -> Expected | None:
    """ξ of two models side by side; None where neither the pair nor both profiles are known."""
    pair = find(by_pair(known_pairs(store)), a, b)
    if pair is not None:
        return Expected(a, b, pair.a.ratio, pair.b.ratio, pair.source, pair.confidence)
    profiles = best_known(store, a), best_known(store, b)
    if profiles[0] is None or profiles[1] is None:
        return None
    ratio = estimated_ratio(profiles[0], profiles[1])
    return Expected(a, b, ratio, ratio, ESTIMATED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that could be measured."""

    a: ProfileKey  # The lesser key
    b: ProfileKey  # The other, or the same
    chances: int  # How many pairs of the queued jobs are of these two models
    confidence: float | None  # That of the pair's measurement; None when it was never measured


def next_pairs(known: Iterable[Interference], keys: Sequence[ProfileKey], most: int = 10) -> tuple[Candidate, ...]:
    """Return pairs to measure: unknown ones, then uncertain ones, each by how often jobs form them."""
    confidence = {item.pair: item.confidence for item in known}
    jobs = Counter(keys)
    found = (Candidate(a, b, chances, confidence.get((a, b))) for a, b, chances in _formable(jobs))
    useful = [item for item in found if item.confidence is None or item.confidence < SURE]
    return tuple(sorted(useful, key=_urgency)[:most])


def _formable(jobs: Counter[ProfileKey]) -> Iterator[tuple[ProfileKey, ProfileKey, int]]:
    for a, b in combinations(sorted(jobs), 2):
        if (a.gpu_count, a.gpu_type) == (b.gpu_count, b.gpu_type):
            yield *ordered(a, b), jobs[a] * jobs[b]
    for key, count in jobs.items():
        if count > 1:
            yield key, key, count * (count - 1) // 2


def _urgency(item: Candidate) -> tuple[bool, int, float, ProfileKey, ProfileKey]:
    return (item.confidence is not None, -item.chances, item.confidence or 0.0, item.a, item.b)
