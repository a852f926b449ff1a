"""Frames between `muri run` and the runtime: a version byte, a length, and JSON.

The member's standard input, output and error travel once, as open file descriptors beside the
first frame. The member then writes to the very files that its job has, so nothing is copied,
nothing is re-ordered and subprocesses can inherit them.
"""

import array
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muri.errors import MuriError

VERSION: Final = 1
ISOLATION_VARIABLE: Final = "MURI_ISOLATION"
"""In a member's environment: "thread" or "process", whatever the site's default is."""

LARGEST_FRAME_BYTES: Final = 64 * 1024 * 1024
_HEADER: Final = struct.Struct("!BI")
_CREDENTIALS: Final = struct.Struct("3i")

Frame = dict[str, Any]


class ProtocolError(MuriError):
    """The other side speaks another protocol, or is another user."""


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """What a member hands over to run in the runtime.

    Attributes:
        job_id: The member's Slurm job id.
        target: Path of the script, or name of the module.
        module: Whether `target` is a module.
        arguments: What follows the script.
        cwd: Working directory.
        environment: The member's environment.
        umask: File mode creation mask.
        prefix: sys.prefix of the member's Python.
        python: sys.version of the member's Python.
    """

    job_id: str
    target: str
    module: bool
    arguments: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    umask: int
    prefix: str
    python: str

    def to_frame(self) -> Frame:
        """The frame that carries it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"type": "attach", "environment": dict(self.environment)}

    @classmethod
    def from_frame(cls, frame: Frame) -> "AttachRequest":
        """Read it back.

        Raises:
            ProtocolError: A field is missing.
        """
        try:
            fields = {name: frame[name] for name in cls.__dataclass_fields__}
        except KeyError as error:
            raise ProtocolError(f"the attach request lacks {error}") from error
        return cls(**fields | {"arguments": tuple(fields["arguments"])})


def encode(frame: Frame) -> bytes:
    """The bytes of one frame."""
    body = json.dumps(frame).encode()
    if len(body) > LARGEST_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is larger than {LARGEST_FRAME_BYTES}")
    return _HEADER.pack(VERSION, len(body)) + body


def send(connection: socket.socket, frame: Frame) -> None:
    """Send one frame."""
    connection.sendall(encode(frame))


def send_with_files(connection: socket.socket, frame: Frame, files: Sequence[int]) -> None:
    """Send one frame with open file descriptors beside it."""
    data = encode(frame)
    sent = socket.send_fds(connection, [data], list(files))
    if sent < len(data):  # sending nothing fails as well once the other side has answered and closed
        connection.sendall(data[sent:])


def receive(connection: socket.socket) -> Frame | None:
    """The next frame, None when the other side has closed.

    Raises:
        ProtocolError: What came is not a frame of this version.
    """
    header = _receive_exactly(connection, _HEADER.size)
    return None if header is None else _receive_body(connection, header)


def receive_with_files(connection: socket.socket, file_count: int) -> tuple[Frame, list[int]] | None:
    """The first frame and the file descriptors beside it, None when the other side has closed.

    Raises:
        ProtocolError: What came is not a frame of this version with that many files.
    """
    space = socket.CMSG_SPACE(file_count * array.array("i").itemsize)
    start, ancillary, _, _ = connection.recvmsg(_HEADER.size, space, socket.MSG_CMSG_CLOEXEC)
    if not start:
        return None
    files = _files_of(ancillary)
    try:
        return _finish_first_frame(connection, start, len(files) - file_count), files
    except (ProtocolError, OSError):
        for file in files:
            os.close(file)
        raise


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def require_same_user(connection: socket.socket) -> None:
    """Refuse to speak with another user's process.

    Raises:
        ProtocolError: The other end belongs to another user.
    """
    uid = peer_uid(connection)
    if uid != os.geteuid():
        raise ProtocolError(f"the process at the other end belongs to user id {uid}, not to {os.geteuid()}")


def _files_of(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return list(files)


def _finish_first_frame(connection: socket.socket, start: bytes, surplus: int) -> Frame:
    if surplus:
        raise ProtocolError(
            f"the first frame came with {abs(surplus)} open files too {'many' if surplus > 0 else 'few'}"
        )
    rest = _receive_exactly(connection, _HEADER.size - len(start)) if len(start) < _HEADER.size else b""
    if rest is None:
        raise ProtocolError("the connection ended within a frame")
    return _receive_body(connection, start + rest)


def _receive_body(connection: socket.socket, header: bytes) -> Frame:
    version, length = _HEADER.unpack(header)
    if version != VERSION:
        raise ProtocolError(f"the other side speaks version {version} of the protocol, this Muri speaks {VERSION}")
    if length > LARGEST_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes was announced; the most is {LARGEST_FRAME_BYTES}")
    body = _receive_exactly(connection, length)
    if body is None:
        raise ProtocolError("the connection ended within a frame")
    try:
        frame = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a frame is not JSON: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise ProtocolError("a frame has no type")
    return frame


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            if parts:
                raise ProtocolError("the connection ended within a frame")
            return None
        parts += part
    return bytes(parts)
