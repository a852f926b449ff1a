"""The nodes of a simulated cluster: which are there, and how many GPUs of each are free."""

from collections.abc import Iterable

from muri.policies.types import FreeNode, NodeShare
from muri.simulator.model import Cluster
from muri.simulator.state import PARTITION


class Nodes:
    """All nodes of the cluster.

    Args:
        cluster: How many there are, and of which size.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
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
        cluster = self._cluster
        return tuple(
            FreeNode(name, (PARTITION,), count, cluster.gpu_mem_gib, cluster.gpus_per_node) for name in self.names
        )

    @property
    def available_gpus(self) -> int:
        """GPUs, free or not, of the nodes on which jobs may start."""
        return self.available_count * self._cluster.gpus_per_node

    def indices(self, gpus: Iterable[NodeShare]) -> tuple[int, ...]:
        """Which nodes these GPUs are on."""
        return tuple(self._index[share.node] for share in gpus)

    def first_without(self, gpus: Iterable[NodeShare]) -> str | None:
        """Name of the first node on which these GPUs are not free; None when they all are."""
        for share in gpus:
            index = self._index.get(share.node)
            if index is None or not self.is_available(index) or self.free[index] < share.gpu_count:
                return share.node
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
        if self.available_count == len(self.names):
            return tuple([self._seen[count][index] for index, count in enumerate(self.free)])
        return tuple(
            [self._seen[self.free[index]][index] for index in range(len(self.names)) if self.is_available(index)]
        )
