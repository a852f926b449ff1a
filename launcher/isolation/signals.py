"""Signals: each session has handlers of its own, and a signal to the process means the session that sends it."""

import os
import signal
from typing import Any

from muri.launcher.context import current_session

_plain_signal = signal.signal


def install() -> None:
    """Patch the functions that set, read and send signals."""
    set_handler, get_handler, kill = signal.signal, signal.getsignal, os.kill

    def default_of(signum: int) -> Any:
        return signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL

    def session_getsignal(signalnum: Any) -> Any:
        session = current_session()
        if session is None:
            return get_handler(signalnum)
        return session.handlers.get(int(signalnum), default_of(int(signalnum)))

    def session_signal(signalnum: Any, handler: Any) -> Any:
        session = current_session()
        if session is None:
            return set_handler(signalnum, handler)
        if not callable(handler) and handler not in {signal.SIG_DFL, signal.SIG_IGN}:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        previous = session_getsignal(signalnum)
        session.handlers[int(signalnum)] = handler
        return previous

    def session_kill(pid: int, signalnum: int) -> None:
        session = current_session()
        if session is None or pid != os.getpid() or signalnum == 0:
            kill(pid, signalnum)
        else:
            session.deliver(int(signalnum))

    signal.signal, signal.getsignal = session_signal, session_getsignal
    os.kill = session_kill
    signal.raise_signal = lambda signalnum: os.kill(os.getpid(), signalnum)
    os.register_at_fork(after_in_child=_reset_in_child)


def _reset_in_child() -> None:
    if current_session() is not None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            _plain_signal(number, signal.SIG_DFL)
