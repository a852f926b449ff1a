"""AntMan's GPUs: one guaranteed and one opportunistic job on each; a job may hold GPUs before it has all of them."""

from dataclasses import dataclass, field
from typing import Final

from muri.simulator.model import Cluster

_FREE = -1
_GUARANTEED_LOAD: Final = 0.1
_COMPLETE: Final = 0.01
_OPPORTUNISTIC_LOAD: Final = 0.9
_LOAD_LIMIT: Final = 0.8
"""Nominal loads by which the simulator prefers idle GPUs for opportunistic jobs, then reserved, then busy ones, and
never two opportunistic jobs on one (jobs.py, gpu_util). Their sums are rounded; the order among GPUs that were used
and freed again depends on it."""


@dataclass(slots=True)
class Seats:
    """Who has which GPU.

    Attributes:
        cluster: The nodes.
        guaranteed: The guaranteed job of each GPU, or −1.
        load: Nominal load of each GPU.
        free: GPUs of each node that no guaranteed job has.
        held: GPUs that each job holds.
        home: Node on which a guaranteed job that did not find all of its GPUs waits for the rest.
    """

    cluster: Cluster
    guaranteed: list[int]
    load: list[float]
    free: list[int]
    held: dict[int, list[int]] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster) -> "Seats":
        """An empty cluster."""
        free = [cluster.gpus_per_node] * cluster.node_count
        return cls(cluster, [_FREE] * cluster.gpu_count, [0.0] * cluster.gpu_count, free)

    def hold(self, job: int, gpus: int) -> bool:
        """Give a guaranteed job GPUs, as far as there are any; it keeps those that it already has.

        Returns:
            Whether it now has all of them.
        """
        size = self.cluster.gpus_per_node
        missing = gpus - len(self.held.setdefault(job, []))
        whole, rest = divmod(missing, size) if gpus > size else (0, missing)
        for node in [node for node, free in enumerate(self.free) if free == size][:whole]:
            self._seat(job, node, size)
            missing -= size
        if rest:
            missing -= self._hold_rest(job, rest)
        if missing:
            return False
        for gpu in self.held[job]:
            self.load[gpu] += _COMPLETE
        return True

    def join(self, job: int, gpus: int) -> bool:
        """Give an opportunistic job the least loaded GPUs without another one, wherever they are."""
        open_to_all = [gpu for gpu, load in enumerate(self.load) if load < _LOAD_LIMIT]
        if len(open_to_all) < gpus:
            return False
        self.held[job] = sorted(open_to_all, key=lambda gpu: self.load[gpu])[:gpus]
        for gpu in self.held[job]:
            self.load[gpu] += _OPPORTUNISTIC_LOAD
        return True

    def leave(self, job: int) -> None:
        """Give back the GPUs of a job that ran."""
        self.home.pop(job, None)
        for gpu in self.held.pop(job):
            if self.guaranteed[gpu] == job:
                self.guaranteed[gpu] = _FREE
                self.free[gpu // self.cluster.gpus_per_node] += 1
                self.load[gpu] -= _GUARANTEED_LOAD
            else:
                self.load[gpu] -= _OPPORTUNISTIC_LOAD

    def beside(self, job: int) -> set[int]:
        """The guaranteed jobs on an opportunistic job's GPUs, those among them that still wait for GPUs too."""
        return {self.guaranteed[gpu] for gpu in self.held[job]} - {_FREE}

    def node(self, job: int) -> int:
        """The first node that a job has GPUs of."""
        return min(self.held[job]) // self.cluster.gpus_per_node

    def gpus_held(self) -> int:
        """GPUs that anybody has, also jobs that still wait for the rest of theirs."""
        return len({gpu for held in self.held.values() for gpu in held})

    def _hold_rest(self, job: int, wanted: int) -> int:
        """GPUs of one node: all if any node has them, else as many as the fullest choice offers."""
        node = self.home.get(job, -1)
        if node < 0:
            most = max(range(len(self.free)), key=self.free.__getitem__)
            node = next((node for node, free in enumerate(self.free) if free >= wanted), most)
            if self.free[node]:
                self.home[job] = node
        taken = min(wanted, self.free[node])
        if taken:
            self._seat(job, node, taken)
        return taken

    def _seat(self, job: int, node: int, count: int) -> None:
        size = self.cluster.gpus_per_node
        open_gpus = [gpu for gpu in range(node * size, (node + 1) * size) if self.guaranteed[gpu] == _FREE]
        self.free[node] -= count
        self.held[job] += open_gpus[:count]
        for gpu in open_gpus[:count]:
            self.guaranteed[gpu] = job
            self.load[gpu] += _GUARANTEED_LOAD - _COMPLETE
