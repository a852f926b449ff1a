"""Signals: each session has handlers of its own, and a signal to the process means the session that sends it.

A process that a session forks has the session's handlers as its real ones, and may change them.
"""

import contextlib
import os
import signal
import threading
from typing import Any, Final

from muri.launcher.context import SessionState, current_session

_plain_signal = signal.signal
_OF_RUNTIME: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip
"""The runtime has handlers of its own for these; forked processes must not keep them."""


def install_signals() -> None:
    """Patch the functions that set, read and send signals."""
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
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_reset_in_child)


def _handler_of(session: SessionState, signum: int) -> Any:
    return session.handlers.get(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


class _Fork(threading.local):
    mask: set[int] | None = None


_fork: Final = _Fork()
"""What this thread held back before it began to fork a process."""


def _hold_back() -> None:
    """A signal must wait until the new process has its handlers: else Python drops it, or it ends the runtime."""
    if current_session() is not None:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_RUNTIME)


def _let_through() -> None:
    mask, _fork.mask = _fork.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reset_in_child() -> None:
    session = current_session()
    if session is not None:
        for number in {*_OF_RUNTIME, *session.handlers}:
            with contextlib.suppress(OSError, ValueError):  # one that has no handlers
                _plain_signal(number, _handler_of(session, number))
    _let_through()
