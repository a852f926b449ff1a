"""The controller as a process: one at a time, cycle after cycle until it is told to stop."""

import fcntl
import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import Surroundings, open_controller, read_trusted_config
from muri.slurm_plugin.controller.events import LEAST_GAP_S, LOOK_S, Bell, open_bell
from muri.slurm_plugin.controller.status import CYCLES_MISSED, STATUS_NAME, age_s
from muri.slurm_plugin.execute.apply import StopFlag
from muri.slurm_plugin.private_files import make_private_directory, open_private_file

if TYPE_CHECKING:
    from muri.slurm_plugin.controller.cycle import Controller

log = logging.getLogger("muri.controller")


_LOOK_AGAIN_S: Final = 5.0

_LEAST_REST: Final = 9.0
"""Looks take a tenth of the time at most: each reads the whole queue."""

_LONGEST_END_S: Final = 60.0
"""A controller that is told to stop ends between two calls to Slurm."""

LOCK_NAME: Final = "controller.lock"
"""In the state directory; its modification time tells how long it has been held."""

EVENTS_LOCK_NAME: Final = "events.lock"
"""In the state directory; its holder runs cycles on events."""


class AnotherControllerError(MuriError):
    """Another controller is running, so this one has nothing to do; that is not a failure."""

    exit_code = 0


class ControllerHangsError(MuriError):
    """Another controller has held the lock for long and finishes no cycle; an administrator has to look at it."""


def hung_for_s(state_dir: Path, now_s: float) -> float | None:
    """Return for how long the controller that holds the lock has finished no cycle; None without a lock."""
    held_s = age_s(state_dir / LOCK_NAME, now_s)
    finished_s = age_s(state_dir / STATUS_NAME, now_s)
    return held_s if held_s is None or finished_s is None else min(held_s, finished_s)


@contextmanager
def only_one(state_dir: Path, lock_name: str = LOCK_NAME) -> Iterator[None]:
    """Hold the controller's lock, or another one; an AnotherControllerError says which process has it.

    Raises:
        UnsafeFileError: The state directory, or the lock in it, is not this user's alone.
    """
    make_private_directory(state_dir)
    handle = open_private_file(state_dir / lock_name)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise AnotherControllerError(
                f"another controller (PID {holder}) is using {state_dir}; nothing to do"
            ) from error
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def holder_of(state_dir: Path, lock_name: str) -> int | None:
    """Return the process that holds a lock in the state directory, None if none does; an OSError if it is closed."""
    try:
        handle = os.open(state_dir / lock_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.pread(handle, 32, 0) or 0)
    finally:
        os.close(handle)
    return None


def end_watcher(state_dir: Path) -> bool:
    """Tell the process that runs cycles on events to end, and wait for it; return whether it has ended."""
    end_s = MACHINE_CLOCK() + _LONGEST_END_S
    while (pid := holder_of(state_dir, EVENTS_LOCK_NAME)) is not None and MACHINE_CLOCK() < end_s:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        MACHINE_CLOCK.sleep(LOOK_S)
    return pid is None


class StopSignal:
    """Whether this process was told to stop by SIGTERM or SIGINT.

    It takes no lock, unlike threading.Event: the handler may interrupt `wait` while that holds the lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)

    def heed_signals(self) -> None:
        """Let both signals set it, instead of ending the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        """Tell it to stop."""
        if not self._is_set:
            self._is_set = True
            os.write(self._wakes, b"!")

    def is_set(self) -> bool:
        """Whether to stop now."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Sleep until told to stop, at most `timeout` seconds."""
        select.select([self._woken], [], [], timeout)
        return self._is_set


class Waitable(StopFlag, Protocol):
    """The part of threading.Event that the loop needs."""

    def wait(self, timeout: float) -> bool:
        """Sleep until told to stop, at most `timeout` seconds."""
        ...


def run_once(
    controller: "Controller",
    watch_s: float,
    stop: Waitable,
    clock: Clock = MACHINE_CLOCK,
    until_s: float = math.inf,
    bell: Bell | None = None,
) -> None:
    """Run a cycle, and stay until the members of new groups have started, at most `watch_s` seconds and till `until_s`.

    With a bell the stay ends when the next cycle is due, such as one for the rest of this one.
    """
    if bell is None:
        controller.cycle()
    else:
        with bell.cycle():
            controller.cycle()
        if controller.has_more:
            bell.ring()
    end_s, were_open = min(clock() + watch_s, until_s), False
    while (looked_s := clock()) < end_s and not stop.is_set():
        if not controller.close_gates():
            if were_open and bell is not None and controller.someone_waits:
                bell.ring()  # jobs could not join a group that had yet to start
            return
        were_open = True
        rest_s = max(_LOOK_AGAIN_S, _LEAST_REST * (clock() - looked_s))
        if _wait(min(clock() + rest_s, end_s), stop, clock, bell):
            return
    if were_open and bell is not None:
        bell.ring()  # look again: a group whose members never start must not hold GPUs until the timer


def run_for_timer(
    controller: "Controller", watch_s: float, stop: Waitable, bell: Bell | None, clock: Clock = MACHINE_CLOCK
) -> None:
    """Run a cycle and stay as `run_once`; cycles on events in that time are this process's, which has the lock."""
    end_s = clock() + watch_s
    while True:
        run_once(controller, watch_s, stop, clock, bell=bell)
        if bell is None or max(bell.due_s, clock()) >= end_s or not _wait(end_s, stop, clock, bell):
            return


def run_forever(
    controller: "Controller",
    interval_s: float,
    watch_s: float,
    stop: Waitable,
    clock: Clock = MACHINE_CLOCK,
    bell: Bell | None = None,
) -> None:
    """Run a cycle every `interval_s` seconds, and when the bell says so, until told to stop.

    A failed cycle is logged, and jobs stay as they are until the next one.
    """
    while not stop.is_set():
        next_s = clock() + interval_s
        _attempt(partial(run_once, controller, watch_s, stop, clock, next_s, bell))
        _wait(next_s, stop, clock, bell)


def run_on_events(cycle: Callable[[], None], stop: Waitable, bell: Bell, clock: Clock = MACHINE_CLOCK) -> None:
    """Run a cycle now, and when the bell says so, until told to stop; a timer runs the others.

    Where `cycle` raises an AnotherControllerError, the other one may have read the queue before the event: it is tried
    again.
    """
    bell.ring()
    while _wait(math.inf, stop, clock, bell):
        try:
            if not _attempt(cycle):
                bell.give_up()
        except AnotherControllerError as error:
            log.debug("%s; trying again", error)
            stop.wait(LOOK_S)


def _attempt(cycle: Callable[[], object]) -> bool:
    """Run a cycle; log its failure, unless another controller is at work. Return whether it finished."""
    try:
        cycle()
    except AnotherControllerError:
        raise
    except MuriError as error:
        log.error("cycle skipped: %s", error)  # noqa: TRY400 (the error explains itself)
    except Exception:  # a bug of Muri's; the watchdog goes by finished cycles, not by this process
        log.exception("cycle skipped")
    else:
        return True
    return False


def _wait(until_s: float, stop: Waitable, clock: Clock, bell: Bell | None) -> bool:
    """Wait until a time, or until the bell says that a cycle is due; return whether it does."""
    while not stop.is_set():
        now_s = clock()
        if bell is not None:
            bell.look()
            if bell.due_s <= now_s:
                return True
        if now_s >= until_s:
            break
        end_s = until_s if bell is None else min(until_s, bell.due_s, now_s + LOOK_S)
        stop.wait(max(0.0, end_s - now_s))
    return False


def serve_once(config: Config, stop: StopSignal) -> None:
    """Run a timer's cycle; with a watcher of events also those that follow while it stays."""
    with _only_one_at_work(config), open_controller(config, surroundings=Surroundings(stop)) as instance:
        is_watched = holder_of(config.state_dir, EVENTS_LOCK_NAME) is not None
        bell = open_bell(config.events.notice_file, config.state_dir) if is_watched else None
        run_for_timer(instance, config.tuning.gate_watch_s, stop, bell)


def serve_forever(config: Config, interval_s: float, stop: StopSignal) -> None:
    """Run cycles at an interval, and on events, until told to stop."""
    with ExitStack() as stack:
        stack.enter_context(_only_one_at_work(config))
        bell = None
        if config.events.enabled and interval_s > LEAST_GAP_S:  # else cycles come as soon by themselves
            stack.enter_context(only_one(config.state_dir, EVENTS_LOCK_NAME))
            bell = open_bell(config.events.notice_file, config.state_dir)
        instance = stack.enter_context(open_controller(config, looping=True, surroundings=Surroundings(stop)))
        if config.metrics_listen:
            instance.books.serve()
        run_forever(instance, interval_s, config.tuning.gate_watch_s, stop, bell=bell)


def serve_on_events(config_file: Path | None, config: Config, stop: StopSignal) -> None:
    """Run cycles on events until told to stop, beside a timer's; each reads the configuration anew, as the timer's."""
    bell = open_bell(config.events.notice_file, config.state_dir)

    def cycle() -> None:
        current = read_trusted_config(config_file)
        with only_one(current.state_dir), open_controller(current, surroundings=Surroundings(stop)) as instance:
            run_once(instance, current.tuning.gate_watch_s, stop, bell=bell)

    with only_one(config.state_dir, EVENTS_LOCK_NAME):
        run_on_events(cycle, stop, bell)


@contextmanager
def _only_one_at_work(config: Config) -> Iterator[None]:
    """Hold the controller's lock; raises an AnotherControllerError, a ControllerHangsError if it has missed cycles."""
    with ExitStack() as stack:
        try:
            stack.enter_context(only_one(config.state_dir))
        except AnotherControllerError as error:
            hung_s = hung_for_s(config.state_dir, time.time())
            if hung_s is None or hung_s < CYCLES_MISSED * config.interval_s:
                raise
            raise ControllerHangsError(
                f"{error}. But it has finished no cycle for {hung_s:.0f} s: end it, then run this again; "
                "`muri drain --if-stale` gives its jobs back meanwhile"
            ) from error
        yield
