"""Which pair is worth measuring next, so that the table fills in over time where it is needed. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from muri.profiler.interference.ratios import Interference, ordered
from muri.profiler.records import ProfileKey

SURE: Final = 0.8
"""A pair with that confidence need not be measured again."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that could be measured.

    Attributes:
        a: The lesser key.
        b: The other, or the same.
        chances: How many pairs of the queued jobs are of these two models.
        confidence: Of what is known about the pair; None when it was never measured.
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
