"""Tiresias's queues by attained service: jobs fall to the next one at a limit, and are served in order within each."""

import math
from collections.abc import Sequence

import numpy as np

from muri.policies.speed import Indices
from muri_lab.muri_reference.state import TIRESIAS_LIMITS_GPU_S, Ledger


class ServiceQueues:
    """First come, first served within a queue; a running job goes ahead of a waiting one of its queue."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._level = np.zeros(len(ledger.table), dtype=np.intp)
        self._queues: list[list[int]] = [[] for _ in range(len(TIRESIAS_LIMITS_GPU_S) + 1)]

    def arrived(self, jobs: Sequence[int]) -> None:
        """New jobs join the first queue."""
        self._queues[0] += jobs

    def ended(self, jobs: Sequence[int]) -> None:
        """Remove the jobs from their queues."""
        for job in jobs:
            self._queues[self._level[job]].remove(job)

    def in_order(self) -> list[int]:
        """All jobs, the first queue first."""
        return [job for queue in self._queues for job in queue]

    def demote(self) -> None:
        """Move running jobs that have reached the limit of their queue to the end of the next one."""
        on = self._below_last()
        served = self._ledger.received_s[on] * self._ledger.table.gpus[on]
        for job in on[served >= np.array(TIRESIAS_LIMITS_GPU_S)[self._level[on]]].tolist():
            self._queues[self._level[job]].remove(job)
            self._level[job] += 1
            self._queues[self._level[job]].append(job)

    def running_first(self) -> None:
        """Put running jobs first in their queue."""
        running = self._ledger.running
        for queue in self._queues:
            queue.sort(key=lambda job: not running[job])

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
