"""Bounds the connections that have not yet said who they are, so that strangers leave room for peers."""

import contextlib
import socket
import threading
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock


class Newcomers:
    """Keeps a bounded number of connections open. One more closes the oldest: an expected peer has identified by then.

    Args:
        most: How many there may be.
        clock: Tells how old they are.
    """

    def __init__(self, most: int, clock: Clock = MACHINE_CLOCK) -> None:
        self._most: Final = most
        self._clock: Final = clock
        self._lock = threading.Lock()
        self._since_s: dict[socket.socket, float] = {}

    def add(self, raw: socket.socket) -> None:
        """Take one more in; a thread that waits for the one that ends for it sees its end."""
        with self._lock:
            self._since_s[raw] = self._clock()
            if len(self._since_s) > self._most:
                self._end(next(iter(self._since_s)))

    def take(self, raw: socket.socket) -> bool:
        """Whether the connection is still among them; from now on it is not."""
        with self._lock:
            return self._since_s.pop(raw, None) is not None

    def end_older(self, than_s: float) -> None:
        """End those that came so many seconds ago, whether or not they have said something since."""
        with self._lock:
            late_s = self._clock() - than_s
            for raw in [raw for raw, since_s in self._since_s.items() if since_s <= late_s]:
                self._end(raw)

    def _end(self, raw: socket.socket) -> None:
        del self._since_s[raw]
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
