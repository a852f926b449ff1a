"""AntMan: guaranteed jobs first come, first served; opportunistic ones beside them; nobody is ever stopped."""

import math
from collections.abc import Sequence

import numpy as np

from muri.simulator.model import Cluster
from muri.simulator.reference.antman_nodes import Seats
from muri.simulator.reference.constants import SAME_TIME_S
from muri.simulator.reference.events import Event, first_completion
from muri.simulator.reference.ledger import Ledger

_TOO_MANY = 1 << 30


class AntMan:
    """Guaranteed jobs never slow down; an opportunistic one only gets on while its companion leaves room.

    Args:
        ledger: The jobs.
        cluster: The nodes.
    """

    same_time_s = SAME_TIME_S

    def __init__(self, ledger: Ledger, cluster: Cluster) -> None:
        self._ledger = ledger
        self._seats = Seats.of(cluster)

    def arrived(self, jobs: Sequence[int]) -> None:
        """Nothing to note."""

    def ended(self, jobs: Sequence[int]) -> None:
        """They give back their GPUs."""
        for job in jobs:
            self._seats.leave(job)

    def plan(self) -> None:
        """Start whoever finds GPUs; then the speed of opportunistic jobs follows from their company."""
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

    def first_end(self) -> Event:
        """The next completion."""
        return first_completion(self._ledger)

    def next_jump_s(self) -> float:
        """Only arrivals and completions count."""
        return math.inf

    def _iteration_s(self, job: int) -> float:
        """Seconds per iteration of an opportunistic job: as long as its slowest companion keeps it waiting."""
        table = self._ledger.table
        beside = [other for other in self._seats.beside(job) if self._ledger.running[other]]
        waits = [
            companion_iterations(table.resource_s[job].tolist(), table.resource_s[other].tolist())
            * float(table.iteration_s[other])
            for other in beside
        ]
        return max([float(table.iteration_s[job]), *waits])


def companion_iterations(own_s: Sequence[float], other_s: Sequence[float]) -> int:
    """Iterations of a guaranteed job during which an opportunistic one beside it completes one.

    Each stage only gets on while the companion is in one of its other stages. What the last of these leaves over is
    used by the next stage.

    Args:
        own_s: Seconds per iteration on load, GPU and network of the opportunistic job.
        other_s: The same of its companion.
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
    """How often a room of so many seconds is filled, and what is left over; no room is never filled."""
    if room_s <= 0:
        return (0, 0.0) if wanted_s <= 0 else (1, 0.0)
    return math.floor(wanted_s / room_s), wanted_s % room_s
