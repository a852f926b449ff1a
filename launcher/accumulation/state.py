"""What a thread's batches are going through; loads nothing of PyTorch."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muri.launcher.accumulation.planned import hooked_steps

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
        """What splits this thread's loaders; None: nothing does."""
        if not self._looked:
            self._looked = True
            steps = 1 if self._explicit else hooked_steps(os.environ)
            if steps > 1:
                from muri.launcher.accumulation.loop import SplitLoop  # noqa: PLC0415 (only where batches are split)

                self._loop = SplitLoop(steps)
        return self._loop

    @property
    def amid_batch(self) -> bool:
        """Whether more micro-batches of the current batch are to come."""
        loop = self._loop
        return self._partial or (loop is not None and loop.amid_batch)

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


local = LocalState()
