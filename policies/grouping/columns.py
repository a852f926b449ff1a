"""All groups that could be formed from given kinds of jobs, and what each is worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np

from muri.policies.grouping.appraisal import Appraiser
from muri.policies.options import PolicyOptions
from muri.policies.speed.model import Floats, Indices, Shape, SpeedModel


@dataclass(frozen=True, slots=True)
class Columns:
    """Groups (multisets of kinds) as the columns of an integer program.

    Attributes:
        kinds: How many kinds there are; also the index that fills the unused places of `members`.
        members: Array (n, k): the kinds of a group's members, ascending.
        value: Array (n,): what each group is worth.
    """

    kinds: int
    members: Indices
    value: Floats

    def take(self, which: Indices) -> "Columns":
        """Some of the columns."""
        return Columns(self.kinds, self.members[which], self.value[which])

    def profits(self, price: Floats, slot_price: float) -> Floats:
        """Reduced profit of every column: its value less what its jobs and its slot are worth elsewhere."""
        padded = np.append(price, 0.0)
        profit = self.value - slot_price
        for place in range(self.members.shape[1]):
            profit -= padded[self.members[:, place]]
        return profit


def column_count(kinds: int, max_size: int) -> int:
    """How many groups of up to `max_size` members can be formed from `kinds` kinds."""
    return comb(kinds + max_size, max_size) - 1


@lru_cache(maxsize=32)
def multisets(kinds: int, size: int) -> Indices:
    """Array (n, size) of all multisets of `size` out of `kinds`, rows ascending and in lexical order."""
    if size == 1:
        return np.arange(kinds, dtype=np.intp)[:, None]
    rest = multisets(kinds, size - 1)
    # Rows of `rest` that start at or after kind f are its tail from `first_row[f]` on.
    first_row = np.searchsorted(rest[:, 0], np.arange(kinds))
    lengths = len(rest) - first_row
    rows = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(first_row, lengths)
    return np.concatenate([np.repeat(np.arange(kinds, dtype=np.intp), lengths)[:, None], rest[rows]], axis=1)


def all_columns(
    shapes: Sequence[Shape],
    worth: Sequence[float],
    options: PolicyOptions,
    model: SpeedModel,
    memory_limit_gib: float,
) -> Columns:
    """Every single job, and every group of up to `max_group_size` that fits the memory and is worth sharing for."""
    appraiser = Appraiser(shapes, worth, options, model, memory_limit_gib)
    kinds, width = len(shapes), options.max_group_size
    members, value = [], []
    for size in range(1, width + 1):
        groups = multisets(kinds, size)
        if size > 1 and appraiser.limits_memory:
            groups = groups[appraiser.fits(groups)]
        worthwhile, total_speed = appraiser.appraise(groups)
        if size > 1:
            chosen = appraiser.pays(total_speed)
            groups, worthwhile = groups[chosen], worthwhile[chosen]
        members.append(np.pad(groups, ((0, 0), (0, width - size)), constant_values=kinds))
        value.append(worthwhile)
    return Columns(kinds, np.concatenate(members), np.concatenate(value))
