"""Which jobs find GPUs, the first node that fits first; which GPUs they are makes no difference to speed."""

from dataclasses import dataclass, field

from muri.simulator.model import Cluster


@dataclass(slots=True)
class FreeNodes:
    """Free GPUs of each node while one plan is made.

    Attributes:
        size: GPUs of a node.
        free: Free GPUs, by node.
    """

    size: int
    free: list[int]
    _refused: int = field(default=1 << 30)

    @classmethod
    def of(cls, cluster: Cluster) -> "FreeNodes":
        """An empty cluster."""
        return cls(cluster.gpus_per_node, [cluster.gpus_per_node] * cluster.node_count)

    def take(self, gpus: int) -> int:
        """Give out GPUs: of one node, or of whole nodes and the rest on the first other node that has room.

        Returns:
            Index of the first node; -1 when they can't be had.
        """
        if gpus >= self._refused:  # nothing is given back within a plan
            return -1
        node = self._take_within(gpus) if gpus <= self.size else self._take_across(gpus)
        if node < 0 and gpus <= self.size:
            self._refused = min(self._refused, gpus)
        return node

    @property
    def full(self) -> bool:
        """Whether not even a job of one GPU would fit."""
        return self._refused == 1

    def _take_within(self, gpus: int) -> int:
        for node, free in enumerate(self.free):
            if free >= gpus:
                self.free[node] = free - gpus
                return node
        return -1

    def _take_across(self, gpus: int) -> int:
        whole, rest = divmod(gpus, self.size)
        idle = [node for node, free in enumerate(self.free) if free == self.size][:whole]
        if len(idle) < whole:
            return -1
        last = next((node for node, free in enumerate(self.free) if free >= rest and node not in idle), -1)
        if rest and last < 0:
            return -1
        for node in idle:
            self.free[node] = 0
        if rest:
            self.free[last] -= rest
        return idle[0]
