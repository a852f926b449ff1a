"""Which checkpointer belongs to the script that is calling."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol, TypeVar

from muri.launcher.checkpoints.loader_position import LoaderPosition, Site
from muri.launcher.threads import Script, current_script

Batch = TypeVar("Batch")


class Checkpointer(Protocol):
    """What the launcher asks of a script's checkpointer (`checkpoint.BoundaryCheckpointer`).

    Attributes:
        position: Where the training loop stands in its loader.
        stopped_at: Iteration of the checkpoint after which the script was ended, None while it was not.
    """

    position: LoaderPosition
    stopped_at: int | None

    @property
    def stop_asked(self) -> bool:
        """Whether the script is to stop."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process speaks for all ranks of the job."""

    def ask_stop(self) -> None:
        """Save and end the script at its next iteration boundary. Safe in a signal handler."""

    def own_boundary(self) -> bool:
        """Save at the end of an iteration of a loop that marks no stages; return whether the script should stop now."""

    def close(self) -> None:
        """Keep nothing after the script has ended."""


class _Place:
    """Holds a script's checkpointer."""

    def __init__(self) -> None:
        self.checkpointer: Checkpointer | None = None


_process: Final = _Place()


def current() -> Checkpointer | None:
    """The calling script's checkpointer, None before it called `muri.checkpoint`."""
    return _place().checkpointer


def of(script: Script) -> Checkpointer | None:
    """The checkpointer of one of this process's scripts, None before it called `muri.checkpoint`."""
    return _place_of(script).checkpointer


def register(checkpointer: Checkpointer) -> None:
    """Make this checkpointer the calling script's."""
    _place().checkpointer = checkpointer


def begin_loop(loader: Iterable[Batch], site: Site, skipped: Callable[[], None]) -> Iterator[Batch]:
    """What `muri.batches` iterates over: the loader, or the rest of it after a resume."""
    checkpointer = current()
    return iter(loader) if checkpointer is None else checkpointer.position.begin(loader, site, skipped)


def _place() -> _Place:
    script = current_script()
    return _process if script is None else _place_of(script)


def _place_of(script: Script) -> _Place:
    place: _Place = script.belongings.setdefault(_Place, _Place())
    return place


def _forget() -> None:
    """Drop the checkpointer in a forked child, such as a DataLoader's worker, which must save nothing."""
    _process.checkpointer = None


os.register_at_fork(after_in_child=_forget)
