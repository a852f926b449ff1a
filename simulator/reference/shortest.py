"""SRTF and SRSF: the shortest remaining time, or service, first; exclusive, preemptive."""

import math
from collections.abc import Sequence

import numpy as np

from muri.simulator.model import Cluster
from muri.simulator.reference.events import Event, first_completion
from muri.simulator.reference.ledger import Ledger
from muri.simulator.reference.nodes import FreeNodes


class Shortest:
    """At each event the whole queue is placed anew, the shortest first.

    Args:
        ledger: The jobs.
        cluster: The nodes.
        by_service: Whether remaining time counts times GPUs (SRSF).
    """

    same_time_s = 0.0

    def __init__(self, ledger: Ledger, cluster: Cluster, *, by_service: bool) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._by_service = by_service

    def arrived(self, jobs: Sequence[int]) -> None:
        """Nothing to note."""

    def ended(self, jobs: Sequence[int]) -> None:
        """Nothing to note."""

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

    def first_end(self) -> Event:
        """The next completion."""
        return first_completion(self._ledger)

    def next_jump_s(self) -> float:
        """Only arrivals and completions count."""
        return math.inf


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
