"""When a cycle runs because of an event: soon, but bounded whatever happens. Pure: the caller tells the time."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from muri.clock import MACHINE_CLOCK, Clock
from muri.slurm_plugin.config import Events

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

    Events of `gather_s` seconds share a cycle. After a cycle there is a pause of `least_gap_s` seconds, and as much
    longer as it takes for cycles to have no more than `most_share` of the time. So nobody, with however many jobs, can
    cause more than that.

    Args:
        settings: The bounds.
        watches: What knows of events.
        clock: Tells the time.
    """

    def __init__(self, settings: Events, watches: Sequence[Watch], clock: Clock = MACHINE_CLOCK) -> None:
        self._settings = settings
        self._watches = watches
        self._clock = clock
        self._first_s = math.inf
        self._last_s = -math.inf
        self._free_s = -math.inf

    @property
    def due_s(self) -> float:
        """When the next cycle on an event is due, as the clock tells the time; infinite where nothing has happened."""
        return max(self._first_s + self._settings.gather_s, self._free_s)

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
        is_new = self._last_s > begun_s - self._settings.gather_s
        self._first_s = self._last_s if is_new else math.inf
        try:
            yield
        finally:
            ended_s = self._clock()
            rest_s = (ended_s - begun_s) * (1 / self._settings.most_share - 1)
            self._free_s = ended_s + max(self._settings.least_gap_s, rest_s)

    def give_up(self) -> None:
        """Take note that no cycle could be run; the timer's serves all events so far."""
        self._first_s = math.inf
        self._free_s = self._clock() + self._settings.least_gap_s
