"""Who gets which CPUs and memory in a round: Synergy's mechanisms, with the public simulator's order of steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from muri.policies.speed.model import Floats
from muri.simulator.model import Cluster
from muri.simulator.synergy_reference.jobs import JobTable, Kind, Rows, Share
from muri.simulator.synergy_reference.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Round:
    """Who runs for one round, in the order in which GPUs were given out.

    Attributes:
        rows: The jobs.
        speeds: How fast each is, relative to its fair share.
        first_nodes: The first node of each.
        nodes: What is left; None where nobody had to look.
    """

    rows: Rows
    speeds: Floats
    first_nodes: Rows
    nodes: Nodes | None = None


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
    """Every job has its demand, or its fair share where that doesn't fit; others give up what they have beyond it."""
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
    """What a job gets: GPUs by node, CPUs and memory of each, and the speed that follows."""

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

        With the fair shares of the models known here there is always room in the end; where there were none, the
        public code would stop, and here the job waits.
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
        """Back to the fair share; a job that asks for no more than that keeps what it has."""
        if not lease.kind.demand.exceeds(self._fair) or lease.share == self._fair:
            return
        self.nodes.give_back(lease.counts, lease.share)
        lease.share, lease.speed = self._fair, 1.0
        self.nodes.take(lease.counts, lease.share)
