"""The clock: every arrival and completion is an event, and after every event there is a new plan."""

import math
from collections.abc import Callable
from time import perf_counter

from muri.simulator.model import SimulationError
from muri.simulator.reference.events import Discipline, Event, arrivals, together
from muri.simulator.reference.ledger import Ledger

Observer = Callable[[float], None]
"""Called before each event but the first with its time, while nothing has changed yet."""


def run_clock(ledger: Ledger, discipline: Discipline, observe: Observer) -> list[float]:
    """Run until all jobs have ended.

    Args:
        ledger: Of jobs none of which has arrived.
        discipline: Decides who runs.
        observe: Looks at the state between events.

    Returns:
        Wall-clock seconds of each plan.

    Raises:
        SimulationError: A job can never run.
    """
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
    """Time, who ends and who arrives; takes what happens from `coming`."""
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
