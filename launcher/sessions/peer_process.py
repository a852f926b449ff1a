"""The process at the other end of a connection: its end, and signals that can reach no other process."""

import contextlib
import ctypes
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muri.launcher import protocol
from muri.launcher.job.environment import descendants_of, stat_of

_PIDFD_SEND_SIGNAL: Final = 424
_PIDFD_OPEN: Final = 434
"""Numbers of system calls, the same on all machines: Pythons that were built on an old system lack the functions."""

_ENDED: Final = ("Z", "X")
_POLL_S: Final = 0.2

_libc: Final = ctypes.CDLL(None, use_errno=True)


class PeerProcess:
    """A process that need not be a child of this one.

    Attributes:
        pid: Its process id; 0 if it cannot be seen from here.
    """

    def __init__(self, pid: int) -> None:
        self._file = _open_pidfd(pid)
        self._begun: Final = _begun(pid)
        self.pid: Final = pid if self._file >= 0 or self._begun else 0
        self._closed = False
        self._lock = threading.Lock()  # a file that is closed may get its number for another process
        self._close_file = weakref.finalize(self, os.close, self._file) if self._file >= 0 else None

    @classmethod
    def of(cls, connection: socket.socket) -> "PeerProcess":
        """The process that has connected and waits for an answer."""
        peer = cls(protocol.peer_of(connection)[0])
        watched = select.poll()
        watched.register(connection, select.POLLRDHUP)
        if peer.pid and watched.poll(0):  # it had ended before it was found: another one may have its number
            return cls(0)
        return peer

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or is not watched any more; False where it cannot be seen."""
        with self._lock:
            return self._closed or self._has_ended()

    def _has_ended(self) -> bool:
        return _ends_within(self._file, 0) if self._file >= 0 else self.pid > 0 and _begun(self.pid) != self._begun

    def close(self) -> None:
        """Watch it no more."""
        with self._lock:
            self._closed = True
            if self._close_file is not None:
                self._close_file()

    def wait(self) -> None:
        """Wait for its end; only for a process that can be seen."""
        if self._file >= 0:
            _ends_within(self._file, None)
        while not self.has_ended:
            time.sleep(_POLL_S)

    def send(self, number: int) -> None:
        """Send it a signal; nothing happens once it has ended, or where it cannot be seen."""
        with self._lock:
            if self._closed:
                return
            if self._file >= 0:
                _libc.syscall(_PIDFD_SEND_SIGNAL, self._file, number, None, 0)
            elif self.pid and not self._has_ended():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def family(self) -> "Iterator[PeerProcess]":
        """The processes that it has started, and those that these have started."""
        if self.pid and not self.has_ended:
            yield from map(PeerProcess, descendants_of(self.pid))

    def error_output(self) -> int:
        """Open its standard error anew, without waiting for a reader.

        Raises:
            OSError: It cannot be opened from here, or the process has ended.
        """
        file = os.open(f"/proc/{self.pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
        os.set_blocking(file, True)
        if not self.pid or self.has_ended:  # then it may be that of another one with the same number
            os.close(file)
            raise ProcessLookupError("the process has ended")
        return file


def _ends_within(file: int, timeout_ms: int | None) -> bool:
    watched = select.poll()
    watched.register(file, select.POLLIN)
    return bool(watched.poll(timeout_ms))


def _open_pidfd(pid: int) -> int:
    """Open a pidfd, which stands for one process; return -1 if the process is gone, or on a kernel before 5.3."""
    return int(_libc.syscall(_PIDFD_OPEN, pid, 0)) if pid > 0 else -1


def _begun(pid: int) -> str:
    """Return when a process has begun, in the kernel's count; "" where none runs with that number."""
    if pid > 0:
        with contextlib.suppress(OSError, IndexError):
            _, fields = stat_of(Path(f"/proc/{pid}"))
            return "" if fields[0] in _ENDED else fields[19]
    return ""
