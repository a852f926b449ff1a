"""How a script ends itself: `atexit`, `os._exit`, and a sleep that a signal can end."""

import atexit
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from muri.launcher.context import current_session


class SessionExit(SystemExit):
    """A script asked to end at once, without clean-up: `os._exit`."""


def _install_exits(runtime_pid: int) -> None:
    register, unregister, hard_exit = atexit.register, atexit.unregister, os._exit

    def session_register(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        session = current_session()
        if session is None:
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
        if current_session() is None or os.getpid() != runtime_pid:
            hard_exit(status)
        raise SessionExit(status)

    atexit.register, atexit.unregister = session_register, session_unregister
    os._exit = session_exit


def _install_sleep() -> None:
    sleep = time.sleep

    def session_sleep(seconds: float, /) -> None:
        session = current_session()
        if session is None or seconds <= 0 or session.interrupted.is_set():
            sleep(seconds)
        else:
            session.interrupted.wait(seconds)

    time.sleep = session_sleep  # type: ignore[assignment]


def install() -> None:
    """Patch `atexit`, `os._exit` and `time.sleep`."""
    _install_exits(os.getpid())
    _install_sleep()
