"""Where GPUs are free: best fit on one node, never more than a node has."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from muri.policies.grouping.algorithm1 import Unit
from muri.policies.types import FreeNode


class FreeGpus:
    """The GPUs that are still to be given out while one plan is made.

    Args:
        nodes: The nodes; they are not changed.
    """

    def __init__(self, nodes: Iterable[FreeNode]) -> None:
        self._nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self._free = {name: node.free_gpus for name, node in self._nodes.items()}
        self._by_partition: dict[str, list[str]] = {}
        for node in self._nodes.values():
            for partition in sorted(set(node.partitions)):
                self._by_partition.setdefault(partition, []).append(node.name)

    def copy(self) -> "FreeGpus":
        """An independent copy, to try something out."""
        twin = FreeGpus.__new__(FreeGpus)
        twin._nodes, twin._by_partition = self._nodes, self._by_partition
        twin._free = dict(self._free)
        return twin

    def take(self, partition: str, gpu_count: int, gpu_mem_gib: float = 0.0) -> str | None:
        """Take GPUs of one node: the one that is left with the fewest.

        On a tie it is the one with less memory, so that groups find the larger; then the first by name.

        Args:
            partition: The node must belong to it.
            gpu_count: How many GPUs.
            gpu_mem_gib: Memory that one GPU must have; nodes of unknown memory qualify.

        Returns:
            The node's name, or None when no node has as many.
        """
        names = (
            name
            for name in self._by_partition.get(partition, ())
            if self._free[name] >= gpu_count and self._has_memory(name, gpu_mem_gib)
        )
        best = min(names, key=lambda name: (self._free[name], self._nodes[name].gpu_mem_gib), default=None)
        if best is not None:
            self._free[best] -= gpu_count
        return best

    def take_spanning(self, partition: str, gpu_count: int) -> bool:
        """Take GPUs of several nodes, the emptiest first, or none when there are too few in all."""
        if self.total(partition) < gpu_count:
            return False
        names = self._by_partition.get(partition, ())
        for name in sorted(names, key=lambda name: (-self._free[name], name)):
            taken = min(gpu_count, self._free[name])
            self._free[name] -= taken
            gpu_count -= taken
        return True

    def has_nodes(self, partition: str) -> bool:
        """Whether any node of the partition can be used, free or not."""
        return bool(self._by_partition.get(partition))

    def total(self, partition: str) -> int:
        """Free GPUs of a partition."""
        return sum(self._free[name] for name in self._by_partition.get(partition, ()))

    def total_of_all(self) -> int:
        """Free GPUs of all nodes."""
        return sum(self._free.values())

    def most_on_one_node(self, partition: str) -> int:
        """The most GPUs that are free on one node of a partition."""
        return max((self._free[name] for name in self._by_partition.get(partition, ())), default=0)

    def largest_node(self, partition: str) -> int | None:
        """GPUs of the partition's largest node, free or not; None while one of them is unknown."""
        counts = [self._nodes[name].gpu_count for name in self._by_partition.get(partition, ())]
        return max(counts) if counts and all(counts) else None

    def largest_memory_gib(self, partition: str, gpu_count: int) -> float:
        """Most memory per GPU among the nodes with enough free GPUs; infinite where one is unknown."""
        return max(
            (
                self._nodes[name].gpu_mem_gib or float("inf")
                for name in self._by_partition.get(partition, ())
                if self._free[name] >= gpu_count
            ),
            default=float("inf"),
        )

    def _has_memory(self, name: str, gpu_mem_gib: float) -> bool:
        capacity_gib = self._nodes[name].gpu_mem_gib
        return capacity_gib == 0 or capacity_gib >= gpu_mem_gib


class Placement(NamedTuple):
    """A unit and the node whose GPUs it gets."""

    unit: Unit
    node: str


class Placed(NamedTuple):
    """The units that got GPUs, in the order in which they did, and what is left."""

    placements: tuple[Placement, ...]
    free: FreeGpus


def place(units: Iterable[Unit], free: FreeGpus) -> Placed:
    """Give GPUs to units: priority decides who gets any, GPU count who chooses first.

    Placing the large ones first leaves the fewest fragments. Where that order happens to seat
    fewer, the order of priority is kept.

    Args:
        units: Units, in any order.
        free: Free GPUs; they are not changed.
    """
    by_rank = _place_in_order(sorted(units, key=lambda unit: unit.rank), free)
    admitted = [placement.unit for placement in by_rank.placements]
    by_size = _place_in_order(_descending(admitted), free)
    return by_size if len(by_size.placements) == len(admitted) else by_rank


def fits(units: Sequence[Unit], free: FreeGpus) -> bool:
    """Whether all units can get GPUs at once."""
    if sum(unit.head.gpu_count for unit in units) > free.total_of_all():
        return False
    return len(_place_in_order(_descending(units), free).placements) == len(units)


def _descending(units: Iterable[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: (-unit.head.gpu_count, unit.rank))


def _place_in_order(units: Iterable[Unit], free: FreeGpus) -> Placed:
    left = free.copy()
    placements = []
    for unit in units:
        node = left.take(unit.head.partition, unit.head.gpu_count, unit.gpu_mem_gib)
        if node is not None:
            placements.append(Placement(unit, node))
    return Placed(tuple(placements), left)
