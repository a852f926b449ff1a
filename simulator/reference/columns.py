"""All groups that jobs of one GPU count can form, by kind, as arrays."""

from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np

from muri.policies.grouping.kway import multisets
from muri.policies.speed.model import Floats, Indices
from muri.policies.speed.reference import Reference
from muri.simulator.reference.constants import RUN_TIME_FACTOR
from muri.simulator.reference.jobs import JobTable

_COLUMN_LIMIT: Final = 20_000
"""Most groups of one GPU count; with more kinds of jobs than that allows, groups get smaller."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Groups of jobs of one GPU count; rows of the arrays are groups.

    Attributes:
        kinds: Kinds (indices into the job table's shapes) that jobs of this GPU count are of.
        size: Most members of a group.
        members: For each group the places of its members' kinds in `kinds`, ascending.
        index: The row of each of these tuples.
        candidate: Array (n, size): kind × size + how many members before are of the same kind; the last figure of all
            where there is no member.
        speed: Array (n, size): planned speed of each member, 1 = alone.
        overhead_s: What an event costs each member: the sum over the group.
    """

    kinds: tuple[int, ...]
    size: int
    members: tuple[tuple[int, ...], ...]
    index: dict[tuple[int, ...], int]
    candidate: Indices
    speed: Floats
    overhead_s: Floats


def columns_of(table: JobTable, gpus: int, largest: int) -> Columns:
    """List and evaluate all groups of up to so many jobs of this GPU count."""
    kinds, first = np.unique(np.where(table.gpus == gpus, table.kind, -1), return_index=True)
    kinds, first = kinds[kinds >= 0], first[kinds >= 0]
    size = largest
    while size > 1 and comb(len(kinds) + size, size) > _COLUMN_LIMIT:
        size -= 1
    parts = [_of_size(table, kinds, count, size) for count in range(1, size + 1)]
    groups = [tuple(row) for members, _, _ in parts for row in members.tolist()]
    overhead_s = table.overhead_s[first]
    return Columns(
        kinds=tuple(kinds.tolist()),
        size=size,
        members=tuple(groups),
        index={members: row for row, members in enumerate(groups)},
        candidate=np.concatenate([candidate for _, candidate, _ in parts]),
        speed=np.concatenate([speed for _, _, speed in parts]),
        overhead_s=np.concatenate([overhead_s[members].sum(axis=1) for members, _, _ in parts]),
    )


def _of_size(table: JobTable, kinds: Indices, count: int, size: int) -> tuple[Indices, Indices, Floats]:
    """Members, candidates and speeds of the groups of so many jobs."""
    members = multisets(len(kinds), count)
    alone_s = np.array([table.planned[kind].iteration_s for kind in kinds.tolist()]) * RUN_TIME_FACTOR
    period_s = alone_s[members[:, 0]]
    if count > 1:
        period_s = Reference(capped=False).evaluate(table.planned, kinds[members]).period_s
    before = np.zeros_like(members)
    for column in range(1, count):
        same = members[:, column] == members[:, column - 1]
        before[:, column] = np.where(same, before[:, column - 1] + 1, 0)
    missing = ((0, 0), (0, size - count))
    candidate = np.pad(members * size + before, missing, constant_values=len(kinds) * size)
    return members, candidate, np.pad(alone_s[members] / period_s[:, None], missing)
