"""When something happens: arrivals and completions, those at nearly the same time as one."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from muri.simulator.reference.constants import SAME_TIME
from muri.simulator.reference.jobs import JobTable
from muri.simulator.reference.ledger import Ledger

_NEAR: Final = 1 + 100 * SAME_TIME
"""Completions further than this from the first one are never counted with it."""


@dataclass(slots=True)
class Event:
    """Something that happens.

    Attributes:
        time_s: When; infinite for never.
        jobs: Whom it happens to.
    """

    time_s: float
    jobs: list[int]


class Discipline(Protocol):
    """Who runs from now on, and how fast: the part of a policy that the clock asks."""

    same_time_s: float
    """An arrival and a completion nearer than this are one event."""

    def arrived(self, jobs: Sequence[int]) -> None:
        """Some jobs are new in the queue."""

    def ended(self, jobs: Sequence[int]) -> None:
        """Some jobs have ended."""

    def plan(self) -> None:
        """Decide who runs; called after every event."""

    def first_end(self) -> Event:
        """The next completion if nothing else happens before."""
        ...

    def next_jump_s(self) -> float:
        """When else a plan is due; infinite for never."""
        ...


def arrivals(table: JobTable) -> list[Event]:
    """All arrivals; a job joins the first one at nearly its time."""
    events: list[Event] = []
    for row, time_s in enumerate(table.submit_s.tolist()):
        near = next((event for event in _recent(events, time_s) if _same(event.time_s, time_s)), None)
        if near is None:
            events.append(Event(time_s, [row]))
        else:
            near.jobs.append(row)
    return events


def _recent(events: Sequence[Event], time_s: float) -> Iterator[Event]:
    """The events that may be at the same time, the earliest first."""
    start = len(events)
    while start and events[start - 1].time_s * _NEAR >= time_s:
        start -= 1
    return iter(events[start:])


def first_completion(ledger: Ledger) -> Event:
    """The first of the completions; jobs join the first one (in the order of the queue) at nearly their time."""
    on = ledger.on()
    if not len(on):
        return Event(math.inf, [])
    end_s = ledger.now_s + ledger.left[on] * ledger.period_s[on]
    near = end_s <= end_s.min() * _NEAR
    return first_of(zip(on[near].tolist(), end_s[near].tolist(), strict=True), _same)


def first_of(ends: Iterable[tuple[int, float]], same: Callable[[float, float], bool]) -> Event:
    """Join ends at nearly the same time, and return the first of the events so made."""
    events: list[Event] = []
    for job, time_s in ends:
        event = next((event for event in events if same(event.time_s, time_s)), None)
        if event is None:
            events.append(Event(time_s, [job]))
        else:
            event.jobs.append(job)
    return min(events, key=lambda event: event.time_s, default=Event(math.inf, []))


def _same(one_s: float, other_s: float) -> bool:
    return math.isclose(one_s, other_s, rel_tol=SAME_TIME)


def together(arrival_s: float, end_s: float, same_time_s: float) -> bool:
    """Whether an arrival and a completion are one event, which then is at the arrival's time."""
    if same_time_s == 0:
        return arrival_s == end_s and math.isfinite(end_s)
    return math.isfinite(end_s) and math.isclose(end_s, arrival_s, rel_tol=SAME_TIME, abs_tol=same_time_s)
