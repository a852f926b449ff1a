"""Threads that a session starts belong to it."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from muri.launcher.context import SessionState, current_session, enter_session

_at_start: Final[list[Callable[[SessionState], None]]] = []
_at_session_start: Final[list[Callable[[SessionState], None]]] = []


def at_thread_start(function: Callable[[SessionState], None]) -> None:
    """Call a function in each thread that a session starts, before the thread's own work."""
    _at_start.append(function)


def at_session_start(function: Callable[[SessionState], None]) -> None:
    """Call a function in a session's first thread only."""
    _at_session_start.append(function)


def begin(session: SessionState) -> None:
    """Make the calling thread the session's first one."""
    enter_session(session)
    for function in (*_at_session_start, *_at_start):
        function(session)


def _run_in_session(session: SessionState, run: Callable[[], None]) -> None:
    enter_session(session)
    for function in _at_start:
        function(session)
    run()


def install() -> None:
    """Let `threading.Thread` hand the session on."""
    start = threading.Thread.start

    def start_in_session(thread: threading.Thread) -> None:
        session = current_session()
        if session is not None:
            thread.run = partial(_run_in_session, session, thread.run)  # type: ignore[method-assign]
            session.threads = [other for other in session.threads if other.is_alive()] + [thread]
        start(thread)

    threading.Thread.start = start_in_session  # type: ignore[method-assign, assignment]
