"""The controller as a process: one at a time, a cycle again and again until it is told to stop."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.execute.interruptible import StopFlag

log = logging.getLogger("muri.controller")


LOCK_NAME: Final = "controller.lock"
"""In the state directory; its modification time tells how long it has been held."""


class AnotherControllerError(MuriError):
    """Another controller is running, so this one has nothing to do; that is not a failure."""

    exit_code = 0


@contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the controller's lock.

    Raises:
        AnotherControllerError: Another controller holds it.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise AnotherControllerError(
                f"another controller (process {holder}) is at work on {state_dir}; nothing to do"
            ) from error
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


class Waitable(StopFlag, Protocol):
    """The part of threading.Event that the loop needs."""

    def wait(self, timeout: float) -> bool:
        """Sleep until told to stop, at most `timeout` seconds."""
        ...


def run_forever(controller: Controller, interval_s: float, stop: Waitable, clock: Clock = MACHINE_CLOCK) -> None:
    """Run a cycle every `interval_s` seconds until told to stop.

    A failed cycle is logged, and jobs stay as they are until the next one.
    """
    while not stop.is_set():
        begun_s = clock()
        try:
            controller.cycle()
        except MuriError as error:
            log.error("cycle skipped: %s", error)  # noqa: TRY400 (the error explains itself)
        except Exception:  # a fault of Muri's own; the watchdog goes by finished cycles, not by this process
            log.exception("cycle skipped")
        stop.wait(max(0.0, interval_s - (clock() - begun_s)))
