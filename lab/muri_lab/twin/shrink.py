"""Finds a small set that still fails."""

from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def smallest_failing(
    items: Sequence[_Item], fails: Callable[[Sequence[_Item]], bool], most_trials: int = 60
) -> list[_Item]:
    """Return a part of the items that still fails: halves are left out first, then smaller parts."""
    kept, parts, trials = list(items), 2, 0
    while kept and trials < most_trials:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            trials += 1
            if fails(rest):
                kept, parts = rest, max(2, parts - 1)
                break
            if trials >= most_trials:
                return kept
        else:
            if size == 1:
                return kept
            parts = min(len(kept), 2 * parts)
    return kept
