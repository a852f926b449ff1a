"""How a script in a thread is interrupted, and how it ends: exit codes, signals, the traceback that it leaves."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError, give_way
from muri.launcher.job import script
from muri.launcher.job.stage_clock import Gate, IterationRecord
from muri.launcher.shared_process.local_imports import LocalModules
from muri.launcher.shared_process.state import PerSession, SessionState, current_session, in_session


class Interruption:
    """Exceptions that reach a script's own thread from others.

    Python raises such an exception at the thread's next bytecode, wherever that is. In the middle of the arbiter it
    would leave a resource taken and unknown, so the thread holds `lock` there and is interrupted when it comes out.
    Other members would also suffer from half an import; `hold_back` and `let_through` prevent that.
    """

    def __init__(self, state: SessionState, arbiter: Arbiter, thread: threading.Thread) -> None:
        self.state: Final = state
        self.lock: Final = threading.Lock()  # held while the arbiter's state changes
        self.ended: Final = threading.Event()  # the script has ended and was cleaned up
        self.pending: type[BaseException] | None = None  # to raise at the next safe point
        self.allowed = True  # to interrupt the script; not while it only clears up
        self._arbiter = arbiter
        self._thread = thread
        self._held_back = 0

    @property
    def in_own_thread(self) -> bool:
        """Whether the caller is the script's own thread."""
        return threading.get_ident() == self._thread.ident

    def lock_of_thread(self) -> contextlib.AbstractContextManager[object]:
        """The lock in the script's own thread, which alone is interrupted from outside.

        A helper thread must not take it: the script's own thread holds it while it waits, perhaps for
        a resource that only comes free once the helper gives one back.
        """
        return self.lock if self.in_own_thread else contextlib.nullcontext()

    def safe_point(self) -> None:
        """Raise what is pending, in the script's own thread."""
        if self.ended.is_set():  # given up: the script must not use resources any more
            raise SystemExit(128 + signal.SIGTERM)
        if not self.in_own_thread:
            return
        ending, self.pending = self.pending, None
        if ending is not None:
            self._raise_later(None)
            raise ending()

    def throw(self, kind: type[BaseException]) -> None:
        """Raise an exception in the script's thread, at once or when it leaves the arbiter."""
        self.pending = kind
        self.state.interrupted.set()
        self._arbiter.interrupt(self.state.member)
        if self.lock.acquire(blocking=False):
            try:
                if self.allowed and self.pending is not None and not self._held_back:
                    self.pending = None
                    self._raise_later(kind)
            finally:
                self.lock.release()

    def hold_back(self) -> None:
        """Raise nothing from outside in the script's own thread until it calls `let_through`; calls nest."""
        if not self.in_own_thread:
            return
        before = self._held_back
        try:
            with self.lock:  # who raises something has done so when the lock is free
                self._held_back = before + 1
        except BaseException:
            self._held_back = before
            raise

    def let_through(self) -> None:
        """End what `hold_back` began, and raise what was held back."""
        if self.in_own_thread:
            self._held_back -= 1
            if self.allowed and not self._held_back:
                self.safe_point()

    def forbid(self) -> None:
        """Raise nothing in the script's thread from now on; called by that thread."""
        while True:
            try:
                with self.lock:
                    self.allowed = False
                    self._raise_later(None)
            except BaseException:  # noqa: S112 (raised from outside just before the lock was taken)
                continue
            return

    def _raise_later(self, kind: type[BaseException] | None) -> None:
        """Let Python raise an exception in the script's thread at its next bytecode; None takes one back."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, None if kind is None else ctypes.py_object(kind))


class SessionGate(Gate):
    """Asks the arbiter for a session's resources and takes interruptions in between."""

    @property
    def asks(self) -> bool:
        """True: other members may hold the resource."""
        return True

    def __init__(self, interruption: Interruption, arbiter: Arbiter) -> None:
        self._interruption = interruption
        self._arbiter = arbiter
        self._member = interruption.state.member

    def acquire(self, stage: int) -> float:
        """Wait for the stage's resource; a signal may end the wait and the script."""
        return self._guarded(stage, self._arbiter.acquire)

    def release(self, stage: int) -> None:
        """Pass the resource on."""
        with self._interruption.lock_of_thread():
            if not self._interruption.ended.is_set() and self._arbiter.release(self._member, stage):
                give_way()

    def yield_point(self, stage: int) -> float:
        """Let others go first, if they are further behind."""
        return self._guarded(stage, self._arbiter.yield_point)

    def iteration_done(self, record: IterationRecord) -> None:
        """Tell the arbiter."""
        with self._interruption.lock_of_thread():
            if not self._interruption.ended.is_set():
                self._arbiter.iteration_done(self._member, record)
        self._interruption.safe_point()

    def _guarded(self, stage: int, operation: Callable[[str, int], float]) -> float:
        interruption = self._interruption
        interruption.safe_point()
        try:
            with interruption.lock_of_thread():
                waited_s = operation(self._member, stage)
        except WaitInterruptedError:
            interruption.safe_point()
            raise SystemExit(128 + signal.SIGTERM) from None
        if interruption.ended.is_set():  # a helper thread of a script that is over
            self._arbiter.release(self._member, stage)
        interruption.safe_point()
        return waited_s


class SessionSignalError(SystemExit):
    """A signal ends the script."""


def ending_of(signum: int) -> type[BaseException]:
    """Raised in the script by a signal without a handler."""
    if signum == signal.SIGINT:
        return KeyboardInterrupt
    return type(f"Ended_{signal.Signals(signum).name}", (SessionSignalError,), {"code": 128 + signum})  # as of a shell


def exit_with(code: int) -> type[BaseException]:
    """What ends a script at once from another thread: raised without arguments."""
    return type("Left", (SessionExit,), {"code": code})


def clear_main_module(main: ModuleType) -> None:
    """Release the objects of a script at its end, the newest first: an object may need older ones to finish."""
    names = main.__dict__
    for _ in range(len(names)):
        if names:
            names.popitem()
    names.clear()


def exit_code(error: SystemExit, state: SessionState) -> int:
    """The exit code that Python derives from the exception; prints its message if it has one."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=state.streams["stderr"])
    return 1


_ROOM: Final = str(Path(__file__).parent)


def _is_launchers(filename: str) -> bool:
    return filename == script.__file__ or filename.startswith(_ROOM)


def print_unraisable(error: BaseException, function: Callable[..., object], state: SessionState) -> None:
    """Print the error of a function given to `atexit`, as Python does."""
    plain = function.func if isinstance(function, partial) else function
    with contextlib.suppress(OSError, ValueError):
        print(f"Exception ignored in atexit callback: {plain!r}", file=state.streams["stderr"])
    print_exception(error, state)


def print_exception(error: BaseException, state: SessionState) -> None:
    """Print a traceback without frames of the launcher, as Python's own would be."""
    text = traceback.TracebackException.from_exception(error)
    report: traceback.TracebackException | None = text
    while report is not None:
        report.stack = traceback.StackSummary.from_list([f for f in report.stack if not _is_launchers(f.filename)])
        report = report.__cause__ or report.__context__
    with contextlib.suppress(OSError, ValueError):
        for part in text.format():
            print(part, file=state.streams["stderr"], end="")


_MANY: Final = 256
"""After this many new finalizers the list drops those that have run."""


_finalizers: PerSession[list["weakref.finalize[..., Any]"]] = PerSession(list)


class SessionExit(SystemExit):
    """A script asked to end at once, without clean-up: `os._exit`."""


def _in_import_of_shared_module(session: SessionState, modules: LocalModules) -> bool:
    """Whether the caller runs because an installed package is being imported, which outlives the session."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("module") if frame.f_code.co_name == "exec_module" else None
        if module is not None:
            return not modules.is_local(session, module.__name__.partition(".")[0])
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _patch_exits(modules: LocalModules) -> None:
    """Run a script's `atexit` functions at its own end, and let its `os._exit` spare the runtime."""
    plain_register = atexit.register

    @in_session(plain_register)
    def register(session: SessionState, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if _in_import_of_shared_module(session, modules):
            return plain_register(function, *args, **kwargs)
        session.exit_functions.append(partial(function, *args, **kwargs))
        return function

    @in_session(atexit.unregister)
    def unregister(session: SessionState, function: Callable[..., Any]) -> None:
        kept = [f for f in session.exit_functions if not (isinstance(f, partial) and f.func == function)]
        session.exit_functions = kept

    atexit.register, atexit.unregister = register, unregister
    os._exit = in_session(os._exit)(lambda session, status: session.leave(status))


def _patch_sleep() -> None:
    """Let a signal end a session's sleep: Python raises exceptions from outside only between bytecodes."""
    plain = time.sleep

    @in_session(plain)
    def sleep(session: SessionState, seconds: float, /) -> None:
        if seconds <= 0 or session.interrupted.is_set():
            plain(seconds)
            return
        end_s = time.monotonic() + seconds
        session.interrupted.wait(seconds)
        # Woken by a signal: its exception is on the way and must find the script still asleep.
        while (left_s := end_s - time.monotonic()) > 0:
            plain(min(left_s, 0.05))

    time.sleep = sleep


def _patch_finalizers(modules: LocalModules) -> None:
    """Run a script's finalizers at its own end: Python would run them at the runtime's."""
    weakref.finalize(_patch_finalizers, int)  # the first one registers itself with atexit: not with a session's
    make = weakref.finalize.__init__

    def session_make(self: Any, obj: Any, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        make(self, obj, func, *args, **kwargs)
        session = current_session()
        if session is not None and not _in_import_of_shared_module(session, modules):
            own = _finalizers.of(session)
            if not own:
                session.exit_functions.insert(0, partial(_run_finalizers, session))
            if len(own) % _MANY == _MANY - 1:
                own[1:] = [finalizer for finalizer in own[1:] if finalizer.alive]
            own.append(self)

    weakref.finalize.__init__ = session_make  # type: ignore[method-assign]


def _run_finalizers(session: SessionState) -> None:
    """Call the `weakref.finalize` objects that a script left, newest first, as Python does at its exit."""
    own = _finalizers.of(session)
    while own:
        finalizer = own.pop()
        if finalizer.alive and finalizer.atexit:
            finalizer()


def install_exits(modules: LocalModules) -> None:
    """Patch `atexit`, `weakref.finalize`, `os._exit` and `time.sleep`; `modules` tells a script's own modules."""
    _patch_exits(modules)
    _patch_finalizers(modules)
    _patch_sleep()
