"""When a cycle runs because of an event: soon, but bounded whatever happens. Pure: the caller tells the time."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from muri.clock import MACHINE_CLOCK, Clock

GATHER_S: Final = 1.0
"""Events of this time share a cycle: `sbatch` in a loop submits several jobs a second."""

LEAST_GAP_S: Final = 5.0
"""Least time between the end of a cycle and one on an event, in which slurmctld serves others."""

MOST_SHARE: Final = 0.2
"""Most share of the time that cycles on events take; after a long one the gap grows."""

LOOK_S: Final = 1.0
"""How often something that watches for events is asked."""


class Watch(Protocol):
    """Something that knows of events."""

    def look(self) -> bool:
        """Return whether something has happened since the last look or mark."""
        ...

    def mark(self) -> bool:
        """Note that a cycle begins; return whether something has just happened that it may not see yet."""
        ...


class Bell:
    """Says when the next cycle on an event is due.

    Events of `GATHER_S` seconds share a cycle. After a cycle there is a pause of `LEAST_GAP_S` seconds, and as much
    longer as it takes for cycles to have no more than `MOST_SHARE` of the time. So nobody, with however many jobs, can
    cause more than that.

    Args:
        watches: What knows of events.
        clock: Tells the time.
    """

    def __init__(self, watches: Sequence[Watch], clock: Clock = MACHINE_CLOCK) -> None:
        self._watches = watches
        self._clock = clock
        self._first_s = math.inf
        self._last_s = -math.inf
        self._free_s = -math.inf

    @property
    def due_s(self) -> float:
        """When the next cycle on an event is due, as the clock tells the time; infinite where nothing has happened."""
        return max(self._first_s + GATHER_S, self._free_s)

    def ring(self) -> None:
        """Take note of an event."""
        self._last_s = self._clock()
        self._first_s = min(self._first_s, self._last_s)

    def look(self) -> None:
        """Ask what has happened."""
        self._heed([watch.look() for watch in self._watches])

    def _heed(self, happened: Sequence[bool]) -> None:
        if any(happened):
            self.ring()

    @contextmanager
    def cycle(self) -> Iterator[None]:
        """Within, a cycle runs. It serves all events but the newest, whose jobs may not be in the queue yet."""
        self._heed([watch.mark() for watch in self._watches])
        begun_s = self._clock()
        is_new = self._last_s > begun_s - GATHER_S
        self._first_s = self._last_s if is_new else math.inf
        try:
            yield
        finally:
            ended_s = self._clock()
            rest_s = (ended_s - begun_s) * (1 / MOST_SHARE - 1)
            self._free_s = ended_s + max(LEAST_GAP_S, rest_s)

    def give_up(self) -> None:
        """Take note that no cycle could be run; the timer's serves all events so far."""
        self._first_s = math.inf
        self._free_s = self._clock() + LEAST_GAP_S
