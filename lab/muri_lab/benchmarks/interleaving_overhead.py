"""Time to pass a resource on: from its release in one thread or process until the next holder runs."""

import itertools
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from muri.launcher.arbitration.arbiter import Arbiter, give_way
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.job.stage_clock import Gate, IterationRecord, StageClock
from muri.launcher.runtime.main import SWITCH_INTERVAL_S
from muri.launcher.sessions.setup import take_short_turns
from muri_lab.benchmarks.switch_cost import measure_switches_s, runtime_arbiter

HOLD_S = 0.0005
STAGE = 2


class _Gate(Gate):
    """A member's part of the arbiter."""

    @property
    def asks(self) -> bool:
        return True

    def __init__(self, arbiter: Arbiter, member: str) -> None:
        self._arbiter, self._member = arbiter, member

    def acquire(self, stage: int) -> float:
        return self._arbiter.acquire(self._member, stage)

    def release(self, stage: int) -> None:
        if self._arbiter.release(self._member, stage):
            give_way()

    def yield_point(self, stage: int) -> float:
        return self._arbiter.yield_point(self._member, stage)

    def iteration_done(self, record: IterationRecord) -> None:
        self._arbiter.iteration_done(self._member, record)


def _hold() -> None:
    end_s = time.perf_counter() + HOLD_S
    while time.perf_counter() < end_s:  # Python at work, so that the interpreter's lock is wanted as well
        pass


def hand_overs_s(count: int) -> list[float]:
    """Two members' threads that always want the same resource, through real stage clocks; seconds per hand-over."""
    arbiter = runtime_arbiter()
    taken: dict[str, list[tuple[float, bool]]] = {"1": [], "2": []}
    given: dict[str, list[float]] = {"1": [], "2": []}

    def work(member: str) -> None:
        clock = StageClock(_Gate(arbiter, member))
        for _ in range(count):
            before_s = clock.wait_s[STAGE]
            clock.enter(STAGE)
            taken[member].append((time.perf_counter(), clock.wait_s[STAGE] > before_s))
            _hold()
            given[member].append(time.perf_counter())
            clock.leave()

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        threads = [threading.Thread(target=work, args=(member,)) for member in taken]
        for member in taken:
            arbiter.join(member, HOLD_S)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before_s)
    events = sorted((at_s, given[m][i], waited) for m in taken for i, (at_s, waited) in enumerate(taken[m]))
    # A thread that did not wait came after the release: nothing was handed over to it.
    return [late[0] - early[1] for early, late in itertools.pairwise(events) if late[2]]


def uncontended_s(count: int) -> list[float]:
    """Seconds to enter and leave a stage that no other member wants."""
    arbiter = FairArbiter()
    arbiter.join("1", 1.0)
    clock = StageClock(_Gate(arbiter, "1"))
    spans = []
    for _ in range(count):
        begin_s = time.perf_counter()
        clock.enter(STAGE)
        clock.leave()
        spans.append(time.perf_counter() - begin_s)
    return spans


def yield_points_s(count: int) -> list[float]:
    """Seconds of a yield point while no member waits."""
    arbiter = FairArbiter()
    arbiter.join("1", 1.0)
    clock = StageClock(_Gate(arbiter, "1"))
    clock.enter(STAGE)
    spans = []
    for _ in range(count):
        begin_s = time.perf_counter()
        clock.yield_point()
        spans.append(time.perf_counter() - begin_s)
    clock.leave()
    return spans


def measure(count: int = 3000) -> dict[str, dict[str, float]]:
    """All of them, in microseconds; the CPU's slices are as short as the runtime asks for."""
    take_short_turns()
    return {
        "stage without competition": _quantiles(uncontended_s(count)),
        "yield point without a waiting member": _quantiles(yield_points_s(count)),
        "hand-over in one process": _quantiles(hand_overs_s(count)),
        "hand-over between processes": _quantiles(measure_switches_s(count)),
    }


def _quantiles(spans_s: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(np.array(spans_s) * 1e6, [0.5, 0.99])
    return {"count": len(spans_s), "p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}
