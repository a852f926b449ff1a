"""Gates of members' processes, within the test's own process, and the runtime's end of them."""

import mmap
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.job.stage_clock import IterationRecord
from muri.launcher.process_gate import PAGE_BYTES, ProcessGate
from muri.launcher.sessions.process_session import Channels, share_waiting_hint


class Gates:
    """Gates over real socket pairs, served by channels as the runtime would, and the page that they share.

    Attributes:
        arbiter: Grants their requests.
        page: Tells them who waits.
        records: Each member's iterations, as the runtime hears of them.
        sockets: The members' ends.
    """

    def __init__(self, arbiter: Arbiter, page: mmap.mmap) -> None:
        self.arbiter, self.page = arbiter, page
        self.records: defaultdict[str, list[IterationRecord]] = defaultdict(list)
        self.sockets: list[socket.socket] = []

    def open(self, member: str) -> ProcessGate:
        """A gate of a member, which need not have joined."""
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets.append(own)
        Channels(member, self.arbiter, self.records[member].append, None, Mock()).open(theirs)
        return ProcessGate(own, self.page)

    def holder(self, stage: int) -> str | None:
        """Who has a stage's resource."""
        return self.arbiter.holders()[stage]


@contextmanager
def gates_of(arbiter: Arbiter) -> Iterator[Gates]:
    """The gates of an arbiter's members."""
    page_fd = share_waiting_hint(arbiter)
    gates = Gates(arbiter, mmap.mmap(page_fd, PAGE_BYTES, prot=mmap.PROT_READ))
    try:
        yield gates
    finally:
        for own in gates.sockets:
            own.close()
        os.close(page_fd)
