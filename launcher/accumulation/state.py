"""What a thread's batches are going through; loads nothing of PyTorch."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muri.launcher.accumulation.planned import hooked_steps
from muri.launcher.context import current_session

if TYPE_CHECKING:
    from muri.launcher.accumulation.loop import SplitLoop


class LocalState(threading.local):
    """Whether the calling thread's batches are split, and where it is in one.

    A session of a shared runtime trains in a thread of its own, so this is the script's as well.
    """

    def __init__(self) -> None:
        self._loop: SplitLoop | None = None
        self._explicit = False
        self._looked = False
        self._partial = False

    @property
    def loop(self) -> "SplitLoop | None":
        """What splits this thread's loaders; None: nothing does, as in all threads that a script starts itself."""
        if not self._looked:
            self._looked = True
            steps = hooked_steps(os.environ) if _is_first_thread() and not self._explicit else 1
            if steps > 1:
                from muri.launcher.accumulation.loop import SplitLoop  # (only where batches are split)

                self._loop = SplitLoop(steps)
        return self._loop

    @property
    def amid_batch(self) -> bool:
        """Whether a loader has more parts of the current batch to give: what belongs to whole batches waits."""
        return self._loop is not None and self._loop.amid_batch

    @property
    def exchange_waits(self) -> bool:
        """Whether more parts of the current batch are to come, whoever splits it: ranks exchange with the last."""
        return self._partial or self.amid_batch

    def refuse(self, reason: str) -> None:
        """Let loaders give whole batches, for a reason that the user is told, if they were to be split."""
        if self.loop is not None:
            self.loop.refuse(reason)

    def become_explicit(self) -> None:
        """The script splits its batches itself: loaders give whole ones from now on."""
        if self._loop is not None:
            self._loop.end()
        self._explicit, self._looked, self._loop = True, True, None

    @contextmanager
    def partial(self, amid_batch: bool) -> Iterator[None]:
        """A micro-batch that the script itself asked for is being worked on.

        Args:
            amid_batch: Whether it is not the last one of its batch.
        """
        self._partial = amid_batch
        try:
            yield
        finally:
            self._partial = False

    @contextmanager
    def looping(self, loop: "SplitLoop") -> Iterator[None]:
        """Within the context, let `loop` split what loaders give."""
        before = self._loop, self._looked
        self._loop, self._looked = loop, True
        try:
            yield
        finally:
            loop.end()
            self._loop, self._looked = before


def _is_first_thread() -> bool:
    """Whether the calling thread is the one that the script begins in."""
    session, thread = current_session(), threading.current_thread()
    return thread is threading.main_thread() if session is None else thread not in session.threads


local = LocalState()
