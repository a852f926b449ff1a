"""What is free on the nodes while a round is planned."""

from collections.abc import Iterable
from heapq import heapify, heappop
from typing import Final

from muri.simulator.model import Cluster
from muri.simulator.synergy_reference.jobs import Kind, Share

_ROUNDING: Final = 1e-9


class Nodes:
    """GPUs, CPUs and memory that nobody has yet, by node; first fit, one GPU at a time."""

    def __init__(self, cluster: Cluster) -> None:
        count = cluster.node_count
        self.gpus = [cluster.gpus_per_node] * count
        self.cpus = [cluster.cpus_per_node] * count
        self.mem_gib = [cluster.mem_gib_per_node] * count
        self._full_below: dict[Share, int] = {}  # nodes before it have no room for the share: no need to look again

    def first_fit(self, gpu_count: int, share: Share) -> dict[int, int] | None:
        """Take GPUs with this share on the first nodes that have room, and say how many on which; None: no room."""
        start = self._full_below.get(share, 0)
        if gpu_count > 1:
            return self._first_fit_of_several(start, gpu_count, share)
        # One GPU is the commonest case, and simulations spend most of their time here.
        gpus, cpus, mem_gib = self.gpus, self.cpus, self.mem_gib
        least_cpus, least_mem_gib = share.cpus - _ROUNDING, share.mem_gib - _ROUNDING
        for node in range(start, len(gpus)):
            if gpus[node] and cpus[node] >= least_cpus and mem_gib[node] >= least_mem_gib:
                gpus[node] -= 1
                cpus[node] -= share.cpus
                mem_gib[node] -= share.mem_gib
                if node > start:
                    self._full_below[share] = node
                return {node: 1}
        self._full_below[share] = len(gpus)
        return None

    def first_fits(self, kinds: Iterable[Kind]) -> list[int]:
        """Take what jobs ask for, one after the other, until no GPU is left.

        Returns:
            The first node of each job, -1 for one that finds no room. Jobs behind the one that took the last GPU are
            left out.
        """
        gpus, cpus, mem_gib, starts = self.gpus, self.cpus, self.mem_gib, self._full_below
        free, count, firsts = sum(gpus), len(gpus), []
        for kind in kinds:
            share = kind.demand
            if kind.gpu_count > 1:
                node = self._first_of_several(kind.gpu_count, share) if kind.gpu_count <= free else -1
            else:  # as in first_fit, but without a call: nearly all of a long simulation's time is spent here
                need_cpus, need_mem_gib = share.cpus - _ROUNDING, share.mem_gib - _ROUNDING
                node = starts.get(share, 0)
                while node < count and (not gpus[node] or cpus[node] < need_cpus or mem_gib[node] < need_mem_gib):
                    node += 1
                starts[share] = node
                if node == count:
                    node = -1
                else:
                    gpus[node] -= 1
                    cpus[node] -= share.cpus
                    mem_gib[node] -= share.mem_gib
            firsts.append(node)
            free -= kind.gpu_count if node >= 0 else 0
            if not free:
                break
        return firsts

    def _first_of_several(self, gpu_count: int, share: Share) -> int:
        counts = self.first_fit(gpu_count, share)
        return next(iter(counts)) if counts else -1

    def _first_fit_of_several(self, start: int, gpu_count: int, share: Share) -> dict[int, int] | None:
        found: dict[int, int] = {}
        missing = gpu_count
        for node in range(start, len(self.gpus)):
            room = self._room(node, share, missing)
            if room:
                found[node] = room
                missing -= room
                if not missing:
                    self._full_below[share] = next(iter(found))
                    self.take(found, share)
                    return found
        return None

    def take(self, counts: dict[int, int], share: Share) -> None:
        """Give GPUs out."""
        for node, count in counts.items():
            self.gpus[node] -= count
            self.cpus[node] -= count * share.cpus
            self.mem_gib[node] -= count * share.mem_gib

    def give_back(self, counts: dict[int, int], share: Share) -> None:
        """Take GPUs back."""
        for node, count in counts.items():
            self.gpus[node] += count
            self.cpus[node] += count * share.cpus
            self.mem_gib[node] += count * share.mem_gib
        self._full_below.clear()

    def with_free_gpus(self, gpu_count: int) -> dict[int, int]:
        """Where so many GPUs are free, whatever else is: on one node, if several are wanted, else on the fullest."""
        if gpu_count > 1:
            for node, free in enumerate(self.gpus):
                if free >= gpu_count:
                    return {node: gpu_count}
        heap = [(free, node) for node, free in enumerate(self.gpus) if free]
        heapify(heap)
        found: dict[int, int] = {}
        missing = gpu_count
        while missing and heap:
            free, node = heappop(heap)
            found[node] = min(free, missing)
            missing -= found[node]
        return found

    def _room(self, node: int, share: Share, most: int) -> int:
        """How many GPUs with this share the node has room for."""
        cpus, mem_gib = self.cpus[node] + _ROUNDING, self.mem_gib[node] + _ROUNDING
        room = 0
        for count in range(1, min(most, self.gpus[node]) + 1):
            if count * share.cpus > cpus or count * share.mem_gib > mem_gib:
                break
            room = count
        return room
