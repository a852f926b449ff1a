"""Signals, and how a script ends itself: `atexit`, finalizers, `os._exit`, and a sleep that a signal can end.

Each session has its own handlers, and a signal that a session sends to the process goes to that session.
"""

import atexit
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from muri.launcher.shared_process.local_imports import LocalModules
from muri.launcher.shared_process.state import PerSession, SessionState, current_session

_MANY: Final = 256
"""After this many new finalizers the list drops those that have run."""


def install_signals() -> None:
    """Patch the functions that set, read and send signals: Python has one handler per process, in its main thread."""
    set_handler, get_handler, kill = signal.signal, signal.getsignal, os.kill
    runtime_pid = os.getpid()

    def own_session() -> SessionState | None:
        return current_session() if os.getpid() == runtime_pid else None

    def session_getsignal(signalnum: Any) -> Any:
        session = own_session()
        return get_handler(signalnum) if session is None else _handler_of(session, int(signalnum))

    def session_signal(signalnum: Any, handler: Any) -> Any:
        session = own_session()
        if session is None:
            return set_handler(signalnum, handler)
        if not callable(handler) and handler not in {signal.SIG_DFL, signal.SIG_IGN}:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        previous = session_getsignal(signalnum)
        session.handlers[int(signalnum)] = handler
        return previous

    def session_kill(pid: int, signalnum: int) -> None:
        session = own_session()
        if session is None or pid != os.getpid() or signalnum == 0:
            kill(pid, signalnum)
        else:
            session.deliver(int(signalnum))

    signal.signal, signal.getsignal = session_signal, session_getsignal
    os.kill = session_kill
    signal.raise_signal = lambda signalnum: os.kill(os.getpid(), signalnum)


def _handler_of(session: SessionState, signum: int) -> Any:
    return session.handlers.get(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


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


def _patch_exits(runtime_pid: int, modules: LocalModules) -> None:
    """Run a script's `atexit` functions at its own end, and let its `os._exit` spare the runtime."""
    register, unregister, hard_exit = atexit.register, atexit.unregister, os._exit

    def session_register(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        session = current_session()
        if session is None or _in_import_of_shared_module(session, modules):
            return register(function, *args, **kwargs)
        session.exit_functions.append(partial(function, *args, **kwargs))
        return function

    def session_unregister(function: Callable[..., Any]) -> None:
        session = current_session()
        if session is None:
            unregister(function)
        else:
            kept = [f for f in session.exit_functions if not (isinstance(f, partial) and f.func == function)]
            session.exit_functions = kept

    def session_exit(status: int) -> Any:
        session = current_session()
        if session is None or os.getpid() != runtime_pid:
            hard_exit(status)
        else:
            session.leave(status)

    atexit.register, atexit.unregister = session_register, session_unregister
    os._exit = session_exit


def _patch_sleep() -> None:
    """Let a signal end a session's sleep: Python raises exceptions from outside only between bytecodes."""
    sleep = time.sleep

    def session_sleep(seconds: float, /) -> None:
        session = current_session()
        if session is None or seconds <= 0 or session.interrupted.is_set():
            sleep(seconds)
            return
        end_s = time.monotonic() + seconds
        session.interrupted.wait(seconds)
        # Woken by a signal: its exception is on the way and must find the script still asleep.
        while (left_s := end_s - time.monotonic()) > 0:
            sleep(min(left_s, 0.05))

    time.sleep = session_sleep  # type: ignore[assignment]


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
    """Patch `atexit`, `weakref.finalize`, `os._exit` and `time.sleep`.

    Args:
        modules: Tells a script's own modules from installed ones.
    """
    _patch_exits(os.getpid(), modules)
    _patch_finalizers(modules)
    _patch_sleep()
