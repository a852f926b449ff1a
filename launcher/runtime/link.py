"""Authenticated connections between the runtimes of one group: rank 0 listens, the other ranks connect.

A cluster is shared, so a process that connects has to prove that it knows the group's key, and so has rank 0: both
sides answer the other's random challenge with an HMAC (SHA-256) over both challenges and the rank. Key and port travel
in the environment of the pilot job's step, which only its user (and root) can read. Messages that follow are JSON in
the framing of `multiprocessing.connection`, never pickle; they are not encrypted.
"""

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.files import Newcomers
from muri.text import json_of

logger = logging.getLogger("muri.launcher")

LARGEST_MESSAGE_BYTES: Final = 4096
HANDSHAKE_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 0.1
_MOST_HANDSHAKES: Final = 64
_CHALLENGE_BYTES: Final = 32
_HELLO: Final = struct.Struct("!I32s32s")
"""What another rank says first: its number, its challenge, its proof."""

_PROOF_BYTES: Final = 32
_LOOK_S: Final = 0.5
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

Message = dict[str, list[str | int]]


class RankLinkError(MuriError):
    """The runtimes of a group cannot speak with each other."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one runtime in its group."""

    rank: int  # 0 to `world_size` - 1
    world_size: int  # runtimes of the group, one per GPU
    host: str  # address on which rank 0 listens
    port: int  # its TCP port
    key: bytes  # the group's shared secret


class RankLink:
    """One connection between rank 0 and another rank; `rank` is the other end's."""

    def __init__(self, connection: "Connection[bytes, bytes]", rank: int) -> None:
        self.rank = rank
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; `receive` shows whether the other end is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message:
        """Return the next message; a RankLinkError if the connection has ended, or the data is not a message."""
        try:
            message = json_of(self._connection.recv_bytes(LARGEST_MESSAGE_BYTES))
        except (OSError, EOFError) as error:
            raise RankLinkError(f"the connection to rank {self.rank} ended") from error
        except ValueError as error:
            raise RankLinkError(f"rank {self.rank} sent invalid JSON") from error
        if not isinstance(message, dict) or not all(isinstance(value, list) for value in message.values()):
            raise RankLinkError(f"rank {self.rank} sent an invalid message")
        return message


class Listener:
    """Rank 0's side: takes one connection of each other rank, and then no more; an OSError if it cannot listen.

    `on_link` is called in the connection's own thread, and may block.
    """

    def __init__(self, place: Place, on_link: Callable[[RankLink], None]) -> None:
        self._place = place
        self._on_link = on_link
        self._expected = set(range(1, place.world_size))
        self._lock = threading.Lock()
        self._newcomers = Newcomers(_MOST_HANDSHAKES + place.world_size)
        self._refused = 0
        self._socket = socket.create_server((place.host, place.port), backlog=64)
        self._socket.settimeout(_LOOK_S)
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while self._expected:
            try:
                raw, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._newcomers.add(raw)
            try:
                threading.Thread(target=self._greet, args=(raw, address[0]), name="rank-link", daemon=True).start()
            except RuntimeError:  # no thread is left now; a rank tries again
                self._newcomers.take(raw)
                raw.close()
        self.close()

    def _greet(self, raw: socket.socket, address: str) -> None:
        with raw:
            try:
                link = RankLink(*self._admit(raw))
            except (OSError, RankLinkError) as error:
                self._newcomers.take(raw)
                self._note_refused(address, error)
                return
        self._on_link(link)

    def _admit(self, raw: socket.socket) -> tuple["Connection[bytes, bytes]", int]:
        _set_timeout(raw, HANDSHAKE_TIMEOUT_S)
        mine = secrets.token_bytes(_CHALLENGE_BYTES)
        raw.sendall(mine)
        rank, theirs, proof = _HELLO.unpack(_exactly(raw, _HELLO.size))
        if not hmac.compare_digest(_proof(self._place.key, "follower", rank, mine, theirs), proof):
            raise RankLinkError("it does not know the group's key")
        if not self._newcomers.take(raw):
            raise RankLinkError("it was ended for a newer one")
        with self._lock:
            if rank not in self._expected:
                raise RankLinkError(f"rank {rank} is connected already, or there is no such rank")
            self._expected.discard(rank)
        raw.sendall(_proof(self._place.key, "leader", rank, mine, theirs))
        return _connection(raw), rank

    def _note_refused(self, address: str, error: Exception) -> None:
        """Log the first, second, fourth, eighth, …: strangers must not fill the log."""
        with self._lock:
            self._refused += 1
            count = self._refused
        if not count & (count - 1):
            logger.warning("%d connections were refused, the last from %s: %s", count, address, error)


def connect(place: Place, timeout_s: float, clock: Clock = MACHINE_CLOCK) -> RankLink:
    """Connect to rank 0, which may start later; a RankLinkError if it does not, or does not know the group's key."""
    deadline_s = clock() + timeout_s
    while True:
        try:
            return _connect_once(place)
        except (OSError, RankLinkError) as error:
            if clock() >= deadline_s:
                raise RankLinkError(
                    f"rank {place.rank} could not reach rank 0 at {place.host}:{place.port} within {timeout_s:g} s "
                    f"({error}); the nodes must reach each other on that port"
                ) from error
        clock.sleep(RETRY_S)


def _connect_once(place: Place) -> RankLink:
    with socket.create_connection((place.host, place.port), HANDSHAKE_TIMEOUT_S) as raw:
        _set_timeout(raw, HANDSHAKE_TIMEOUT_S)
        theirs = _exactly(raw, _CHALLENGE_BYTES)
        mine = secrets.token_bytes(_CHALLENGE_BYTES)
        raw.sendall(_HELLO.pack(place.rank, mine, _proof(place.key, "follower", place.rank, theirs, mine)))
        proof = _exactly(raw, _PROOF_BYTES)
        if not hmac.compare_digest(_proof(place.key, "leader", place.rank, theirs, mine), proof):
            raise RankLinkError("the process that listens there does not know the group's key")
        return RankLink(_connection(raw), 0)


def _exactly(raw: socket.socket, count: int) -> bytes:
    """Return the next bytes, read in one call, so that the kernel's time limit holds for all of them together."""
    try:
        data = raw.recv(count, socket.MSG_WAITALL)
    except BlockingIOError:
        data = b""
    if len(data) < count:
        raise RankLinkError("it ended, or did not say in time who it is")
    return data


def _proof(key: bytes, role: str, rank: int, leaders: bytes, followers: bytes) -> bytes:
    text = b"|".join((b"muri", role.encode(), str(rank).encode(), leaders.hex().encode(), followers.hex().encode()))
    return hmac.digest(key, text, "sha256")


def _connection(raw: socket.socket) -> "Connection[bytes, bytes]":
    # Grants are small and urgent: each must leave at once.
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:  # a node that lost power does not close its connections
        raw.setsockopt(socket.IPPROTO_TCP, option, value)
    _set_timeout(raw, 0.0)
    return Connection(raw.detach())


def _set_timeout(raw: socket.socket, seconds: float) -> None:
    """Let the kernel end each call after so many seconds; 0: never."""
    raw.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
