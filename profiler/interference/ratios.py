"""How much slower two models run side by side: the interference ratios ξ of SJF-BSBF, measured and stored."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from muri.profiler.interference.errors import InterferenceError
from muri.profiler.records import ProfileKey
from muri.profiler.store import Document, ProfileStore

KIND: Final = "interference"
"""Kind of the store's documents that hold pairs."""

_JOIN: Final = " + "


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two.

    Attributes:
        key: What ran.
        solo_s: Seconds per iteration alone.
        shared_s: Seconds per iteration beside the other.
        ratio: ξ ≥ 1, how much longer an iteration takes beside the other. Never below 1: nobody is faster in
            company, but measurements scatter.
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
            InterferenceError: A time is not above 0, the ratio below 1, or the confidence no probability.
        """
        if not all(math.isfinite(value) and value > 0 for value in (self.solo_s, self.shared_s)):
            raise InterferenceError(f"{self.key}: {self.solo_s} s alone, {self.shared_s} s shared; both must be > 0")
        if not (math.isfinite(self.ratio) and self.ratio >= 1):
            raise InterferenceError(f"{self.key}: interference ratio {self.ratio} must be ≥ 1")
        if not 0 <= self.confidence <= 1:
            raise InterferenceError(f"{self.key}: confidence {self.confidence} must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class Interference:
    """Two models that shared a device, measured.

    Attributes:
        a: One of them.
        b: The other.
        rounds: How often it was measured alone and side by side in turn.
        measured_s: Seconds that the measurement ran both scripts steadily, alone and side by side together.
        measured_at: UTC time, ISO-8601.
    """

    a: Side
    b: Side
    rounds: int
    measured_s: float
    measured_at: str

    @property
    def pair(self) -> tuple[ProfileKey, ProfileKey]:
        """Both keys, the lesser first."""
        return ordered(self.a.key, self.b.key)

    @property
    def confidence(self) -> float:
        """That of the less certain ratio."""
        return min(self.a.confidence, self.b.confidence)

    def swapped(self) -> "Interference":
        """The same pair, seen from the other side."""
        return replace(self, a=self.b, b=self.a)

    def seen_from(self, key: ProfileKey) -> "Interference":
        """With that key as `a`."""
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
            return cls(a, b, int(values["rounds"]), float(values["measured_s"]), str(values["measured_at"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InterferenceError(f"a stored pair is incomplete: {error!r}") from error


def ordered(key_a: ProfileKey, key_b: ProfileKey) -> tuple[ProfileKey, ProfileKey]:
    """The lesser key first."""
    return (key_a, key_b) if key_a <= key_b else (key_b, key_a)


def put(store: ProfileStore, found: Interference) -> None:
    """Store a pair; an older measurement of it is replaced."""
    store.put_document(KIND, Document(_name(*found.pair), found.measured_at, found.to_dict()))


def known_pairs(store: ProfileStore) -> tuple[Interference, ...]:
    """All measured pairs, by name.

    Raises:
        InterferenceError: A stored pair cannot be understood.
    """
    return tuple(Interference.from_dict(document.body) for document in store.documents(KIND))


def find(known: Iterable[Interference], key_a: ProfileKey, key_b: ProfileKey) -> Interference | None:
    """The pair of two keys with the first as `a`; None when it was not measured."""
    wanted = ordered(key_a, key_b)
    return next((item.seen_from(key_a) for item in known if item.pair == wanted), None)


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
