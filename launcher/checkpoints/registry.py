"""Which checkpointer belongs to the script that is calling."""

import os
from typing import TYPE_CHECKING, Final

from muri.launcher.context import PerSession, SessionState, current_session

if TYPE_CHECKING:
    from muri.launcher.checkpoints.checkpoint import Checkpointer


class _Place:
    """Holds a script's checkpointer."""

    def __init__(self) -> None:
        self.checkpointer: Checkpointer | None = None


_process: Final = _Place()
_per_session: Final = PerSession(_Place)


def current() -> "Checkpointer | None":
    """The calling script's checkpointer, None before it called `muri.checkpoint`."""
    return _place().checkpointer


def of(session: SessionState) -> "Checkpointer | None":
    """A session's checkpointer, None before its script called `muri.checkpoint`."""
    return _per_session.of(session).checkpointer


def register(checkpointer: "Checkpointer | None") -> None:
    """Make it the calling script's."""
    _place().checkpointer = checkpointer


def _place() -> _Place:
    session = current_session()
    return _process if session is None else _per_session.of(session)


def _forget() -> None:
    """In a forked child, such as a DataLoader's worker: it saves nothing."""
    _process.checkpointer = None


os.register_at_fork(after_in_child=_forget)
