"""The nodes of a simulated cluster: which are there, and how many GPUs of each are free."""

from collections.abc import Iterable
from dataclasses import replace

from muri.policies.types import FreeNode, NodeShare
from muri.simulator.hosts import Hosts
from muri.simulator.model import Cluster
from muri.simulator.state import PARTITION


class Nodes:
    """All nodes of the cluster.

    Args:
        cluster: How many there are, and of which size.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hosts = Hosts(cluster)
        width = len(str(max(0, cluster.node_count - 1)))
        # Planning takes nodes by name, so names sort as numbers do.
        self.names = tuple(f"n{index:0{width}}" for index in range(cluster.node_count))
        self._index = {name: index for index, name in enumerate(self.names)}
        self.free = [cluster.gpus_per_node] * cluster.node_count
        self._failed = [0] * cluster.node_count
        self._drained = [0] * cluster.node_count
        self._seen = {count: self._as_free(count) for count in range(cluster.gpus_per_node + 1)}
        self.available_count = cluster.node_count

    def _as_free(self, count: int) -> tuple[FreeNode, ...]:
        cluster, free = self.cluster, self.hosts.free("", count)
        return tuple(
            FreeNode(
                name,
                (PARTITION,),
                count,
                cluster.gpu_mem_gib,
                cluster.gpus_per_node,
                cpu_count=cluster.cpus_per_node,
                mem_gib=cluster.mem_gib_per_node,
                free_cpus=free.cpus,
                free_mem_gib=free.mem_gib,
            )
            for name in self.names
        )

    @property
    def available_gpus(self) -> int:
        """GPUs, free or not, of the nodes on which jobs may start."""
        return self.available_count * self.cluster.gpus_per_node

    def indices(self, gpus: Iterable[NodeShare]) -> tuple[int, ...]:
        """Which nodes these GPUs are on."""
        return tuple(self._index[share.node] for share in gpus)

    def refusal(self, gpus: Iterable[NodeShare]) -> str | None:
        """Why these GPUs cannot be given out; None when they can."""
        for share in gpus:
            index = self._index.get(share.node)
            if index is None or not self.is_available(index) or self.free[index] < share.gpu_count:
                return f"more GPUs of node {share.node} than are free"
        return None

    def hold(self, gpus: Iterable[NodeShare]) -> None:
        """Give GPUs to a unit."""
        for share in gpus:
            self.free[self._index[share.node]] -= share.gpu_count

    def release(self, gpus: Iterable[NodeShare]) -> None:
        """Take GPUs back."""
        for share in gpus:
            self.free[self._index[share.node]] += share.gpu_count

    def is_available(self, index: int) -> bool:
        """Whether jobs may start there."""
        return not self._failed[index] and not self._drained[index]

    def fail(self, index: int, change: int) -> None:
        """A failure begins (1) or ends (−1); several may overlap."""
        self._failed[index] += change
        self._recount()

    def drain(self, index: int, change: int) -> None:
        """A drain begins (1) or ends (−1)."""
        self._drained[index] += change
        self._recount()

    def _recount(self) -> None:
        self.available_count = sum(map(self.is_available, range(len(self.names))))

    def as_free(self) -> tuple[FreeNode, ...]:
        """What policies see: the nodes on which jobs may start."""
        if self.hosts.deviating():
            return tuple([self._with_shares(index) for index in range(len(self.names)) if self.is_available(index)])
        if self.available_count == len(self.names):
            return tuple([self._seen[count][index] for index, count in enumerate(self.free)])
        return tuple(
            [self._seen[self.free[index]][index] for index in range(len(self.names)) if self.is_available(index)]
        )

    def _with_shares(self, index: int) -> FreeNode:
        node = self._seen[self.free[index]][index]
        if node.name not in self.hosts.deviating():
            return node
        cpus, mem_gib = self.hosts.free(node.name, self.free[index])
        return replace(node, free_cpus=max(0.0, cpus), free_mem_gib=max(0.0, mem_gib))

    def overdrawn(self) -> tuple[str, str] | None:
        """A node of which more CPUs or memory is held than it has, and what of it; None if there is none."""
        for name in self.hosts.deviating():
            if what := self.hosts.overdrawn(name, self.free[self._index[name]]):
                return name, what
        return None
