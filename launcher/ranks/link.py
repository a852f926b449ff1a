"""Authenticated connections between the runtimes of one group: rank 0 listens, the other ranks connect.

A cluster is shared, so a process that connects has to prove that it knows the group's key, and so has rank 0:
both sides answer the other's random challenge with an HMAC (SHA-256) over both challenges and the rank. The key
travels in the environment of the pilot job's step, which only its user (and root) can read. Messages that follow
are JSON in the framing of `multiprocessing.connection`, never pickle; they are not encrypted.
"""

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError

logger = logging.getLogger("muri.launcher")

LARGEST_MESSAGE_BYTES: Final = 4096
HANDSHAKE_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 0.1
_MOST_HANDSHAKES: Final = 16
_CHALLENGE_BYTES: Final = 32
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

Message = dict[str, list[str | int]]


class RankLinkError(MuriError):
    """The runtimes of a group cannot speak with each other."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one runtime stands in its group.

    Attributes:
        rank: Its number, 0 to `world_size` - 1.
        world_size: Runtimes of the group, one per GPU.
        host: Address on which rank 0 listens.
        port: Its TCP port.
        key: The group's shared secret.
    """

    rank: int
    world_size: int
    host: str
    port: int
    key: bytes


class RankLink:
    """One connection between rank 0 and another rank.

    Attributes:
        rank: The other end's rank.
    """

    def __init__(self, connection: "Connection[bytes, bytes]", rank: int) -> None:
        self.rank = rank
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; `receive` shows whether the other end is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message:
        """The next message.

        Raises:
            RankLinkError: The connection ended, or what came is no message.
        """
        try:
            message = json.loads(self._connection.recv_bytes(LARGEST_MESSAGE_BYTES))
        except (OSError, EOFError) as error:
            raise RankLinkError(f"the connection to rank {self.rank} ended") from error
        except ValueError as error:
            raise RankLinkError(f"rank {self.rank} sent what is no JSON") from error
        if not isinstance(message, dict) or not all(isinstance(value, list) for value in message.values()):
            raise RankLinkError(f"rank {self.rank} sent what is no message")
        return message

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):  # wakes a thread that receives; closing alone would not
            raw = socket.socket(fileno=self._connection.fileno())
            try:
                raw.shutdown(socket.SHUT_RDWR)
            finally:
                raw.detach()


class Listener:
    """Rank 0's side: takes one connection of each other rank.

    Args:
        place: Where to listen, and the key.
        on_link: Called in the connection's own thread; may block for as long as it likes.

    Raises:
        OSError: The port is taken or the address is not this machine's.
    """

    def __init__(self, place: Place, on_link: Callable[[RankLink], None]) -> None:
        self._place = place
        self._on_link = on_link
        self._expected = set(range(1, place.world_size))
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_MOST_HANDSHAKES + place.world_size)
        self._socket = socket.create_server((place.host, place.port), backlog=64)
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, address = self._socket.accept()
            except OSError:
                return
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(raw, address[0]), name="rank-link", daemon=True).start()
            else:
                raw.close()

    def _greet(self, raw: socket.socket, address: str) -> None:
        try:
            _set_timeout(raw, HANDSHAKE_TIMEOUT_S)
            connection = _connection(raw)
            with _closed_on_error(connection):
                rank = self._admit(connection)
                _set_timeout_of(connection, 0.0)
        except (OSError, EOFError, ValueError, RankLinkError) as error:
            logger.warning("a connection from %s was refused: %s", address, error or type(error).__name__)
        else:
            self._on_link(RankLink(connection, rank))
        finally:
            self._slots.release()

    def _admit(self, connection: "Connection[bytes, bytes]") -> int:
        mine = secrets.token_bytes(_CHALLENGE_BYTES)
        connection.send_bytes(mine)
        answer = json.loads(connection.recv_bytes(LARGEST_MESSAGE_BYTES))
        if not isinstance(answer, dict) or not isinstance(answer.get("rank"), int):
            raise RankLinkError("it speaks another protocol")
        rank: int = answer["rank"]
        theirs = bytes.fromhex(str(answer.get("challenge", "")))
        if not hmac.compare_digest(_proof(self._place.key, "follower", rank, mine, theirs), str(answer.get("proof"))):
            raise RankLinkError("it does not know the group's key")
        with self._lock:
            if rank not in self._expected:
                raise RankLinkError(f"rank {rank} is connected already, or there is no such rank")
            self._expected.discard(rank)
        connection.send_bytes(_proof(self._place.key, "leader", rank, mine, theirs).encode())
        return rank


def connect(place: Place, timeout_s: float, clock: Clock = MACHINE_CLOCK) -> RankLink:
    """Connect to rank 0, which may start later than this rank.

    Raises:
        RankLinkError: Rank 0 could not be reached in time, or does not know the group's key.
    """
    deadline_s = clock() + timeout_s
    while True:
        try:
            return _connect_once(place)
        except (OSError, EOFError, RankLinkError) as error:
            if clock() >= deadline_s:
                raise RankLinkError(
                    f"rank {place.rank} could not reach rank 0 at {place.host}:{place.port} within {timeout_s:g} s "
                    f"({error or 'it closed the connection'}); the nodes must reach each other on that port"
                ) from error
        clock.sleep(RETRY_S)


def _connect_once(place: Place) -> RankLink:
    raw = socket.create_connection((place.host, place.port), HANDSHAKE_TIMEOUT_S)
    _set_timeout(raw, HANDSHAKE_TIMEOUT_S)
    connection = _connection(raw)
    with _closed_on_error(connection):
        theirs = connection.recv_bytes(LARGEST_MESSAGE_BYTES)
        mine = secrets.token_bytes(_CHALLENGE_BYTES)
        proof = _proof(place.key, "follower", place.rank, theirs, mine)
        answer = {"rank": place.rank, "challenge": mine.hex(), "proof": proof}
        connection.send_bytes(json.dumps(answer).encode())
        told = connection.recv_bytes(LARGEST_MESSAGE_BYTES)
        if not hmac.compare_digest(_proof(place.key, "leader", place.rank, theirs, mine).encode(), told):
            raise RankLinkError("the process that listens there does not know the group's key")
        _set_timeout_of(connection, 0.0)
    return RankLink(connection, 0)


@contextmanager
def _closed_on_error(connection: "Connection[bytes, bytes]") -> Iterator[None]:
    """Close a connection that does not become a link, so that the other end notices at once."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _proof(key: bytes, role: str, rank: int, leaders: bytes, followers: bytes) -> str:
    text = b"|".join((b"muri", role.encode(), str(rank).encode(), leaders.hex().encode(), followers.hex().encode()))
    return hmac.digest(key, text, "sha256").hex()


def _connection(raw: socket.socket) -> "Connection[bytes, bytes]":
    # Grants are small and urgent: each must leave at once.
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:  # a node that lost power does not close its connections
        raw.setsockopt(socket.IPPROTO_TCP, option, value)
    raw.settimeout(None)
    return Connection(raw.detach())


def _set_timeout(raw: socket.socket, seconds: float) -> None:
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _set_timeout_of(connection: "Connection[bytes, bytes]", seconds: float) -> None:
    raw = socket.socket(fileno=connection.fileno())
    _set_timeout(raw, seconds)
    raw.detach()
