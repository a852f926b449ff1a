"""The policies that Muri is compared with, as its public simulator has them: SRTF, SRSF, Tiresias and AntMan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from muri.simulator.model import Cluster
from muri_lab.muri_reference.clock import Discipline, Event
from muri_lab.muri_reference.queues import ServiceQueues
from muri_lab.muri_reference.state import FreeNodes, Ledger

_TOO_MANY = 1 << 30
_FREE = -1
_GUARANTEED_LOAD: Final = 0.1
_COMPLETE: Final = 0.01
_OPPORTUNISTIC_LOAD: Final = 0.9
_LOAD_LIMIT: Final = 0.8
"""Nominal loads by which the simulator prefers idle GPUs for opportunistic jobs, then reserved, then busy ones, and
never two opportunistic jobs on one (jobs.py, gpu_util). Their sums are rounded; the order among GPUs that were used
and freed again depends on it.
"""


class Shortest(Discipline):
    """At each event the whole queue is placed anew, the shortest first."""

    same_time_s = 0.0

    def __init__(self, ledger: Ledger, cluster: Cluster, *, by_service: bool) -> None:
        super().__init__(ledger)
        self._cluster = cluster
        self._by_service = by_service

    def plan(self) -> None:
        """Sort, and place until nothing fits."""
        ledger = self._ledger
        key = ledger.remaining_s
        if self._by_service:
            key = key * ledger.table.gpus[ledger.queue]
        ledger.queue = ledger.queue[np.argsort(key, kind="stable")]
        taken = take_in_order(ledger, FreeNodes.of(self._cluster))
        ledger.run_only([job for job, _ in taken], [node for _, node in taken])
        ledger.gpus_held = int(ledger.table.gpus[[job for job, _ in taken]].sum())


def take_in_order(ledger: Ledger, nodes: FreeNodes) -> list[tuple[int, int]]:
    """The jobs of the queue that find GPUs, with their first node; the first in the queue first."""
    taken = []
    gpus = ledger.table.gpus[ledger.queue].tolist()
    for job, wanted in zip(ledger.queue.tolist(), gpus, strict=True):
        node = nodes.take(wanted)
        if node >= 0:
            taken.append((job, node))
        elif nodes.full:
            break
    return taken


class Tiresias(Discipline):
    """2D-LAS with queues, which share out the GPUs one after the other."""

    same_time_s = 0.0

    def __init__(self, ledger: Ledger, cluster: Cluster) -> None:
        super().__init__(ledger)
        self._gpu_count = cluster.gpu_count
        self._queues = ServiceQueues(ledger)

    def arrived(self, jobs: Sequence[int]) -> None:
        """New jobs join the first queue."""
        self._queues.arrived(jobs)

    def ended(self, jobs: Sequence[int]) -> None:
        """Remove the jobs from their queues."""
        self._queues.ended(jobs)

    def plan(self) -> None:
        """Demote, give out GPUs queue by queue, and put running jobs first in their queue."""
        self._queues.demote()
        taken, free = [], self._gpu_count
        gpus = self._ledger.table.gpus.tolist()
        for job in self._queues.in_order():
            if gpus[job] <= free:
                taken.append(job)
                free -= gpus[job]
        self._ledger.run_only(taken)
        self._ledger.gpus_held = self._gpu_count - free
        self._queues.running_first()

    def first_end(self) -> Event:
        """The next completion; only those at exactly the same time are one event."""
        ledger, on = self._ledger, self._ledger.on()
        if not len(on):
            return Event(math.inf, [])
        end_s = ledger.now_s + ledger.left[on] * ledger.period_s[on]
        return Event(float(end_s.min()), on[end_s == end_s.min()].tolist())

    def next_jump_s(self) -> float:
        """When the first running job falls to the next queue."""
        return self._queues.next_jump_s()


class AntMan(Discipline):
    """Guaranteed jobs never slow down; an opportunistic job only progresses while its partners leave room."""

    def __init__(self, ledger: Ledger, cluster: Cluster) -> None:
        super().__init__(ledger)
        self._seats = Seats.of(cluster)

    def ended(self, jobs: Sequence[int]) -> None:
        """Take the jobs' GPUs back."""
        for job in jobs:
            self._seats.leave(job)

    def plan(self) -> None:
        """Start the jobs that find GPUs; then compute the speeds of opportunistic jobs beside their partners."""
        ledger, table = self._ledger, self._ledger.table
        rows = ledger.queue
        ledger.queue = rows[np.lexsort((rows, table.submit_s[rows], table.opportunistic[rows]))]
        running = ledger.on().tolist()
        open_gpus = _TOO_MANY
        for job in ledger.queue[~ledger.running[ledger.queue]].tolist():
            wanted = int(table.gpus[job])
            if not table.opportunistic[job]:
                started = self._seats.hold(job, wanted)
            elif started := wanted < open_gpus and self._seats.join(job, wanted):
                pass
            else:
                open_gpus = min(open_gpus, wanted)
            if started:
                running.append(job)
        ledger.run_only(running, [self._seats.node(job) for job in running])
        ledger.gpus_held = self._seats.gpus_held()
        for job in running:
            if table.opportunistic[job]:
                ledger.period_s[job] = self._iteration_s(job)

    def _iteration_s(self, job: int) -> float:
        """Seconds per iteration of an opportunistic job: as long as its slowest partner makes it wait."""
        table = self._ledger.table
        beside = [other for other in self._seats.beside(job) if self._ledger.running[other]]
        waits = [
            companion_iterations(table.resource_s[job].tolist(), table.resource_s[other].tolist())
            * float(table.iteration_s[other])
            for other in beside
        ]
        return max([float(table.iteration_s[job]), *waits])


def companion_iterations(own_s: Sequence[float], other_s: Sequence[float]) -> int:
    """Return a guaranteed job's iterations during which an opportunistic one beside it completes one.

    Each stage only progresses while the other job is in one of its other stages. The next stage uses the rest of these.
    """
    load_s, gpu_s, network_s = own_s
    other_load_s, other_gpu_s, other_network_s = other_s
    room_s = other_gpu_s + other_network_s
    count, over_s = divmod_of(load_s, room_s)
    if over_s > 0:
        count += 1
        gpu_s -= min(gpu_s, other_network_s, room_s - over_s)
    room_s = other_load_s + other_network_s
    more, over_s = divmod_of(gpu_s, room_s)
    count += more
    if over_s > 0:
        count += 1
        if over_s < other_load_s:
            network_s -= min(network_s, other_load_s + other_gpu_s - over_s)
    more, over_s = divmod_of(network_s, other_load_s + other_gpu_s)
    return count + more + (1 if over_s > other_load_s else 0)


def divmod_of(wanted_s: float, room_s: float) -> tuple[int, float]:
    """Quotient and remainder of wanted time by room; without room, one filling and no remainder."""
    if room_s <= 0:
        return (0, 0.0) if wanted_s <= 0 else (1, 0.0)
    return math.floor(wanted_s / room_s), wanted_s % room_s


@dataclass(slots=True)
class Seats:
    """Jobs on each GPU."""

    cluster: Cluster  # The nodes
    guaranteed: list[int]  # The guaranteed job of each GPU, or −1
    load: list[float]  # Nominal load of each GPU
    free: list[int]  # GPUs of each node that no guaranteed job has
    held: dict[int, list[int]] = field(default_factory=dict)  # GPUs that each job holds
    home: dict[int, int] = field(default_factory=dict)  # node on which a guaranteed job waits for more GPUs

    @classmethod
    def of(cls, cluster: Cluster) -> "Seats":
        """An empty cluster."""
        free = [cluster.gpus_per_node] * cluster.node_count
        return cls(cluster, [_FREE] * cluster.gpu_count, [0.0] * cluster.gpu_count, free)

    def hold(self, job: int, gpus: int) -> bool:
        """Give a guaranteed job GPUs beside those it has; return whether it now has all of them."""
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
        """GPUs that jobs hold, including jobs that still wait for the rest of theirs."""
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
