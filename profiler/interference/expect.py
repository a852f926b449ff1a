"""What to expect of a pair: the measured ratios, else an estimate from the two profiles."""

from dataclasses import dataclass
from typing import Final

from muri.profiler.estimates import best_known
from muri.profiler.interference.estimate import estimated_ratio
from muri.profiler.interference.ratios import find, known_pairs
from muri.profiler.records import ProfileKey
from muri.profiler.store import ProfileStore

MEASURED: Final = "measured"
ESTIMATED: Final = "estimated"


@dataclass(frozen=True, slots=True)
class Expected:
    """Interference ratios of a pair.

    Attributes:
        a: One model.
        b: The other.
        ratio_a: ξ of the first, ≥ 1.
        ratio_b: ξ of the second.
        source: "measured" or "estimated".
        confidence: Of a measurement; None for an estimate.
    """

    a: ProfileKey
    b: ProfileKey
    ratio_a: float
    ratio_b: float
    source: str
    confidence: float | None = None


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
    pair = find(known_pairs(store), a, b)
    if pair is not None:
        return Expected(a, b, pair.a.ratio, pair.b.ratio, MEASURED, pair.confidence)
    profiles = best_known(store, a), best_known(store, b)
    if profiles[0] is None or profiles[1] is None:
        return None
    ratio = estimated_ratio(profiles[0], profiles[1], cores)
    return Expected(a, b, ratio, ratio, ESTIMATED)
