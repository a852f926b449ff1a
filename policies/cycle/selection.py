"""How far down the queue to look: just so many jobs that groups of k fill the free GPUs."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from muri.policies.cycle.bucket import Bucket
from muri.policies.cycle.placement import FreeGpus
from muri.policies.cycle.queue import Contender
from muri.policies.types import PlanRequest


@dataclass(slots=True)
class Choice:
    """The jobs of one bucket that a cycle considers.

    Attributes:
        members: The jobs by rank.
        slots: How many of them have GPUs reserved, so how many groups there is room for.
    """

    members: list[Contender] = field(default_factory=list)
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The jobs that a cycle considers.

    Attributes:
        alone: Jobs that cannot share and have GPUs reserved, by rank.
        buckets: The others.
        complete: Whether nobody was passed over.
    """

    alone: tuple[Contender, ...]
    buckets: dict[Bucket, Choice]
    complete: bool

    @property
    def room_for_all(self) -> bool:
        """Whether every job can have GPUs of its own."""
        return self.complete and all(choice.slots == len(choice.members) for choice in self.buckets.values())


class _Trial:
    """Reservations made on paper: which sizes no longer fit is remembered, for GPUs only get fewer."""

    def __init__(self, free: FreeGpus) -> None:
        self._free = free.copy()
        self._full: set[tuple[str, int, int]] = set()

    def reserve(self, bucket: Bucket) -> bool:
        place = (bucket.partition, bucket.gpu_count, bucket.node_count)
        if place in self._full:
            return False
        if self._free.take(bucket.partition, bucket.gpu_count, node_count=bucket.node_count) is None:
            self._full.add(place)
            return False
        return True


def select(contenders: Iterable[Contender], free: FreeGpus, group_size: int) -> Selection:
    """Take jobs in order of priority until groups of `group_size` would fill the free GPUs.

    A job that finds GPUs reserves them and opens seats for the next jobs of its bucket. A job that
    finds neither a seat nor GPUs is passed over, so smaller jobs behind it are considered
    (backfill). GPUs that are left then go to jobs that have only a seat.

    Source: Muri, section 4.2: the first n jobs, with n such that groups of k fill the cluster.

    Args:
        contenders: Jobs by rank.
        free: Free GPUs; they are not changed.
        group_size: Most jobs per group, k.
    """
    trial = _Trial(free)
    buckets: dict[Bucket, Choice] = {}
    alone: list[Contender] = []
    seated: list[tuple[Bucket, Choice]] = []
    complete = True
    for contender in contenders:
        bucket = contender.bucket
        if contender.shape is None:
            if trial.reserve(bucket):
                alone.append(contender)
            else:
                complete = False
            continue
        choice = buckets.get(bucket)
        if choice is None:
            choice = buckets[bucket] = Choice()
        if len(choice.members) < choice.slots * group_size:
            seated.append((bucket, choice))
        elif trial.reserve(bucket):
            choice.slots += 1
        else:
            complete = False
            continue
        choice.members.append(contender)
    for bucket, choice in seated:
        if trial.reserve(bucket):
            choice.slots += 1
    return Selection(tuple(alone), {bucket: choice for bucket, choice in buckets.items() if choice.slots}, complete)


def pools(request: PlanRequest) -> tuple[frozenset[str], ...]:
    """Sets of partitions that share no node with each other: each is planned by itself.

    A running job ties its partition to those of the nodes that it runs on.
    """
    of_node = {node.name: frozenset(node.partitions) for node in request.nodes}
    named = {frozenset({partition}) for partition in {job.partition for job in request.jobs}}
    named |= set(of_node.values())
    for unit in request.running:
        own = frozenset(job.partition for job in unit.members)
        named.add(own.union(*(of_node[share.node] for share in unit.gpus)))
    merged: list[frozenset[str]] = []
    for partitions in named:
        apart = [pool for pool in merged if pool.isdisjoint(partitions)]
        touching = [pool for pool in merged if not pool.isdisjoint(partitions)]
        merged = [*apart, partitions.union(*touching)]
    return tuple(sorted(merged, key=sorted))
