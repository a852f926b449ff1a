"""Threads that a session starts belong to it."""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from muri.launcher.context import PerSession, SessionState, current_session, enter_session

_at_start: Final[list[Callable[[SessionState], None]]] = []
_first: PerSession[list[threading.Thread]] = PerSession(list)
"""A session's first thread, which is the main one to its script."""

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
    _first.put(session, [threading.current_thread()])
    threading.current_thread().name = "MainThread"
    for function in (*_at_session_start, *_at_start):
        function(session)


def _run_in_session(session: SessionState, run: Callable[[], None]) -> None:
    enter_session(session)
    for function in _at_start:
        function(session)
    run()


def install_threads() -> None:
    """Let `threading.Thread` hand the session on, and each session have a main thread."""
    start, plain_main_thread, runtime_pid = threading.Thread.start, threading.main_thread, os.getpid()

    def main_thread() -> threading.Thread:
        session = current_session()
        if session is None or os.getpid() != runtime_pid:
            return plain_main_thread()
        first = _first.of(session)  # empty for what a session has left behind
        return first[0] if first else plain_main_thread()

    def start_in_session(thread: threading.Thread) -> None:
        session = current_session()
        if session is not None:
            thread.run = partial(_run_in_session, session, thread.run)  # type: ignore[method-assign]
            session.threads = [other for other in session.threads if other.is_alive()] + [thread]
        start(thread)

    threading.Thread.start = start_in_session  # type: ignore[method-assign, assignment]
    threading.main_thread = main_thread
