"""What a matching solver returns."""

from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs without a common member, and the proof of how good they are.

    Attributes:
        pairs: Index pairs (first < second), sorted.
        weight: Sum of their weights.
        upper_bound: Proven: no matching of the same graph weighs more.
    """

    pairs: tuple[Pair, ...]
    weight: float
    upper_bound: float

    @property
    def gap(self) -> float:
        """Share of the bound by which the weight may fall short of the optimum."""
        return _gap(self.weight, self.upper_bound)


@dataclass(frozen=True, slots=True)
class TypeMatching:
    """How many pairs of which types, and the proof of how good they are.

    Attributes:
        pairs: (one type, the same or a later type, how many pairs), sorted; none without pairs.
        weight: Sum of their weights.
        upper_bound: Proven: no matching of these counts weighs more.
    """

    pairs: tuple[tuple[int, int, int], ...]
    weight: float
    upper_bound: float

    @property
    def gap(self) -> float:
        """Share of the bound by which the weight may fall short of the optimum."""
        return _gap(self.weight, self.upper_bound)


def _gap(weight: float, upper_bound: float) -> float:
    return max(0.0, 1.0 - weight / upper_bound) if upper_bound > 0 else 0.0
