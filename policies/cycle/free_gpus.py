"""Where GPUs are free: fewest nodes, best fit, GPUs that are close; never more than a node has.

Nodes that differ in nothing but their names share a shelf, which sorts them by their number of free GPUs, so that
taking GPUs looks at a few numbers, however many nodes there are.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from muri.policies.types import FreeNode, NodeShare, PlanJob

Shares = tuple[NodeShare, ...]


class _Kind(NamedTuple):
    """Common properties of the nodes of one shelf."""

    partitions: frozenset[str]
    gpu_mem_gib: float
    gpu_count: int

    @property
    def capacity_gib(self) -> float:
        return self.gpu_mem_gib or float("inf")

    def has_memory(self, gpu_mem_gib: float) -> bool:
        return self.capacity_gib >= gpu_mem_gib


class _Shelf:
    """Nodes of one kind by number of free GPUs: heaps of indices, in which outdated entries are skipped."""

    __slots__ = ("by_free", "kind", "nodes", "total")

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.by_free: dict[int, list[int]] = {}
        self.nodes = 0
        self.total = 0

    def copy(self) -> "_Shelf":
        twin = _Shelf(self.kind)
        twin.by_free = {free: list(heap) for free, heap in self.by_free.items()}
        twin.nodes, twin.total = self.nodes, self.total
        return twin

    def first(self, free: int, now_free: Sequence[int]) -> int | None:
        """The first node by name with this many free GPUs."""
        heap = self.by_free.get(free)
        while heap:
            if now_free[heap[0]] == free:
                return heap[0]
            heappop(heap)
        if heap is not None:
            del self.by_free[free]
        return None

    def counts(self, now_free: Sequence[int]) -> list[int]:
        """The numbers of free GPUs that its nodes have, ascending; 0 is left out."""
        return [free for free in sorted(self.by_free) if free and self.first(free, now_free) is not None]


class FreeGpus:
    """The GPUs still to be given out in one plan; `whole_nodes`: jobs larger than any node get several idle ones."""

    def __init__(self, nodes: Iterable[FreeNode], *, whole_nodes: bool = False) -> None:
        self._nodes = sorted(nodes, key=lambda node: node.name)
        self._index = {node.name: index for index, node in enumerate(self._nodes)}
        self._free = [node.free_gpus for node in self._nodes]
        self._gpus: list[NodeGpus] | None = [NodeGpus(node) for node in self._nodes]
        self._has_islands = any(len(node.topology) > 1 or len(node.islands) > 1 for node in self._nodes)
        self._whole_nodes = whole_nodes
        kinds = [_Kind(frozenset(node.partitions), node.gpu_mem_gib, node.gpu_count) for node in self._nodes]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self._shelves = [_Shelf(kind) for kind in numbers]
        self._shelf_of = [numbers[kind] for kind in kinds]
        for index, free in enumerate(self._free):
            shelf = self._shelves[self._shelf_of[index]]
            shelf.by_free.setdefault(free, []).append(index)
            shelf.nodes += 1
            shelf.total += free
        self._of_partition: dict[str, list[int]] = {}
        for number, shelf in enumerate(self._shelves):
            for partition in shelf.kind.partitions:
                self._of_partition.setdefault(partition, []).append(number)
        self._largest_node: dict[str, int | None] = {}
        for partition in self._of_partition:
            counts = [shelf.kind.gpu_count for shelf in self._of(partition)]
            self._largest_node[partition] = max(counts) if all(counts) else None

    def copy(self) -> "FreeGpus":
        """An independent copy for trials, which only counts: it names no single GPUs."""
        twin = FreeGpus.__new__(FreeGpus)
        twin.__dict__.update(self.__dict__)  # trials are many: copy.copy takes seven times as long
        twin._gpus, twin._has_islands = None, False
        twin._free, twin._shelves = list(self._free), [shelf.copy() for shelf in self._shelves]
        return twin

    def take(self, partition: str, gpu_count: int, gpu_mem_gib: float = 0.0, node_count: int = 1) -> Shares | None:
        """Take GPUs of the node that is left with the fewest; None when there is no such place.

        On a tie it is the one with less memory (unknown counts as unlimited), so that groups find the larger; among
        equal nodes the one where the GPUs come from the fewest islands, and break up the least; then the first by name.
        A job larger than any node gets whole nodes where those are given out, and one with `node_count` above 1 equal
        shares on as many.
        """
        if node_count > 1:
            return self._take_spread(partition, gpu_count, gpu_mem_gib, node_count)
        if self._whole_nodes:
            largest = self.largest_node(partition)
            if largest is not None and gpu_count > largest:
                return self._take_whole_nodes(partition, gpu_count, gpu_mem_gib)
        best = self._best_fit(partition, gpu_count, gpu_mem_gib)
        return None if best is None else (self._take_from(best, gpu_count),)

    def take_exactly(self, shares: Shares) -> None:
        """Take these GPUs, which must be free."""
        for share in shares:
            index = self._index[share.node]
            self._move(index, -share.gpu_count)
            if self._gpus is not None:
                self._gpus[index].take_exactly(share.gpu_ids)

    def take_on(self, node: str, gpu_count: int) -> NodeShare:
        """Take GPUs of this node, which must have them."""
        return self._take_from(self._index[node], gpu_count)

    def give_back(self, shares: Shares) -> None:
        """Free GPUs that jobs hold."""
        for share in shares:
            index = self._index[share.node]
            self._move(index, share.gpu_count)
            if self._gpus is not None:
                self._gpus[index].give_back(share.gpu_ids)

    def are_free(self, shares: Shares) -> bool:
        """Whether exactly these GPUs can be taken."""
        return all(
            self._free[index] >= share.gpu_count and (self._gpus is None or self._gpus[index].has(share.gpu_ids))
            for index, share in ((self._index[share.node], share) for share in shares)
        )

    def set_aside(self, job: PlanJob) -> bool:
        """Count off GPUs of several nodes for a job, the emptiest first, or none when there are too few in all."""
        gpu_count = job.gpu_count
        if self.total(job.partition) < gpu_count:
            return False
        numbers = set(self._of_partition[job.partition])
        indices = [index for index, number in enumerate(self._shelf_of) if number in numbers]
        for index in sorted(indices, key=lambda index: (-self._free[index], index)):
            taken = min(gpu_count, self._free[index])
            if taken:
                self._take_from(index, taken)
            gpu_count -= taken
        return True

    def on_node(self, node: str) -> int:
        """Free GPUs of one node."""
        return self._free[self._index[node]]

    def suits(self, node: str, partition: str, gpu_mem_gib: float) -> bool:
        """Whether a node is of this partition and has the memory, however many of its GPUs are free."""
        kind = self._shelves[self._shelf_of[self._index[node]]].kind
        return partition in kind.partitions and kind.has_memory(gpu_mem_gib)

    def node_count(self, partition: str) -> int:
        """Nodes of a partition, free or not."""
        return sum(shelf.nodes for shelf in self._of(partition))

    def gpu_count(self, partition: str) -> int | None:
        """GPUs of a partition, free or not; None while one of its nodes is of unknown size."""
        shelves = self._of(partition)
        known = all(shelf.kind.gpu_count for shelf in shelves)
        return sum(shelf.nodes * shelf.kind.gpu_count for shelf in shelves) if known else None

    def total(self, partition: str) -> int:
        """Free GPUs of a partition."""
        return sum(shelf.total for shelf in self._of(partition))

    def everywhere(self) -> int:
        """Free GPUs of all nodes."""
        return sum(shelf.total for shelf in self._shelves)

    def most_on_one_node(self, partition: str) -> int:
        """The most free GPUs on one node of a partition."""
        return max((max(shelf.counts(self._free), default=0) for shelf in self._of(partition)), default=0)

    def idle_gpus(self, partition: str) -> int:
        """GPUs of a partition's idle nodes."""
        return sum(
            shelf.kind.gpu_count * sum(self._free[index] == shelf.kind.gpu_count for index in set(heap))
            for shelf in self._of(partition)
            for heap in [shelf.by_free.get(shelf.kind.gpu_count, [])]
        )

    def largest_node(self, partition: str) -> int | None:
        """GPUs of the partition's largest node, free or not; None while one of them is unknown."""
        return self._largest_node.get(partition)

    def largest_memory_gib(self, partition: str, gpu_count: int) -> float:
        """Most memory per GPU of nodes with enough free GPUs (one, for jobs larger than a node); inf if unknown."""
        largest = self.largest_node(partition)
        needed = 1 if largest is not None and gpu_count > largest else gpu_count
        fitting = (shelf for shelf in self._of(partition) if max(shelf.counts(self._free), default=0) >= needed)
        return max((shelf.kind.capacity_gib for shelf in fitting), default=float("inf"))

    def _of(self, partition: str) -> list[_Shelf]:
        return [self._shelves[number] for number in self._of_partition.get(partition, ())]

    def _best_fit(self, partition: str, gpu_count: int, gpu_mem_gib: float) -> int | None:
        best: tuple[int, float, int] | None = None
        for number in self._of_partition.get(partition, ()):
            shelf = self._shelves[number]
            if not shelf.kind.has_memory(gpu_mem_gib):
                continue
            for free in sorted(shelf.by_free):
                if free >= gpu_count:
                    index = self._nearest(shelf, free, gpu_count)
                    if index is not None:
                        found = (free, shelf.kind.capacity_gib, index)
                        best = found if best is None or found < best else best
                        break
        return None if best is None else best[2]

    def _nearest(self, shelf: _Shelf, free: int, gpu_count: int) -> int | None:
        """Of a shelf's nodes with this number of free GPUs the one that gives them with the fewest islands broken."""
        first = shelf.first(free, self._free)
        if first is None or not self._has_islands or free == shelf.kind.gpu_count:
            return first  # (idle nodes of a kind are alike, and there may be very many)
        alike = (index for index in set(shelf.by_free[free]) if self._free[index] == free)
        return min(alike, key=lambda index: (*self._broken(index, gpu_count), index))

    def _broken(self, index: int, gpu_count: int) -> tuple[int, int]:
        """Number of islands of a node that the GPUs come from, and of GPUs left of the last of these."""
        return (1, 0) if self._gpus is None else self._gpus[index].broken(gpu_count)

    def _take_spread(self, partition: str, gpu_count: int, gpu_mem_gib: float, node_count: int) -> Shares | None:
        """Equal shares of several nodes, of those that are left with the fewest."""
        share, rest = divmod(gpu_count, node_count)
        if rest or node_count > self.node_count(partition):
            return None
        fitting = [
            index
            for index, node in enumerate(self._nodes)
            if self._free[index] >= share and self.suits(node.name, partition, gpu_mem_gib)
        ]
        if len(fitting) < node_count:
            return None
        fitting.sort(key=lambda index: (self._free[index], *self._broken(index, share), index))
        return tuple(self._take_from(index, share) for index in sorted(fitting[:node_count]))

    def _take_whole_nodes(self, partition: str, gpu_count: int, gpu_mem_gib: float) -> Shares | None:
        """The fewest idle nodes: the largest first, for the rest the smallest that is large enough."""
        shelves = [shelf for shelf in self._of(partition) if shelf.kind.has_memory(gpu_mem_gib)]
        chosen: list[tuple[int, int]] = []
        left = gpu_count
        while left:
            idle = [
                (shelf.kind.gpu_count, shelf.kind.capacity_gib, index)
                for shelf in shelves
                if shelf.kind.gpu_count and (index := shelf.first(shelf.kind.gpu_count, self._free)) is not None
            ]
            if not idle:
                for index, taken in chosen:
                    self._move(index, taken)
                return None
            enough = [node for node in idle if node[0] >= left]
            count, _, index = min(enough) if enough else min(idle, key=lambda node: (-node[0], *node[1:]))
            chosen.append((index, min(left, count)))
            self._move(index, -min(left, count))
            left -= min(left, count)
        return tuple(self._share(index, taken) for index, taken in chosen)

    def _take_from(self, index: int, gpu_count: int) -> NodeShare:
        self._move(index, -gpu_count)
        return self._share(index, gpu_count)

    def _share(self, index: int, gpu_count: int) -> NodeShare:
        gpu_ids = () if self._gpus is None else self._gpus[index].take(gpu_count)
        return NodeShare(self._nodes[index].name, gpu_count, gpu_ids)

    def _move(self, index: int, change: int) -> None:
        """Put a node where it belongs now; its old entry is outdated and skipped."""
        shelf = self._shelves[self._shelf_of[index]]
        self._free[index] += change
        shelf.total += change
        heappush(shelf.by_free.setdefault(self._free[index], []), index)


class NodeGpus:
    """The free GPUs of one node, island by island."""

    def __init__(self, node: FreeNode) -> None:
        self._in_order = node.in_order
        self._known = sum(len(island) for island in node.islands) == node.free_gpus
        self._free = [sorted(island) for island in node.islands]
        topology = node.topology or node.islands
        self._home = {gpu: index for index, island in enumerate(topology) for gpu in island}
        if node.topology:
            self._free = [[] for _ in node.topology]
            self._add(gpu for island in node.islands for gpu in island)

    def take(self, gpu_count: int) -> tuple[int, ...]:
        """Take GPUs of the tightest or of the fewest islands, or in order; their indices, empty where unknown."""
        if not self._known:
            return ()
        taken: list[int] = []
        while len(taken) < gpu_count:
            island = self._next([each for each in self._free if each], gpu_count - len(taken))
            part, island[:] = island[: gpu_count - len(taken)], island[gpu_count - len(taken) :]
            taken += part
        return tuple(sorted(taken))

    def broken(self, gpu_count: int) -> tuple[int, int]:
        """Number of islands that the GPUs come from (each from another if unknown), and of GPUs left of the last."""
        if not self._known:
            return gpu_count, 0
        islands, wanted, count, left = [island for island in self._free if island], gpu_count, 0, 0
        while wanted > 0:
            island = self._next(islands, wanted)
            islands.remove(island)
            count, left, wanted = count + 1, max(0, len(island) - wanted), wanted - len(island)
        return count, left

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

    def _next(self, islands: list[list[int]], gpu_count: int) -> list[int]:
        """The smallest island that holds as many, or the largest one; in order the one with the first GPU."""
        if self._in_order:
            return min(islands)
        enough = [island for island in islands if len(island) >= gpu_count]
        if enough:
            return min(enough, key=lambda island: (len(island), island))
        return min(islands, key=lambda island: (-len(island), island))

    def _add(self, gpu_ids: Iterable[int]) -> None:
        """Put GPUs back to their islands; those of no known island make one of their own."""
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
