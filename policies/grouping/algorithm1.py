"""Algorithm 1 of Muri: rounds of matching merge jobs into groups until they fit the free GPUs."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from muri.policies.matching.blossom import Edge, match
from muri.policies.options import PolicyOptions
from muri.policies.priority import Candidate
from muri.policies.speed.lockstep import Interleaving, Shape, interleave, merge_table, shape_of
from muri.policies.types import PlanJob

_GAIN = 1e-9
"""Gain in total speed below which a merge is only a rounding error."""


@dataclass(frozen=True)
class Unit:
    """One job, or several that will share GPUs.

    Attributes:
        members: Candidates, the most urgent first.
        total_speed: Sum of the members' predicted speeds: 1 for a job alone.
    """

    members: tuple[Candidate, ...]
    total_speed: float = 1.0

    @property
    def head(self) -> PlanJob:
        """The most urgent member."""
        return self.members[0].job

    @property
    def rank(self) -> int:
        """Place in the queue: that of the most urgent member."""
        return self.members[0].rank

    @property
    def is_group(self) -> bool:
        """Whether it shares GPUs."""
        return len(self.members) > 1

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """What the members' interleaving depends on; empty when a profile is missing."""
        profiles = [member.job.profile for member in self.members]
        return tuple(shape_of(profile) for profile in profiles if profile is not None)

    @property
    def gpu_mem_gib(self) -> float:
        """GPU memory that placement must find: of a group only, a job alone asked Slurm for it."""
        return sum(shape.gpu_mem_gib for shape in self.shapes) if self.is_group else 0.0

    def interleaving(self, options: PolicyOptions) -> Interleaving:
        """How the members take turns."""
        return interleave(self.shapes, worst=options.ordering == "worst")


@dataclass(frozen=True, slots=True)
class Bucket:
    """What members of a group must have in common."""

    user: str
    partition: str
    gpu_count: int


def bucket_of(job: PlanJob, *, same_user: bool) -> Bucket:
    """The bucket of a job; without `same_user` all users share buckets."""
    return Bucket(job.user if same_user else "", job.partition, job.gpu_count)


def can_share(job: PlanJob) -> bool:
    """Whether anything is known that lets the job be grouped."""
    return job.groupable and job.profile is not None and sum(job.profile.stage_s) > 0


@dataclass(frozen=True, slots=True)
class GroupingRules:
    """What a group may look like.

    Attributes:
        options: Group size, ordering and matching.
        same_user: Whether all members must have one owner.
        memory_limit_gib: Memory per GPU that a group of a bucket may use.
        fits: Whether units could all be placed on the free GPUs.
    """

    options: PolicyOptions
    same_user: bool
    memory_limit_gib: Callable[[Bucket], float]
    fits: Callable[[Sequence[Unit]], bool]


@dataclass(frozen=True, slots=True)
class Merge:
    """Two units that matching chose to merge."""

    weight: float
    first: Unit
    second: Unit
    total_speed: float

    @property
    def unit(self) -> Unit:
        """The merged unit."""
        members = sorted((*self.first.members, *self.second.members), key=lambda member: member.rank)
        return Unit(tuple(members), self.total_speed)


def form_groups(candidates: Iterable[Candidate], rules: GroupingRules) -> tuple[Unit, ...]:
    """Merge jobs into groups, no more than it takes to fit the free GPUs (Algorithm 1).

    There are ⌈log2 k⌉ rounds for groups of up to k. Each matches the units of every bucket and
    merges the matched pairs, as few of them and as efficient ones as it takes to fit.

    Args:
        candidates: The selected jobs.
        rules: What a group may look like.

    Returns:
        Units by rank; every candidate is in exactly one.
    """
    units = tuple(Unit((candidate,)) for candidate in sorted(candidates, key=lambda item: item.rank))
    for _ in range(math.ceil(math.log2(rules.options.max_group_size))):
        if rules.fits(units):
            break
        merges = _matched_pairs(units, rules)
        if not merges:
            break
        units = _merge_until_fit(units, merges, rules.fits)
    return units


def _matched_pairs(units: Sequence[Unit], rules: GroupingRules) -> list[Merge]:
    """The matching of every bucket, the most efficient pair first."""
    buckets: dict[Bucket, list[Unit]] = {}
    for unit in units:
        if can_share(unit.head):
            buckets.setdefault(bucket_of(unit.head, same_user=rules.same_user), []).append(unit)
    merges = [merge for bucket, members in buckets.items() for merge in match_bucket(bucket, members, rules)]
    return sorted(merges, key=lambda merge: (-round(merge.weight, 9), merge.first.rank, merge.second.rank))


def match_bucket(bucket: Bucket, units: Sequence[Unit], rules: GroupingRules) -> list[Merge]:
    """Maximum-weight matching among the units of one bucket; the weight of a pair is its γ.

    A pair that runs no faster together than one after the other is not considered, nor one that
    needs more memory than a GPU has.
    """
    kinds = sorted({tuple(sorted(unit.shapes)) for unit in units})
    position = {kind: index for index, kind in enumerate(kinds)}
    of_unit = np.array([position[tuple(sorted(unit.shapes))] for unit in units])
    options = rules.options
    table = merge_table(kinds, max_size=options.max_group_size, worst=options.ordering == "worst")
    cells = np.ix_(of_unit, of_unit)
    total_speed, efficiency = table.total_speed[cells], table.efficiency[cells]
    alone = np.array([unit.total_speed for unit in units])
    needed = np.maximum(alone[:, None], alone[None, :]) * options.min_speedup
    gains = total_speed > needed + _GAIN  # False where NaN
    admitted = np.triu(gains & (table.gpu_mem_gib[cells] <= rules.memory_limit_gib(bucket)), k=1)
    edges = [
        Edge(int(first), int(second), float(efficiency[first, second]))
        for first, second in zip(*np.nonzero(admitted), strict=True)
    ]
    return [
        Merge(float(efficiency[pair]), units[pair[0]], units[pair[1]], float(total_speed[pair]))
        for pair in match(edges, options.matching)
    ]


def _merge_until_fit(
    units: Sequence[Unit], merges: Sequence[Merge], fits: Callable[[Sequence[Unit]], bool]
) -> tuple[Unit, ...]:
    """Apply no more of the merges than it takes to fit, or all if that is not enough.

    Merges of small jobs are given up first, for they free the fewest GPUs; within a size the
    least efficient go first.
    """
    kept: dict[tuple[int, str], list[Merge]] = {}
    for merge in merges:
        kept.setdefault((merge.first.head.gpu_count, merge.first.head.partition), []).append(merge)
    if not fits(_merged(units, kept)):
        return _merged(units, kept)
    for size in sorted(kept):
        full = kept[size]

        def is_enough(count: int, size: tuple[int, str] = size, full: list[Merge] = full) -> bool:
            return fits(_merged(units, kept | {size: full[:count]}))

        kept[size] = full[: bisect_left(range(len(full)), True, key=is_enough)]
    return _merged(units, kept)


def _merged(units: Sequence[Unit], kept: Mapping[tuple[int, str], Sequence[Merge]]) -> tuple[Unit, ...]:
    merges = [merge for chosen in kept.values() for merge in chosen]
    gone = {unit.rank for merge in merges for unit in (merge.first, merge.second)}
    rest = [unit for unit in units if unit.rank not in gone]
    return tuple(sorted([*rest, *(merge.unit for merge in merges)], key=lambda unit: unit.rank))
