"""Which GPUs of a node: those that reach each other fast, and no fragments left behind."""

from collections.abc import Iterable

from muri.policies.types import FreeNode


class NodeGpus:
    """The free GPUs of one node, island by island.

    Args:
        node: The node; it is not changed.
    """

    def __init__(self, node: FreeNode) -> None:
        self._known = sum(len(island) for island in node.islands) == node.free_gpus
        self._free = [sorted(island) for island in node.islands]
        topology = node.topology or node.islands
        self._home = {gpu: index for index, island in enumerate(topology) for gpu in island}
        if node.topology:
            self._free = [[] for _ in node.topology]
            self._add(gpu for island in node.islands for gpu in island)

    def copy(self) -> "NodeGpus":
        """An independent copy."""
        twin = NodeGpus.__new__(NodeGpus)
        twin._known, twin._home = self._known, self._home
        twin._free = [list(island) for island in self._free]
        return twin

    def take(self, gpu_count: int) -> tuple[int, ...]:
        """Take GPUs of the island with the tightest fit, else of the fewest islands.

        Args:
            gpu_count: How many; at most as many as are free.

        Returns:
            Their indices, ascending; empty where they are not known.
        """
        if not self._known:
            return ()
        taken: list[int] = []
        while len(taken) < gpu_count:
            island = self._tightest(gpu_count - len(taken))
            part, island[:] = island[: gpu_count - len(taken)], island[gpu_count - len(taken) :]
            taken += part
        return tuple(sorted(taken))

    def take_exactly(self, gpu_ids: tuple[int, ...]) -> None:
        """Take these GPUs; without their indices the node's are no longer known."""
        if not gpu_ids:
            self._known = False
        wanted = set(gpu_ids)
        for island in self._free:
            island[:] = [gpu for gpu in island if gpu not in wanted]

    def give_back(self, gpu_ids: tuple[int, ...]) -> None:
        """Free GPUs; without their indices the node's are no longer known."""
        if gpu_ids:
            self._add(gpu_ids)
        else:
            self._known = False

    def has(self, gpu_ids: tuple[int, ...]) -> bool:
        """Whether these GPUs are free."""
        return not self._known or set(gpu_ids) <= {gpu for island in self._free for gpu in island}

    def _tightest(self, gpu_count: int) -> list[int]:
        """The smallest island that holds as many, or the largest one."""
        enough = [island for island in self._free if len(island) >= gpu_count]
        if enough:
            return min(enough, key=lambda island: (len(island), island))
        return min(self._free, key=lambda island: (-len(island), island))

    def _add(self, gpu_ids: Iterable[int]) -> None:
        """Back to their islands; those of no known island make one of their own."""
        strangers = []
        for gpu in gpu_ids:
            home = self._home.get(gpu)
            if home is None:
                strangers.append(gpu)
            else:
                self._free[home] = sorted((*self._free[home], gpu))
        if strangers:
            self._home |= dict.fromkeys(strangers, len(self._free))
            self._free.append(sorted(strangers))
