"""What follows from measured pairs and profiles: curves and lines fitted to them, and the pairs to measure next."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

from muri.profiler import figures
from muri.profiler.errors import FitError
from muri.profiler.estimates import estimated
from muri.profiler.interference.models import LinearFit, Point, estimated_ratio, fit_line
from muri.profiler.interference.ratios import Interference, by_pair, find, known_pairs, ordered
from muri.profiler.interference.slowdown import Parabola, Slowdown, SlowdownFit
from muri.profiler.records import ProfileKey, StageProfile, owned_name
from muri.profiler.store import ProfileStore

LEAST_PAIRS: Final = 10
"""Of fewer pairs a parabola through a few accidents looks like a law."""

LEAST_RANGE: Final = 50.0
"""Per cent of a GPU by which the least and the most used pair must differ."""

_COEFFICIENTS: Final = 3
_LEAST_RISE: Final = 1e-3

ESTIMATED: Final = "estimated"

SURE: Final = 0.8
"""A pair with this confidence need not be measured again."""


class PairPoint(NamedTuple):
    """One job of a measured pair.

    Attributes:
        percent: What both jobs use of the GPU alone, added up.
        ratio: How many times longer the job takes beside the other.
    """

    percent: float
    ratio: float


def gpu_percent(profile: StageProfile) -> float:
    """What a model uses of its GPUs alone: as telemetry measured, else the propagate share of its iteration."""
    measured = profile.detail.gpu_utilisation
    share = profile.propagate_s / profile.iteration_s if measured is None and profile.iteration_s else measured or 0.0
    return 100 * min(1.0, share)


def fit_slowdown(points: Iterable[PairPoint]) -> SlowdownFit:
    """Fit f by least squares with coefficients ≥ 0, so that more use is never faster and over-commitment costs more.

    Without these bounds the best parabola may fall over half of what was measured; flat there instead, as `Parabola`
    is, it explains less than the best one that never falls.

    Source: Horus (TPDS 2021), section 3.2: a quadratic polynomial of cumulative utilization.

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


def pair_points(store: ProfileStore, gpu_type: str) -> tuple[PairPoint, ...]:
    """What pairs on a type of GPU used together and how much longer they took, two points of each measured pair.

    Pairs with a model whose profile was not measured are left out.

    Raises:
        StoreError: The store cannot be read.
    """
    found: list[PairPoint] = []
    for pair in known_pairs(store):
        profiles = [next(filter(None, map(store.get, side.key.lookup_order)), None) for side in (pair.a, pair.b)]
        measured = [profile for profile in profiles if profile is not None and not profile.is_estimate]
        if len(measured) == 2 and pair.a.key.gpu_type == gpu_type:
            percent = sum(map(gpu_percent, measured))
            found += [PairPoint(percent, pair.a.ratio), PairPoint(percent, pair.b.ratio)]
    return tuple(found)


def fit_communication(profiles: Iterable[StageProfile]) -> LinearFit:
    """α' and β' of one GPU count and type, from models that exchange different amounts.

    Raises:
        FitError: The profiles do not determine the line, or are of different GPU counts or types.
    """
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
    """Interference ratios of a pair.

    Attributes:
        a: One model.
        b: The other.
        ratio_a: ξ of the first, ≥ 1.
        ratio_b: ξ of the second.
        source: "measured", "learned" or "estimated".
        confidence: Of a measurement or of what was learned; None for an estimate.
    """

    a: ProfileKey
    b: ProfileKey
    ratio_a: float
    ratio_b: float
    source: str
    confidence: float | None = None


def best_known(store: ProfileStore, key: ProfileKey) -> StageProfile | None:
    """The measured profile of a key, its user's own or a published one, else an estimate, else None.

    An estimate's source is "scaled" (from another GPU count) or "predicted" (from the model's graph); it
    serves for planning until the dry run has measured.

    Raises:
        StoreError: The store cannot be read.
    """
    stored = next(filter(None, map(store.get, key.lookup_order)), None)
    if stored is not None and not stored.is_estimate:
        return stored
    estimate = estimated(store, key)
    return estimate.profile if estimate else stored


def expected(store: ProfileStore, a: ProfileKey, b: ProfileKey, cores: float | None = None) -> Expected | None:
    """ξ of two models side by side; None where neither the pair nor both profiles are known.

    Args:
        store: Where profiles and pairs are.
        a: One model.
        b: The other.
        cores: Cores of the node, for the estimate; see `estimated_ratio`.

    Raises:
        StoreError: The store cannot be read.
    """
    pair = find(by_pair(known_pairs(store)), a, b)
    if pair is not None:
        return Expected(a, b, pair.a.ratio, pair.b.ratio, pair.source, pair.confidence)
    profiles = best_known(store, a), best_known(store, b)
    if profiles[0] is None or profiles[1] is None:
        return None
    ratio = estimated_ratio(profiles[0], profiles[1], cores)
    return Expected(a, b, ratio, ratio, ESTIMATED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that could be measured.

    Attributes:
        a: The lesser key.
        b: The other, or the same.
        chances: How many pairs of the queued jobs are of these two models.
        confidence: That of the pair's measurement; None when it was never measured.
    """

    a: ProfileKey
    b: ProfileKey
    chances: int
    confidence: float | None


def next_pairs(known: Iterable[Interference], keys: Sequence[ProfileKey], most: int = 10) -> tuple[Candidate, ...]:
    """Pairs to measure, the most useful first.

    Unknown pairs come before uncertain ones; among them those that the queue could form most often. Only jobs with
    the same GPU count and type can share a set of GPUs.

    Args:
        known: What has been measured.
        keys: One for each job that waits or runs; a model with three jobs is there three times.
        most: How many to return at most.
    """
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
