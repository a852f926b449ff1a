"""A first place for jobs of every size: what nobody stops must not keep jobs of another size out for ever."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.cycle.queue import Bucket, Contender, Members
from muri.policies.types import FreeNode


class KeptNode(NamedTuple):
    """A node whose idle GPUs are kept until there are enough of them.

    Attributes:
        name: The node.
        wanted_by: The job that they are kept for.
    """

    name: str
    wanted_by: Contender


class _Size(NamedTuple):
    partition: str
    gpu_count: int
    node_count: int

    @staticmethod
    def of(bucket: Bucket) -> "_Size":
        return _Size(bucket.partition, bucket.gpu_count, bucket.node_count)


@dataclass(frozen=True, slots=True)
class FirstPlaces:
    """Whom a plan serves before all others.

    Attributes:
        starts: Jobs for which GPUs are free.
        kept: Nodes that take no other jobs until the jobs they are kept for fit.
    """

    starts: tuple[Contender, ...]
    kept: tuple[KeptNode, ...]


def first_places(
    eligible: Sequence[Contender],
    open_units: Iterable[Members],
    running: Iterable[Members],
    nodes: Sequence[FreeNode],
    free: FreeGpus,
    left_s: Callable[[Members], float],
) -> FirstPlaces:
    """Find a place for the most urgent job of each size of which nothing runs that others could join.

    Small jobs come and go, and each takes the GPUs that another leaves, so a job that needs a whole node would wait
    until none of them is left. One unit of a size is enough: others of that size can join it, or follow it.

    Args:
        eligible: Jobs by rank.
        open_units: What runs and takes new members.
        running: What runs and is not up for decision.
        nodes: The nodes of the pool.
        free: Their free GPUs; they are not changed.
        left_s: Predicts how long a running unit goes on; infinite when unknown.
    """
    first: dict[_Size, Contender] = {}
    served = {_Size.of(members[0].bucket) for members in open_units}
    for contender in eligible:
        size = _Size.of(contender.bucket)
        if contender.unit is not None:
            served.add(size)
        else:
            first.setdefault(size, contender)
    wanted = [contender for size, contender in first.items() if size not in served]
    starts: list[Contender] = []
    kept: list[KeptNode] = []
    ends = _ends(running, left_s)
    # Where something as large runs, GPUs for the job become free all at once; small units are what keeps it out.
    largest = {name: max(count for _, count in found) for name, found in ends.items()}
    trial = free.copy()
    # The large ones first: they fit in the fewest places.
    for contender in sorted(wanted, key=lambda item: (-item.bucket.gpu_count, item.rank)):
        bucket = contender.bucket
        if trial.take(bucket.partition, bucket.gpu_count, node_count=bucket.node_count) is not None:
            starts.append(contender)
        elif bucket.node_count == 1:
            shut = {each.name for each in kept} | {name for name, count in largest.items() if count >= bucket.gpu_count}
            node = _soonest(bucket, [each for each in nodes if each.name not in shut], trial, ends)
            if node is not None:
                kept.append(KeptNode(node, contender))
                trial.take_on(node, trial.on_node(node))
    return FirstPlaces(tuple(starts), tuple(kept))


def _ends(running: Iterable[Members], left_s: Callable[[Members], float]) -> dict[str, list[tuple[float, int]]]:
    """For each node, when how many of its GPUs are given back, the soonest first."""
    ends: dict[str, list[tuple[float, int]]] = {}
    for members in running:
        unit = members[0].unit
        assert unit is not None
        for share in unit.gpus:
            ends.setdefault(share.node, []).append((left_s(members), share.gpu_count))
    return {node: sorted(found) for node, found in ends.items()}


def _soonest(
    bucket: Bucket, nodes: Iterable[FreeNode], free: FreeGpus, ends: Mapping[str, Sequence[tuple[float, int]]]
) -> str | None:
    """The node that has enough free GPUs soonest; where nobody knows, the one that lacks the fewest."""
    found: list[tuple[float, int, str]] = []
    for node in nodes:
        if bucket.partition not in node.partitions:
            continue
        gpus, after_s = free.on_node(node.name), 0.0
        missing = bucket.gpu_count - gpus
        for left_s, count in ends.get(node.name, ()):
            if gpus >= bucket.gpu_count:
                break
            gpus, after_s = gpus + count, left_s
        if gpus >= bucket.gpu_count:
            found.append((after_s, missing, node.name))
    return min(found)[2] if found else None
