"""What a member's process and the runtime's arbiter say to each other, and the page that they share.

Every message is one packet of a SOCK_SEQPACKET pair, so it arrives whole. Only `ACQUIRE` and
`YIELD` are answered; a release or a finished iteration is told and not waited for. The shared page
holds one byte per resource, set while anybody waits for it: a yield point that finds it zero costs
no message at all. One more byte tells that members take no turns, and then no resource is asked for.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final

from muri.launcher.clock import STAGE_COUNT, IterationRecord

VARIABLE: Final = "MURI_GATE"
"""Tells a member's process its inherited descriptors; see `GateAddress`."""

ACQUIRE: Final = b"A"[0]
RELEASE: Final = b"R"[0]
YIELD: Final = b"Y"[0]
ITERATION: Final = b"D"[0]
INTERVAL: Final = b"T"[0]
CHANNEL: Final = b"L"[0]
"""Comes with an open socket: another thread of the member speaks over that."""

GRANTED: Final = b"G"[0]
INTERRUPTED: Final = b"I"[0]

STAGE_MESSAGE: Final = struct.Struct("=BB")
ANSWER: Final = struct.Struct("=Bd")
INTERVAL_MESSAGE: Final = struct.Struct("=BBddd")
_ITERATION_MESSAGE: Final = struct.Struct(f"=B{1 + 2 * STAGE_COUNT}d")
LARGEST_MESSAGE_BYTES: Final = 256
PAGE_BYTES: Final = mmap.PAGESIZE
NO_TURNS_INDEX: Final = STAGE_COUNT
"""Byte of the page that is 1 where members share plainly."""


@dataclass(frozen=True, slots=True)
class GateAddress:
    """Where a member's process finds the arbiter.

    Attributes:
        pid: The process that it is meant for. Children inherit the variable, not the right to it.
        socket_fd: Inherited descriptor of the socket.
        page_fd: Inherited descriptor of the shared page.
        traced: Whether the runtime wants to hear of every interval.
    """

    pid: int
    socket_fd: int
    page_fd: int
    traced: bool

    @classmethod
    def parse(cls, text: str) -> "GateAddress | None":
        """Read the variable's text; None when it is not of this form."""
        parts = text.split(":")
        if len(parts) != len(cls.__dataclass_fields__) or not all(part.isdecimal() for part in parts):
            return None
        pid, socket_fd, page_fd, traced = map(int, parts)
        return cls(pid, socket_fd, page_fd, bool(traced))


def pack_iteration(record: IterationRecord) -> bytes:
    """The message that tells of a finished iteration."""
    return _ITERATION_MESSAGE.pack(ITERATION, record.iteration_s, *record.stage_s, *record.wait_s)


def unpack_iteration(message: bytes) -> IterationRecord:
    """Read it back.

    Raises:
        struct.error: It has another length.
    """
    _, iteration_s, *times_s = _ITERATION_MESSAGE.unpack(message)
    return IterationRecord(iteration_s, tuple(times_s[:STAGE_COUNT]), tuple(times_s[STAGE_COUNT:]))


def make_page() -> tuple[int, mmap.mmap]:
    """A zeroed page that processes can share, and its file descriptor (close-on-exec)."""
    file = os.memfd_create("muri-waiting")
    os.ftruncate(file, PAGE_BYTES)
    return file, mmap.mmap(file, PAGE_BYTES)
