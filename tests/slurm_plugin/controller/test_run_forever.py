"""The loop of cycles keeps its interval, and outlives whatever a cycle raises."""

import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
from stand_in_controller import Happenings, Work
from virtual_clock import VirtualClock

from muri.errors import MuriError
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.controller.events import Bell
from muri.slurm_plugin.controller.loop import (
    EVENTS_LOCK_NAME,
    AnotherControllerError,
    end_watcher,
    holder_of,
    run_for_timer,
    run_forever,
    run_on_events,
    run_once,
)


class Faulty:
    """Fails in a different way in each cycle, and ends the loop in the third."""

    def __init__(self, stop: threading.Event) -> None:
        self.cycles = 0
        self._stop = stop

    def cycle(self) -> None:
        self.cycles += 1
        if self.cycles == 1:
            raise MuriError("slurmctld does not answer")
        if self.cycles == 2:
            raise KeyError("a fault of Muri's own")
        self._stop.set()


def test_the_loop_goes_on_after_a_cycle_that_failed_for_whatever_reason(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    controller = Faulty(stop)
    with caplog.at_level(logging.ERROR, "muri.controller"):
        run_forever(cast(Controller, controller), 0.0, 0.0, stop)
    assert controller.cycles == 3
    said, fault = caplog.records
    assert "slurmctld does not answer" in said.getMessage()
    assert fault.exc_info is not None  # where it happened, for a report of the fault


def test_cycles_begin_at_their_interval_and_at_once_after_one_that_took_longer() -> None:
    clock = VirtualClock()
    work = Work(clock, 1.0, 20.0, 75.0, 1.0)
    run_forever(work.controller, 30.0, 0.0, Happenings(clock, [], 136.0), clock)
    assert work.begun_s == [0.0, 30.0, 60.0, 135.0]


@pytest.mark.parametrize(
    ("start_s", "watch_s", "looks_s"),
    [(0.0, 60.0, [1.0]), (8.0, 60.0, [1.0, 6.0, 11.0]), (99.0, 12.0, [1.0, 6.0, 11.0]), (99.0, 0.0, [])],
)
def test_after_a_cycle_the_controller_stays_until_the_new_members_have_started(
    start_s: float, watch_s: float, looks_s: list[float]
) -> None:
    clock = VirtualClock()
    work = Work(clock, 1.0, start_s=start_s)
    run_once(work.controller, watch_s, Happenings(clock, []), clock)
    assert work.looks_s == looks_s


def test_looks_at_a_long_queue_take_a_tenth_of_the_time() -> None:
    clock = VirtualClock()
    work = Work(clock, 0.5, start_s=99.0, look_s=2.0)
    run_once(work.controller, 60.0, Happenings(clock, []), clock)
    assert work.looks_s == [0.5, 20.5, 40.5]


def test_staying_for_new_members_does_not_put_off_the_next_cycle() -> None:
    clock = VirtualClock()
    work = Work(clock, 1.0, start_s=99.0)
    run_forever(work.controller, 7.0, 60.0, Happenings(clock, [], 15.0), clock)
    assert work.begun_s == [0.0, 7.0, 14.0]


def cycles_with(at_s: list[float], *, start_s: float = 0.0, someone_waits: bool = False) -> list[float]:
    """When cycles of half a second begin, each 360 s and on events."""
    clock = VirtualClock()
    events = Happenings(clock, at_s, 720.0)
    work = Work(clock, 0.5, start_s=start_s, someone_waits=someone_waits)
    run_forever(work.controller, 360.0, 60.0, events, clock, Bell((events,), clock))
    return work.begun_s


def test_an_event_is_served_between_two_cycles_of_the_interval_which_stays() -> None:
    assert cycles_with([]) == [0.0, 360.0]
    assert cycles_with([99.5]) == [0.0, 100.5, 460.5]


def test_members_that_have_yet_to_start_delay_no_cycle_on_an_event() -> None:
    assert cycles_with([20.0], start_s=100.0)[:2] == [0.0, 21.5]


def test_members_that_do_not_start_are_looked_at_again_before_the_timer() -> None:
    assert cycles_with([], start_s=100.0)[1] < 70.0


def test_once_members_have_started_a_cycle_lets_waiting_jobs_join_them() -> None:
    _, second, *_ = cycles_with([], start_s=10.0, someone_waits=True)
    assert 10.0 < second < 13.0
    assert cycles_with([], start_s=10.0) == [0.0, 360.0]


def test_what_was_left_is_done_as_soon_as_events_are_served() -> None:
    clock = VirtualClock()
    work = Work(clock, 0.5, cycles=3)
    run_for_timer(work.controller, 60.0, Happenings(clock, []), Bell((), clock), clock)
    assert work.begun_s == [0.0, 5.5, 11.0]
    assert clock() < 12.0  # nothing is left to wait for


class Locked:
    """Another controller is at work until a time; then cycles fail, or run."""

    def __init__(self, clock: VirtualClock, until_s: float, bell: Bell, fails: bool = False) -> None:
        self.tries_s: list[float] = []
        self._clock, self._until_s, self._bell, self._fails = clock, until_s, bell, fails

    def cycle(self) -> None:
        self.tries_s.append(self._clock())
        if self._clock() < self._until_s:
            raise AnotherControllerError("at work")
        if self._fails:
            raise MuriError("the configuration is broken")
        with self._bell.cycle():
            self._clock.sleep(0.5)


@pytest.mark.parametrize("fails", [False, True])
def test_while_another_controller_is_at_work_an_event_is_kept_and_a_failure_is_left_to_the_timer(fails: bool) -> None:
    clock = VirtualClock()
    events = Happenings(clock, [60.0], 100.0)
    bell = Bell((events,), clock)
    locked = Locked(clock, 4.0, bell, fails)
    run_on_events(locked.cycle, events, bell, clock)
    first, *more = [at_s for at_s in locked.tries_s if at_s >= 4.0]
    assert locked.tries_s[:4] == [1.0, 2.0, 3.0, 4.0]
    assert first == 4.0
    assert [round(at_s) for at_s in more] == [62 if not fails else 61]


def test_a_timers_cycle_serves_events_while_it_stays_and_then_leaves_them_to_others() -> None:
    clock = VirtualClock()
    events = Happenings(clock, [10.0, 20.0, 90.0], 1000.0)
    work = Work(clock, 0.5, start_s=500.0)
    run_for_timer(work.controller, 60.0, events, Bell((events,), clock), clock)
    assert work.begun_s == [0.0, 11.5, 21.0]
    assert clock() == 21.5 + 60.0


def test_the_process_that_watches_is_known_by_its_lock_and_ends_when_told(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from muri.slurm_plugin.controller.loop import *\n"
        "with only_one(Path(sys.argv[1]), EVENTS_LOCK_NAME):\n    print('held', flush=True); time.sleep(600)"
    )
    assert end_watcher(tmp_path)
    assert holder_of(tmp_path, EVENTS_LOCK_NAME) is None
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert holder_of(tmp_path, EVENTS_LOCK_NAME) == process.pid
        assert end_watcher(tmp_path)
        assert process.wait() == -signal.SIGTERM
    assert holder_of(tmp_path, EVENTS_LOCK_NAME) is None
