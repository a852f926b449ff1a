"""The loop of cycles keeps its interval, and outlives whatever a cycle raises."""

import logging
import threading
from typing import cast

import pytest
from virtual_clock import VirtualClock

from muri.errors import MuriError
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.controller.loop import run_forever, run_once


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


class Timed:
    """Notes when each cycle begins; is the flag that ends the loop, too."""

    def __init__(self, clock: VirtualClock, lasting_s: list[float]) -> None:
        self.begun_s: list[float] = []
        self._clock, self._lasting_s = clock, lasting_s

    def cycle(self) -> None:
        self.begun_s.append(self._clock())
        self._clock.sleep(self._lasting_s.pop(0))

    def is_set(self) -> bool:
        return not self._lasting_s

    def wait(self, timeout: float) -> bool:
        self._clock.sleep(timeout)
        return self.is_set()


def test_cycles_begin_at_their_interval_and_at_once_after_one_that_took_longer() -> None:
    clock = VirtualClock()
    controller = Timed(clock, [1.0, 20.0, 75.0, 1.0])
    run_forever(cast(Controller, controller), 30.0, 0.0, controller, clock)
    assert controller.begun_s == [0.0, 30.0, 60.0, 135.0]


class Starting(Timed):
    """Its members start within some seconds."""

    def __init__(self, clock: VirtualClock, start_s: float, cycles: int = 1) -> None:
        super().__init__(clock, [1.0] * cycles)
        self.looks_s: list[float] = []
        self._start_s = start_s

    def is_set(self) -> bool:
        return False

    def close_gates(self) -> bool:
        self.looks_s.append(self._clock())
        return self._clock() < self._start_s


@pytest.mark.parametrize(
    ("start_s", "watch_s", "looks_s"),
    [(0.0, 60.0, [1.0]), (8.0, 60.0, [1.0, 6.0, 11.0]), (99.0, 12.0, [1.0, 6.0, 11.0]), (99.0, 0.0, [])],
)
def test_after_a_cycle_the_controller_stays_until_the_new_members_have_started(
    start_s: float, watch_s: float, looks_s: list[float]
) -> None:
    clock = VirtualClock()
    controller = Starting(clock, start_s)
    run_once(cast(Controller, controller), watch_s, controller, clock)
    assert controller.looks_s == looks_s


class StartingOften(Starting):
    """Ends the loop with its last cycle."""

    def is_set(self) -> bool:
        return not self._lasting_s


def test_staying_for_new_members_does_not_put_off_the_next_cycle() -> None:
    clock = VirtualClock()
    controller = StartingOften(clock, 99.0, cycles=3)
    run_forever(cast(Controller, controller), 7.0, 60.0, controller, clock)
    assert controller.begun_s == [0.0, 7.0, 14.0]
