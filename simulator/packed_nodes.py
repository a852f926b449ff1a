"""The nodes of a simulated cluster whose GPUs are given out one by one, some of them to several jobs."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from muri.policies.types import FreeNode, NodeShare
from muri.simulator.model import Cluster
from muri.simulator.nodes import Nodes
from muri.simulator.state import PARTITION, Unit


class PackedNodes(Nodes):
    """All nodes of the cluster, and who is on each GPU.

    Args:
        cluster: How many there are, and of which size.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._on = [[list[Unit]() for _ in range(cluster.gpus_per_node)] for _ in self.names]
        self._topology = (tuple(range(cluster.gpus_per_node)),)
        self._node = lru_cache(maxsize=65_536)(self._make_node)

    def tenants(self) -> Iterator[list[Unit]]:
        """Who is on each GPU, in the order in which they came, by node and index."""
        for on_node in self._on:
            yield from on_node

    def on(self, unit: Unit) -> Iterator[list[Unit]]:
        """Who is on each of a unit's GPUs."""
        for index, gpu_id in self.places(unit):
            yield self._on[index][gpu_id]

    def places(self, unit: Unit) -> Iterator[tuple[int, int]]:
        """Node and index of each of a unit's GPUs."""
        for index, share in zip(unit.nodes, unit.seat.gpus, strict=True):
            for gpu_id in share.gpu_ids:
                yield index, gpu_id

    def put(self, unit: Unit) -> int:
        """Put a unit on its GPUs; returns on how many of them it is the first."""
        return self._change(unit, 1)

    def take(self, unit: Unit) -> int:
        """Take a unit off its GPUs; returns how many of them are free then."""
        return self._change(unit, -1)

    def _change(self, unit: Unit, sign: int) -> int:
        changed = 0
        for index, gpu_id in self.places(unit):
            there = self._on[index][gpu_id]
            if sign > 0:
                there.append(unit)
            else:
                there.remove(unit)
            if len(there) == (sign > 0):
                self.free[index] -= sign
                changed += 1
        return changed

    def refusal(self, gpus: Iterable[NodeShare]) -> str | None:
        """Why these GPUs cannot be given out, whoever is on them; None when they can."""
        for share in gpus:
            index = self._index.get(share.node)
            if index is None or not self.is_available(index):
                return f"GPUs of node {share.node}, where no job may start"
            named = set(share.gpu_ids)
            if not len(named) == len(share.gpu_ids) == share.gpu_count or not named <= set(self._topology[0]):
                return f"{share.gpu_count} GPUs of node {share.node} and calls them {share.gpu_ids}"
        return None

    def as_free(self) -> tuple[FreeNode, ...]:
        """What policies see: the nodes on which jobs may start, with the GPUs that nobody is on."""
        return tuple(
            [
                self._node(index, tuple([gpu_id for gpu_id, there in enumerate(self._on[index]) if not there]))
                for index in range(len(self.names))
                if self.is_available(index)
            ]
        )

    def _make_node(self, index: int, free: tuple[int, ...]) -> FreeNode:
        cluster, left = self.cluster, self.hosts.free("", len(free))
        return FreeNode(
            self.names[index],
            (PARTITION,),
            len(free),
            cluster.gpu_mem_gib,
            cluster.gpus_per_node,
            islands=(free,) if free else (),
            topology=self._topology,
            cpu_count=cluster.cpus_per_node,
            mem_gib=cluster.mem_gib_per_node,
            free_cpus=left.cpus,
            free_mem_gib=left.mem_gib,
        )
