"""The controller as a process: one at a time, a cycle again and again until it is told to stop."""

import fcntl
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.slurm_plugin.controller.status import STATUS_NAME, age_s
from muri.slurm_plugin.execute.interruptible import StopFlag
from muri.slurm_plugin.private_files import make_private_directory, open_private_file

if TYPE_CHECKING:
    from muri.slurm_plugin.controller.cycle import Controller

log = logging.getLogger("muri.controller")


_LOOK_AGAIN_S: Final = 5.0

LOCK_NAME: Final = "controller.lock"
"""In the state directory; its modification time tells how long it has been held."""


class AnotherControllerError(MuriError):
    """Another controller is running, so this one has nothing to do; that is not a failure."""

    exit_code = 0


class ControllerHangsError(MuriError):
    """Another controller has held the lock for long and finishes no cycle; somebody has to look at it."""


def hung_for_s(state_dir: Path, now_s: float) -> float | None:
    """Return for how long the controller that holds the lock has finished no cycle; None when there is no lock.

    Args:
        state_dir: Where the lock and the status file are.
        now_s: The time, in seconds since the epoch.
    """
    held_s = age_s(state_dir / LOCK_NAME, now_s)
    finished_s = age_s(state_dir / STATUS_NAME, now_s)
    return held_s if held_s is None or finished_s is None else min(held_s, finished_s)


@contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the controller's lock.

    Raises:
        AnotherControllerError: Another controller holds it.
        UnsafeFileError: The state directory, or the lock in it, is not this user's alone.
    """
    make_private_directory(state_dir)
    handle = open_private_file(state_dir / LOCK_NAME)
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


def run_once(
    controller: "Controller", watch_s: float, stop: Waitable, clock: Clock = MACHINE_CLOCK, until_s: float = math.inf
) -> None:
    """Run a cycle, and stay until the members of new groups have started, at most `watch_s` seconds and till `until_s`.

    Raises:
        MuriError: The cycle failed.
    """
    controller.cycle()
    end_s = min(clock() + watch_s, until_s)
    while clock() < end_s and not stop.is_set() and controller.close_gates():
        stop.wait(min(_LOOK_AGAIN_S, max(0.0, end_s - clock())))


def run_forever(
    controller: "Controller", interval_s: float, watch_s: float, stop: Waitable, clock: Clock = MACHINE_CLOCK
) -> None:
    """Run a cycle every `interval_s` seconds until told to stop.

    A failed cycle is logged, and jobs stay as they are until the next one.
    """
    while not stop.is_set():
        begun_s = clock()
        try:
            run_once(controller, watch_s, stop, clock, begun_s + interval_s)
        except MuriError as error:
            log.error("cycle skipped: %s", error)  # noqa: TRY400 (the error explains itself)
        except Exception:  # a fault of Muri's own; the watchdog goes by finished cycles, not by this process
            log.exception("cycle skipped")
        stop.wait(max(0.0, interval_s - (clock() - begun_s)))
