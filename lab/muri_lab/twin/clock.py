"""The twin's one clock: virtual time that goes from event to event."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from muri.clock import Clock


@dataclass(order=True, slots=True)
class Event:
    """Something that will happen."""

    due_s: float  # When
    number: int  # Events of the same time happen in the order in which they were made
    act: Callable[[], None] | None = field(compare=False)  # What; None once it is called off

    def call_off(self) -> None:
        """Let it not happen."""
        self.act = None


class VirtualTime(Clock):
    """Seconds since the epoch that pass only in `sleep`; events that are due happen meanwhile."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.after_event: Callable[[], None] = lambda: None
        self._events: list[Event] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        """The time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.advance(self.now_s + max(0.0, seconds))

    def at(self, due_s: float, act: Callable[[], None]) -> Event:
        """Let something happen at a time, now if that is past."""
        event = Event(max(due_s, self.now_s), next(self._numbers), act)
        heapq.heappush(self._events, event)
        return event

    def after(self, delay_s: float, act: Callable[[], None]) -> Event:
        """Let something happen after a while."""
        return self.at(self.now_s + delay_s, act)

    def advance(self, end_s: float) -> None:
        """Let everything happen that is due until a time."""
        events = self._events
        while events and events[0].due_s <= end_s:
            event = heapq.heappop(events)
            if event.act is None:
                continue
            self.now_s = max(self.now_s, event.due_s)
            event.act()
            self.after_event()
        self.now_s = max(self.now_s, end_s)

    @property
    def next_due_s(self) -> float | None:
        """When the next event is due; None when there is none."""
        while self._events and self._events[0].act is None:
            heapq.heappop(self._events)
        return self._events[0].due_s if self._events else None
