"""How far down the queue to look: just so many jobs that groups of k fill the free GPUs."""

from collections.abc import Iterable
from typing import NamedTuple

from muri.policies.grouping.algorithm1 import Bucket, bucket_of, can_share
from muri.policies.placement import FreeGpus
from muri.policies.priority import Candidate
from muri.policies.types import PlanRequest


class Selection(NamedTuple):
    """The jobs that a cycle considers, and the rest, both by rank."""

    chosen: tuple[Candidate, ...]
    rest: tuple[Candidate, ...]


def select(candidates: Iterable[Candidate], free: FreeGpus, *, group_size: int, same_user: bool) -> Selection:
    """Take jobs in order of priority until groups of `group_size` would fill the free GPUs.

    A job that finds GPUs reserves them for its group: the next jobs of its bucket join it until
    the group is full. A job that finds neither a group nor GPUs is passed over, so smaller jobs
    behind it are considered (backfill).

    Source: Muri, section 4.2: the first n jobs, with n such that groups of k fill the cluster.

    Args:
        candidates: Jobs by rank.
        free: Free GPUs; they are not changed.
        group_size: Most jobs per group, k.
        same_user: Whether users have buckets of their own.
    """
    trial = free.copy()
    seats: dict[Bucket, int] = {}
    chosen, rest = [], []
    for candidate in candidates:
        job = candidate.job
        bucket = bucket_of(job, same_user=same_user)
        shares = can_share(job)
        if shares and seats.get(bucket, 0) > 0:
            seats[bucket] -= 1
            chosen.append(candidate)
        elif trial.take(job.partition, job.gpu_count) is not None:
            if shares:
                seats[bucket] = seats.get(bucket, 0) + group_size - 1
            chosen.append(candidate)
        else:
            rest.append(candidate)
    return Selection(tuple(chosen), tuple(rest))


def pools(request: PlanRequest) -> tuple[frozenset[str], ...]:
    """Sets of partitions that share no node with each other: each is planned by itself."""
    named = {frozenset({job.partition}) for job in request.jobs}
    named |= {frozenset(node.partitions) for node in request.nodes}
    merged: list[frozenset[str]] = []
    for partitions in named:
        apart = [pool for pool in merged if pool.isdisjoint(partitions)]
        touching = [pool for pool in merged if not pool.isdisjoint(partitions)]
        merged = [*apart, partitions.union(*touching)]
    return tuple(sorted(merged, key=sorted))
