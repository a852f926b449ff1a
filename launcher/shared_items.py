"""Bytes under whole numbers, kept in memory that forked and spawned worker processes share."""

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any, Final

_WORD: Final = 8
_USED, _KEPT, _HEADER_WORDS = 0, 1, 2
_REFUSED: Final = -1

_all_items: "weakref.WeakSet[SharedItems]" = weakref.WeakSet()


class SharedItems:
    """A table of byte strings that only grows, up to a limit; what is in it stays.

    The memory is a file without a name (memfd_create): the kernel frees it with the last process
    that has it open, however that ends. It holds two counters and for each place its offset and
    length, then the bytes. Writers lock the file; the kernel drops the lock of a killed one. Readers
    don't lock: a place's length is written last, and never changes after.

    Args:
        places: How many byte strings there may be.
        limit_bytes: Most memory, the table included.

    Raises:
        OSError: There is no memory, or no file may be opened.
    """

    def __init__(self, places: int, limit_bytes: int) -> None:
        self.places = places
        self.limit_bytes = limit_bytes
        fd = os.memfd_create("muri-cache", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.table_bytes(places))
        self._adopt(fd)

    @staticmethod
    def table_bytes(places: int) -> int:
        """Memory of the table itself."""
        return (_HEADER_WORDS + 2 * places) * _WORD

    def get(self, place: int) -> bytes | None:
        """What is kept under a place, None if nothing is."""
        length = self._words[_HEADER_WORDS + 2 * place + 1]
        if length <= 0:
            return None
        # One read for the whole: the kernel returns less only for more than 2 GiB.
        offset = self._words[_HEADER_WORDS + 2 * place]
        parts = []
        while length:
            part = os.pread(self._fd, length, offset)
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def undecided(self, place: int) -> bool:
        """Whether nobody has tried to keep something under the place yet."""
        return self._words[_HEADER_WORDS + 2 * place + 1] == 0

    def put(self, place: int, content: bytes | memoryview) -> bool:
        """Keep bytes under a place, if there is room and nobody was first.

        Returns:
            Whether the place holds something now.
        """
        index = _HEADER_WORDS + 2 * place
        with self._locked():
            if self._words[index + 1] != 0:
                return self._words[index + 1] > 0
            offset = self.table_bytes(self.places) + self._words[_USED]
            if not len(content) or offset + len(content) > self.limit_bytes:
                self._words[index + 1] = _REFUSED
                return False
            self._words[_USED] += len(content)  # before the bytes: a writer killed here leaves a gap, no damage
            try:
                _write(self._fd, content, offset)
            except OSError:  # no memory: less is kept
                self._words[index + 1] = _REFUSED
                return False
            self._words[index] = offset
            self._words[index + 1] = len(content)
            self._words[_KEPT] += 1
            return True

    def refuse(self, place: int) -> None:
        """Never keep anything under a place."""
        with self._locked():
            if self._words[_HEADER_WORDS + 2 * place + 1] == 0:
                self._words[_HEADER_WORDS + 2 * place + 1] = _REFUSED

    @property
    def kept(self) -> int:
        """How many places hold something."""
        return self._words[_KEPT]

    @property
    def used_bytes(self) -> int:
        """Memory in use, the table included."""
        return self.table_bytes(self.places) + self._words[_USED]

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is being spawned: the same memory."""
        return {"places": self.places, "limit_bytes": self.limit_bytes, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the spawned process."""
        self.places = state["places"]
        self.limit_bytes = state["limit_bytes"]
        self._adopt(state["fd"].detach())

    def _adopt(self, fd: int) -> None:
        self._fd = fd
        self._table = mmap.mmap(fd, self.table_bytes(self.places))
        self._words = memoryview(self._table).cast("q")
        self._mutex = threading.Lock()
        weakref.finalize(self, os.close, fd).atexit = False
        _all_items.add(self)

    def renew_mutex(self) -> None:
        """In a forked child: a thread that held the lock is not there."""
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among threads by the mutex, among processes by the file's lock."""
        with self._mutex:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)


def _write(fd: int, content: bytes | memoryview, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _renew_mutexes() -> None:
    for items in list(_all_items):
        items.renew_mutex()


os.register_at_fork(after_in_child=_renew_mutexes)
