"""The clock: arrivals and completions are events, those at nearly the same time are one, and a plan follows each."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from muri.simulator.model import SimulationError
from muri_lab.muri_reference.state import SAME_TIME, SAME_TIME_S, JobTable, Ledger

_NEAR: Final = 1 + 100 * SAME_TIME  # Completions further than this from the first one are never counted with it


@dataclass(slots=True)
class Event:
    """Arrival or completion of jobs."""

    time_s: float  # Time; infinite: never
    jobs: list[int]  # Rows of the jobs


class Discipline:
    """The part of a policy that the clock drives: which jobs run from now on, and how fast."""

    same_time_s = SAME_TIME_S  # An arrival and a completion nearer than this are one event

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def arrived(self, jobs: Sequence[int]) -> None:
        """Note that jobs are new in the queue."""

    def ended(self, jobs: Sequence[int]) -> None:
        """Note that jobs have ended."""

    def plan(self) -> None:
        """Decide which jobs run; called after every event."""
        raise NotImplementedError

    def first_end(self) -> Event:
        """The next completion if nothing else happens before."""
        return first_completion(self._ledger)

    def next_jump_s(self) -> float:
        """When a plan is due beside arrivals and completions; infinite: never."""
        return math.inf


Observer = Callable[[float], None]
"""Called before each event but the first with its time, while nothing has changed yet."""


def run_clock(ledger: Ledger, discipline: Discipline, observe: Observer) -> list[float]:
    """Run until all jobs have ended; return the wall-clock seconds of each plan."""
    coming = arrivals(ledger.table)[::-1]
    end = Event(math.inf, [])
    jump_s = math.inf
    decision_s: list[float] = []
    while coming or len(ledger.queue):
        now_s, ended, arrived = _next_event(coming, end, jump_s, discipline.same_time_s)
        if math.isinf(now_s):
            raise _stuck(ledger)
        if decision_s:
            observe(now_s)
        if ended:
            discipline.ended(ended)
            ledger.leave(ended, now_s)
        if arrived:
            ledger.arrive(arrived)
            discipline.arrived(arrived)
        ledger.advance(now_s)
        before = perf_counter()
        discipline.plan()
        decision_s.append(perf_counter() - before)
        end, jump_s = discipline.first_end(), discipline.next_jump_s()
    return decision_s


def _next_event(
    coming: list[Event], end: Event, jump_s: float, same_time_s: float
) -> tuple[float, list[int], list[int]]:
    """Time of the next event, jobs that end and jobs that arrive; removes the arrivals from `coming`."""
    arrival_s = coming[-1].time_s if coming else math.inf
    both = together(arrival_s, end.time_s, same_time_s)
    time_s = arrival_s if both or arrival_s < end.time_s else end.time_s
    if time_s > jump_s:
        return jump_s, [], []
    ended = end.jobs if both or end.time_s < arrival_s else []
    arrived = coming.pop().jobs if both or arrival_s < end.time_s else []
    return time_s, ended, arrived


def _stuck(ledger: Ledger) -> SimulationError:
    job = ledger.table.jobs[int(ledger.queue[0])]
    return SimulationError(f"job {job.job_id} ({job.gpu_count} GPUs) can never start; is the cluster large enough?")


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
