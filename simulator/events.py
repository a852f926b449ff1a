"""What is still to happen, in a total order: by time, then in the order in which it was announced."""

from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

_MANY: Final = 10_000
"""Outdated events that may pile up before they are swept out."""


class Kind(IntEnum):
    """What happens.

    Attributes:
        ARRIVAL: A job is submitted; the subject is its id.
        PROFILED: The dry run of a model ends; the subject is the number of its key.
        RESUME: A job has loaded its checkpoint and gets on from now on.
        COMPLETION: A job ends.
        NODE_FAILS: A node goes, and what runs on it stops; the subject is the node's index.
        NODE_RETURNS: It is back.
        DRAIN_BEGINS: A node takes nothing new.
        DRAIN_ENDS: It does again.
        OUT_OF_MEMORY: A job asks for more GPU memory than the others on its GPUs leave it; the version is its unit's
            number.
    """

    ARRIVAL = 0
    PROFILED = 1
    RESUME = 2
    COMPLETION = 3
    NODE_FAILS = 4
    NODE_RETURNS = 5
    DRAIN_BEGINS = 6
    DRAIN_ENDS = 7
    OUT_OF_MEMORY = 8


OF_RUNNING_JOBS: Final = (Kind.RESUME, Kind.COMPLETION, Kind.OUT_OF_MEMORY)
"""What is announced for a job at its present speed, and or in its present unit, and outdated once that changes."""


class Event(NamedTuple):
    """Something that happens at a time.

    Attributes:
        time_s: When.
        sequence: Order of announcement, which decides between events at one time.
        kind: What.
        subject: To whom: a job's id, a node's index or a model's number.
        version: Version of the job's speed that it was announced for; an older one than the job's is outdated.
    """

    time_s: float
    sequence: int
    kind: Kind
    subject: int
    version: int = 0


class EventQueue:
    """The events to come. Outdated ones are skipped when their turn comes, or swept out when they are many.

    Args:
        is_outdated: Tells whether an event no longer holds.
    """

    def __init__(self, is_outdated: Callable[[Event], bool]) -> None:
        self._heap: list[Event] = []
        self._is_outdated = is_outdated
        self._sequence = 0
        self._sweep_at = _MANY
        self.from_outside = 0
        """How many are left that don't come from running jobs."""

    def announce(self, time_s: float, kind: Kind, subject: int, version: int = 0) -> None:
        """Let something happen at a time."""
        heappush(self._heap, Event(time_s, self._sequence, kind, subject, version))
        self._sequence += 1
        self.from_outside += kind not in OF_RUNNING_JOBS
        if len(self._heap) > self._sweep_at:
            self._sweep()

    def next_time_s(self) -> float | None:
        """When the next event happens; None when there is none."""
        heap = self._heap
        while heap and self._is_outdated(heap[0]):
            heappop(heap)
        return heap[0].time_s if heap else None

    def pop_at(self, time_s: float) -> Event | None:
        """The next event of this instant; None when there is no more."""
        if self.next_time_s() != time_s:
            return None
        event = heappop(self._heap)
        self.from_outside -= event.kind not in OF_RUNNING_JOBS
        return event

    def _sweep(self) -> None:
        self._heap = [event for event in self._heap if not self._is_outdated(event)]
        heapify(self._heap)
        self._sweep_at = max(_MANY, 2 * len(self._heap))
