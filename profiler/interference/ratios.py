"""How much slower two models run side by side: the interference ratios ξ of SJF-BSBF, measured, stored, expected."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any, Final

from muri.profiler import figures
from muri.profiler.errors import InterferenceError
from muri.profiler.estimates import best_known
from muri.profiler.interference.models import estimated_ratio
from muri.profiler.interference.slowdown_fits import PairPoint, gpu_percent
from muri.profiler.records import ProfileKey
from muri.profiler.store import Document, ProfileStore

log = logging.getLogger("muri.profiler")

KIND: Final = "interference"
"""Kind of the store's documents that hold pairs."""

_JOIN: Final = " + "

MEASURED: Final = "measured"
LEARNT: Final = "learnt"
ESTIMATED: Final = "estimated"
_TURNS: Final = " in turns"
SURE: Final = 0.8
"""A pair with this confidence need not be measured again."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of two models that shared a device.

    Attributes:
        key: What ran.
        solo_s: Seconds per iteration alone.
        shared_s: Seconds per iteration beside the other.
        ratio: ξ ≥ 1, how much longer an iteration takes beside the other. Never below 1: no job gains from
            company, though measurements scatter.
        spread: 95 % confidence half-width of the ratio, as a share of it; None when there were too few rounds.
        confidence: Probability that the ratio is right within 5 %, given the rounds' scatter.
        iterations: Iterations beside the other that were measured.
    """

    key: ProfileKey
    solo_s: float
    shared_s: float
    ratio: float
    spread: float | None
    confidence: float
    iterations: int

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give.

        Raises:
            InterferenceError: A figure is outside of what `muri.profiler.figures` allows.
        """
        for name, bounds, value in (
            ("time alone", figures.ITERATION_S, self.solo_s),
            ("time side by side", figures.ITERATION_S, self.shared_s),
            ("interference ratio", figures.RATIO, self.ratio),
            ("spread", figures.VARIATION, self.spread or 0.0),
            ("confidence", figures.SHARE, self.confidence),
            ("number of iterations", figures.ITERATIONS, self.iterations),
        ):
            if fault := bounds.fault(value):
                raise InterferenceError(f"{self.key}: {name} {fault}")


@dataclass(frozen=True, slots=True)
class Interference:
    """Two models that shared a device, measured.

    Attributes:
        a: One of them.
        b: The other.
        rounds: How often it was measured alone and side by side in turn.
        measured_s: Seconds that the measurement ran both scripts steadily, alone and side by side together.
        measured_at: UTC time, ISO-8601.
        source: "measured" by `muri profile pair`, or "learnt" from jobs that shared GPUs.
        turns: Whether they took turns by stage, and did not share as plain processes do.
        samples: Of a learnt pair, both ratios of each round that counts, the oldest first.
    """

    a: Side
    b: Side
    rounds: int
    measured_s: float
    measured_at: str
    source: str = MEASURED
    turns: bool = False
    samples: tuple[tuple[float, float], ...] = ()

    @property
    def pair(self) -> tuple[ProfileKey, ProfileKey]:
        """Both keys, the lesser first."""
        return ordered(self.a.key, self.b.key)

    @property
    def confidence(self) -> float:
        """The confidence of the less certain ratio."""
        return min(self.a.confidence, self.b.confidence)

    def swapped(self) -> "Interference":
        """The same pair, seen from the other side."""
        return replace(self, a=self.b, b=self.a, samples=tuple((b, a) for a, b in self.samples))

    def seen_from(self, key: ProfileKey) -> "Interference":
        """The pair with that key as `a`."""
        return self if self.a.key == key else self.swapped()

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Interference":
        """Read what `to_dict` made.

        Raises:
            InterferenceError: Something is missing or cannot be true.
        """
        try:
            a, b = (_side(values[name]) for name in ("a", "b"))
            measured_s = float(values["measured_s"])
            # Older documents don't say; what was learnt took no seconds of its own.
            source = str(values.get("source") or (MEASURED if measured_s else LEARNT))
            samples = tuple((float(ratio_a), float(ratio_b)) for ratio_a, ratio_b in values.get("samples", ()))
            made = int(values["rounds"]), measured_s, str(values["measured_at"]), source
            return cls(a, b, *made, turns=bool(values.get("turns", False)), samples=samples)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InterferenceError(f"a stored pair is incomplete: {error!r}") from error


Pairs = Mapping[tuple[ProfileKey, ProfileKey], Interference]
"""Measured pairs by their keys, the lesser first."""


def ordered(key_a: ProfileKey, key_b: ProfileKey) -> tuple[ProfileKey, ProfileKey]:
    """The lesser key first."""
    return (key_a, key_b) if key_a <= key_b else (key_b, key_a)


def put(store: ProfileStore, found: Interference) -> None:
    """Store a pair; an older measurement of it is replaced."""
    store.put_document(KIND, to_document(found))


def to_document(found: Interference) -> Document:
    """A pair as the store keeps it; in turns and without are two."""
    name = _name(*found.pair) + (_TURNS if found.turns else "")
    return Document(name, found.measured_at, found.to_dict())


def known_pairs(store: ProfileStore) -> tuple[Interference, ...]:
    """All pairs that shared as plain processes, by name."""
    return tuple(pair for pair in every_pair(store) if not pair.turns)


def every_pair(store: ProfileStore) -> tuple[Interference, ...]:
    """All pairs of the store, by name; one that cannot be understood is left out, and the log names it."""
    found: list[Interference] = []
    for document in store.documents(KIND):
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


def _name(*keys: ProfileKey) -> str:
    return _JOIN.join(str(key) for key in keys)


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


@dataclass(frozen=True, slots=True)
class Expected:
    """Interference ratios of a pair.

    Attributes:
        a: One model.
        b: The other.
        ratio_a: ξ of the first, ≥ 1.
        ratio_b: ξ of the second.
        source: "measured", "learnt" or "estimated".
        confidence: Of a measurement or of what was learnt; None for an estimate.
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
