"""Tiresias: discretised 2D-LAS with three queues; counts free GPUs only, whatever node they are on."""

import math
from collections.abc import Sequence

import numpy as np

from muri.policies.speed.model import Indices
from muri.simulator.model import Cluster
from muri.simulator.reference.constants import TIRESIAS_LIMITS_GPU_S
from muri.simulator.reference.events import Event
from muri.simulator.reference.ledger import Ledger


class Tiresias:
    """First come, first served within a queue; a running job goes ahead of a waiting one of its queue.

    Args:
        ledger: The jobs.
        cluster: The nodes.
    """

    same_time_s = 0.0

    def __init__(self, ledger: Ledger, cluster: Cluster) -> None:
        self._ledger = ledger
        self._gpu_count = cluster.gpu_count
        self._level = np.zeros(len(ledger.table), dtype=np.intp)
        self._queues: list[list[int]] = [[] for _ in range(len(TIRESIAS_LIMITS_GPU_S) + 1)]

    def arrived(self, jobs: Sequence[int]) -> None:
        """New jobs join the first queue."""
        self._queues[0] += jobs

    def ended(self, jobs: Sequence[int]) -> None:
        """They leave their queue."""
        for job in jobs:
            self._queues[self._level[job]].remove(job)

    def plan(self) -> None:
        """Demote, give out GPUs queue by queue, and let those who run go ahead in their queue."""
        self._demote()
        taken, free = [], self._gpu_count
        gpus = self._ledger.table.gpus.tolist()
        for queue in self._queues:
            for job in queue:
                if gpus[job] <= free:
                    taken.append(job)
                    free -= gpus[job]
        self._ledger.run_only(taken)
        self._ledger.gpus_held = self._gpu_count - free
        running = self._ledger.running
        for queue in self._queues:
            queue.sort(key=lambda job: not running[job])

    def first_end(self) -> Event:
        """The next completion; only those at exactly the same time are one event."""
        ledger, on = self._ledger, self._ledger.on()
        if not len(on):
            return Event(math.inf, [])
        end_s = ledger.now_s + ledger.left[on] * ledger.period_s[on]
        return Event(float(end_s.min()), on[end_s == end_s.min()].tolist())

    def next_jump_s(self) -> float:
        """When the first running job reaches the limit of its queue, in whole seconds of service."""
        on = self._below_last()
        if not len(on):
            return math.inf
        return float((self._limit_s(on) - self._ledger.received_s[on] + self._ledger.now_s).min())

    def _below_last(self) -> Indices:
        on = self._ledger.on()
        return np.asarray(on[self._level[on] < len(TIRESIAS_LIMITS_GPU_S)])

    def _limit_s(self, on: Indices) -> Indices:
        limits = np.array(TIRESIAS_LIMITS_GPU_S)[self._level[on]]
        return np.ceil(limits / self._ledger.table.gpus[on]).astype(np.intp)

    def _demote(self) -> None:
        on = self._below_last()
        served = self._ledger.received_s[on] * self._ledger.table.gpus[on]
        for job in on[served >= np.array(TIRESIAS_LIMITS_GPU_S)[self._level[on]]].tolist():
            self._queues[self._level[job]].remove(job)
            self._level[job] += 1
            self._queues[self._level[job]].append(job)
