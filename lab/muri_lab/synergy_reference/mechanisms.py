"""CPUs and memory of each job in a round: Synergy's mechanisms, with the public simulator's order of steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop
from typing import Final

import numpy as np

from muri.policies.speed import Floats
from muri.simulator.model import Cluster
from muri_lab.synergy_reference.state import JobTable, Kind, Rows, Share

_ROUNDING: Final = 1e-9


class Nodes:
    """Free GPUs, CPUs and memory by node; first fit, one GPU at a time."""

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
        """Give jobs their GPUs one after the other until none is left; return each job's first node, or -1.

        Jobs after the one that took the last GPU are left out.
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
        """Nodes with this many free GPUs, whatever else is free: one node if several are wanted, else the fullest."""
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


@dataclass(frozen=True, slots=True)
class Round:
    """The jobs of one round, in the order in which they got GPUs."""

    rows: Rows  # The jobs
    speeds: Floats  # How fast each is, relative to its fair share
    first_nodes: Rows  # The first node of each
    nodes: Nodes | None = None  # What is left; None: the mechanism did not track it


Mechanism = Callable[[JobTable, Cluster, Rows], Round]
"""Gives out leases to jobs, in the order of their rows; those that get none are left out."""


def proportional(table: JobTable, cluster: Cluster, rows: Rows) -> Round:
    """Every job has its fair share, which fits wherever GPUs are free: they are filled one after the other."""
    rows = runnable(table, cluster.gpu_count, rows)
    gpus = table.gpus[rows]
    return Round(rows, np.ones(len(rows)), (np.cumsum(gpus) - gpus) // cluster.gpus_per_node)


def greedy(table: JobTable, cluster: Cluster, rows: Rows) -> Round:
    """Every job has its demand or nothing."""
    nodes = Nodes(cluster)
    firsts = np.array(nodes.first_fits(table.kinds[row] for row in rows.tolist()), dtype=np.int64)
    found = firsts >= 0
    chosen = rows[: len(firsts)][found]
    return Round(chosen, table.speed[chosen], firsts[found], nodes)


def tune(table: JobTable, cluster: Cluster, rows: Rows) -> Round:
    """Every job has its demand, or its fair share if that does not fit; other jobs give up their surplus."""
    tuner = _Tuner(table, cluster)
    for row in runnable(table, cluster.gpu_count, rows).tolist():
        tuner.place(row, table.kinds[row])
    leases = tuner.leases
    return Round(
        np.array([lease.row for lease in leases], dtype=np.int64),
        np.array([lease.speed for lease in leases]),
        np.array([next(iter(lease.counts)) for lease in leases], dtype=np.int64),
        tuner.nodes,
    )


MECHANISMS: Final[dict[str, Mechanism]] = {"proportional": proportional, "greedy": greedy, "tune": tune}


def runnable(table: JobTable, gpu_count: int, rows: Rows) -> Rows:
    """The first jobs whose GPUs fit; smaller ones fill what larger ones leave."""
    held = np.cumsum(table.gpus[rows])
    count = int(np.searchsorted(held, gpu_count, side="right"))
    free = gpu_count - (int(held[count - 1]) if count else 0)
    if not free or count == len(rows):
        return rows[:count]
    chosen = rows[:count].tolist()
    for row in rows[count:].tolist():
        wanted = table.kinds[row].gpu_count
        if wanted <= free:
            chosen.append(row)
            free -= wanted
            if not free:
                break
    return np.array(chosen, dtype=np.int64)


@dataclass(slots=True)
class _Lease:
    """A job's GPUs by node, CPUs and memory of each, and its speed."""

    row: int
    kind: Kind
    counts: dict[int, int]
    share: Share
    speed: float


class _Tuner:
    """One round of TUNE."""

    def __init__(self, table: JobTable, cluster: Cluster) -> None:
        self._fair = table.fair
        self._by_node: list[list[_Lease]] = [[] for _ in range(cluster.node_count)]
        self.nodes = Nodes(cluster)
        self.leases: list[_Lease] = []

    def place(self, row: int, kind: Kind) -> None:
        """Give a job its lease.

        With the fair shares of the models known here there is always room in the end; without room the public code
        would stop, and here the job waits.
        """
        share, speed = kind.demand, kind.speed
        counts = self.nodes.first_fit(kind.gpu_count, share)
        if counts is None and kind.demand.exceeds(self._fair):
            share, speed = self._fair, 1.0
            counts = self.nodes.first_fit(kind.gpu_count, share)
        if counts is None:
            self._make_room(kind.gpu_count, share)
            counts = self.nodes.first_fit(kind.gpu_count, share)
        if counts is None:
            return
        lease = _Lease(row, kind, counts, share, speed)
        self.leases.append(lease)
        for node in counts:
            self._by_node[node].append(lease)

    def _make_room(self, gpu_count: int, share: Share) -> None:
        nodes = self.nodes
        for node, count in nodes.with_free_gpus(gpu_count).items():
            cpus = max(0.0, count * share.cpus - nodes.cpus[node])
            mem_gib = max(0.0, count * share.mem_gib - nodes.mem_gib[node])
            for lease in self._victims(node, cpus, mem_gib):
                self._reset(lease)

    def _victims(self, node: int, cpus: float, mem_gib: float) -> list[_Lease]:
        """Who gives up a surplus so that so much gets free: jobs of one node first, then who has most for each GPU."""
        leases = self._by_node[node]
        leases.sort(key=lambda lease: (len(lease.counts), -lease.share.cpus, -lease.share.mem_gib))
        for index, lease in enumerate(leases):
            if not (cpus or mem_gib):
                return leases[:index]
            count = lease.counts[node]
            cpus = max(0.0, cpus - max(0.0, lease.share.cpus - self._fair.cpus) * count)
            mem_gib = max(0.0, mem_gib - max(0.0, lease.share.mem_gib - self._fair.mem_gib) * count)
        return list(leases)

    def _reset(self, lease: _Lease) -> None:
        """Return to the fair share; a job that asks for no more keeps its shares."""
        if not lease.kind.demand.exceeds(self._fair) or lease.share == self._fair:
            return
        self.nodes.give_back(lease.counts, lease.share)
        lease.share, lease.speed = self._fair, 1.0
        self.nodes.take(lease.counts, lease.share)
