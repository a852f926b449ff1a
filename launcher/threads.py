"""The way to members that are threads: nothing else knows of `launcher/shared_process`, or loads it.

Most groups have no such member. A script's own process looks only for what would keep it from being a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # nothing loads the room for the sake of its types
    from muri.launcher.shared_process import danger_watch as watch
    from muri.launcher.shared_process import state, thread_session

    DangerWatch = watch.DangerWatch
    Script = state.SessionState
    SharedProcess = thread_session.Threads
    ThreadSession = thread_session.ThreadSession
else:
    DangerWatch = Script = SharedProcess = ThreadSession = Any

_ROOM: Final = "muri.launcher.shared_process"


def shared_process() -> type[SharedProcess]:
    """Load what runs members as threads of this process."""
    kind: type[SharedProcess] = import_module(f"{_ROOM}.thread_session").Threads
    return kind


class _Scripts:
    look_up: Callable[[], Script | None] = staticmethod(lambda: None)


def current_script() -> Script | None:
    """Return the calling thread's script; None in a process that has one script, or from no script's thread."""
    return _Scripts.look_up()


def tell_scripts_apart(look_up: Callable[[], Script | None]) -> None:
    """Set what finds a thread's script; each module of the launcher keeps belongings of it under its own key."""
    _Scripts.look_up = staticmethod(look_up)


_begun: Final[list[DangerWatch]] = []


def watch_dangers(own_directory: str) -> None:
    """Watch this process from now on; its script's own modules are in that directory."""
    _begun.append(import_module(f"{_ROOM}.danger_watch").DangerWatch(own_directory))


def danger_watch() -> DangerWatch | None:
    """Return the watch of this process, None where there is none."""
    return _begun[0] if _begun else None
