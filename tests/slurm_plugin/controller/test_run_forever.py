"""The loop of cycles outlives whatever a cycle raises."""

import logging
import threading
from typing import cast

import pytest

from muri.errors import MuriError
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.controller.loop import run_forever


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
        run_forever(cast(Controller, controller), 0.0, stop)
    assert controller.cycles == 3
    said, fault = caplog.records
    assert "slurmctld does not answer" in said.getMessage()
    assert fault.exc_info is not None  # where it happened, for a report of the fault
