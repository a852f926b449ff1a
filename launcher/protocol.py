"""How `muri run` attaches to the runtime: where it finds the socket, and the frames that they exchange.

A frame is a version byte, a length, and JSON. The first one brings the member's standard input, output and error as
open file descriptors: a thread of the runtime then writes to the very files that its job has. Any other script is sent
home: `muri run` becomes it, with a gate to the runtime.
"""

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from muri.clock import MIB
from muri.errors import MuriError
from muri.files import RUN_DIR_VARIABLE, RendezvousError
from muri.text import json_of

VERSION: Final = 1
PILOT_VARIABLE: Final = "MURI_PILOT"
"""Names the pilot job of a member's group. The SPANK plugin sets it when it lets the member use that job's GPUs."""

NO_JOB: Final = "0"
"""Stands for the pilot job of a runtime outside of Slurm."""

HOME: Final = "home"
"""The type of the frame that lets a member's process become the script itself. Beside it come the gate's socket and the
shared page (`process_gate`)."""

ISOLATION_VARIABLE: Final = "MURI_ISOLATION"
"""In a member's environment: "thread" or "process", whatever the site's default is."""

LARGEST_FRAME_BYTES: Final = 64 * MIB
_HEADER: Final = struct.Struct("!BI")
_CREDENTIALS: Final = struct.Struct("3i")

LONGEST_SOCKET_PATH: Final = 107
"""The kernel's limit for the path of a Unix socket, in bytes."""

RUNTIMES: Final = "pilot-*.sock"
"""The sockets on which runtimes listen, in a run directory."""

Frame = dict[str, Any]


class ProtocolError(MuriError):
    """The other side speaks another protocol, or is another user."""


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """A member's request for a place in its group: its script, and all that a thread needs to run that."""

    job_id: str
    target: (
        str  # path of the script, name of the module, "-c" (the code is the first argument), or "-" (standard input)
    )
    module: bool  # whether `target` is a module
    arguments: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    umask: int
    executable: str  # the member's Python, absolute
    prefix: str  # its sys.prefix
    python: str  # its sys.version
    blocked: tuple[int, ...] = ()  # signals that it was started with as blocked
    ignored: tuple[int, ...] = ()
    options: tuple[str, ...] = ()  # Python's own options before the script

    def to_frame(self) -> Frame:
        """Return the frame that carries the request."""
        return asdict(self) | {"type": "attach"}

    @classmethod
    def from_frame(cls, frame: Frame) -> "AttachRequest":
        """Read the request from a frame; a ProtocolError if a field is missing or malformed."""
        values = {name: frame[name] for name in cls.__dataclass_fields__ if name in frame}
        try:
            signals = {name: tuple(map(int, frame.get(name, ()))) for name in ("blocked", "ignored")}
            words = {name: tuple(frame.get(name, ())) for name in ("arguments", "options")}
            return cls(**values | signals | words)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"the attach request lacks fields: {error}") from error


def encode(frame: Frame) -> bytes:
    """Return the bytes of one frame."""
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
    """Return the next frame, None when the other side has closed; see `receive_with_files`."""
    answer = receive_with_files(connection, 0)
    return None if answer is None else answer[0]


def receive_with_files(
    connection: socket.socket, file_count: int, *, maybe_none: bool = False
) -> tuple[Frame, list[int]] | None:
    """Return the next frame and the file descriptors beside it, None when the other side has closed.

    Raises:
        ProtocolError: The data is not a frame of this version with that many files, or none if it `maybe_none`.
    """
    space = socket.CMSG_SPACE(file_count * array.array("i").itemsize)
    start, ancillary, _, _ = connection.recvmsg(_HEADER.size, space, socket.MSG_CMSG_CLOEXEC)
    if not start:
        return None
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    try:
        surplus = 0 if maybe_none and not files else len(files) - file_count
        return _receive_frame(connection, start, surplus), list(files)
    except (ProtocolError, OSError):
        for file in files:
            os.close(file)
        raise


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the ids of the process at the other end, 0 if it cannot be seen from here, and of its user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def require_same_user(connection: socket.socket) -> None:
    """Raise a ProtocolError if the process at the other end belongs to another user."""
    uid = peer_of(connection)[1]
    if uid != os.geteuid():
        raise ProtocolError(f"the process at the other end belongs to user id {uid}, not to {os.geteuid()}")


def _receive_frame(connection: socket.socket, start: bytes, surplus: int) -> Frame:
    if surplus:
        raise ProtocolError(f"a frame came with {abs(surplus)} open files too {'many' if surplus > 0 else 'few'}")
    version, length = _HEADER.unpack(start + _receive_exactly(connection, _HEADER.size - len(start)))
    if version != VERSION:
        raise ProtocolError(f"the other side speaks version {version} of the protocol, this Muri speaks {VERSION}")
    if length > LARGEST_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes was announced; the most is {LARGEST_FRAME_BYTES}")
    try:
        frame = json_of(_receive_exactly(connection, length))
    except ValueError as error:
        raise ProtocolError(f"a frame is not JSON: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise ProtocolError("a frame has no type")
    return frame


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ProtocolError("the connection ended within a frame")
        parts += part
    return bytes(parts)


def pilot_socket(run_dir: Path, pilot_job: str, rank: int | None = None) -> Path:
    """Return the socket on which the runtime of a pilot job listens; with a rank in a group of several ranks."""
    return run_dir / (f"pilot-{pilot_job}.sock" if rank is None else f"pilot-{pilot_job}.r{rank}.sock")


def require_short(path: Path) -> None:
    """Raise a RendezvousError if a socket path is longer than the kernel takes."""
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise RendezvousError(
            f"the socket path {path} is longer than {LONGEST_SOCKET_PATH} bytes; set {RUN_DIR_VARIABLE} to a "
            "shorter directory"
        )


def connect(path: Path) -> socket.socket | None:
    """Connect to a runtime's socket; None when no process listens there, a RendezvousError for other failures."""
    require_short(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise RendezvousError(f"cannot connect to {path}: {error.strerror}") from error
    return connection


def remove_stale_sockets(run_dir: Path) -> None:
    """Remove the names that dead runtimes have left behind."""
    for path in sorted(run_dir.glob("*.sock")):
        probe = connect(path)
        if probe is None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        else:
            probe.close()
