"""The gate of a member that has a process of its own: asks the runtime's arbiter over a socket.

The runtime starts the process with one end of a socket pair and a page of shared memory
(`wire.py`). Each thread of the script that is gated speaks over a channel of its own, so a
prefetch thread that waits does not keep the training thread waiting.

To measure what a switch between two processes costs, use
`muri.launcher.processes.switch_cost.measure_switches_s(count)`: it runs two members' processes through
all of this and returns the seconds from one's release to the other's grant.
"""

import contextlib
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from muri.launcher.clock import IterationRecord
from muri.launcher.processes import wire
from muri.launcher.processes.wire import GateAddress

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class ProcessGate:
    """Grants stages by asking the runtime; opens for good when the runtime is gone.

    Args:
        main: The inherited end of the socket pair.
        page: The shared page.
        traced: Whether the runtime wants to hear of every interval.
    """

    def __init__(self, main: socket.socket, page: mmap.mmap, *, traced: bool = False) -> None:
        self.traced: Final = traced
        self._main = main
        self._page = page
        self._local = threading.local()
        self._lost = False
        self.takes_turns: Final = not page[wire.NO_TURNS_INDEX]

    def acquire(self, stage: int) -> float:
        """Wait for the stage's resource; the way to the runtime and back counts as waiting."""
        if not self.takes_turns:
            return 0.0
        start_s = time.perf_counter()
        self._ask(wire.ACQUIRE, stage)
        return time.perf_counter() - start_s

    def release(self, stage: int) -> None:
        """Pass the resource on, without waiting for an answer."""
        if self.takes_turns:
            self._tell(wire.STAGE_MESSAGE.pack(wire.RELEASE, stage))

    def yield_point(self, stage: int) -> float:
        """Ask whether somebody else should go first, only if somebody waits."""
        if not self._page[stage]:
            return 0.0
        start_s = time.perf_counter()
        handed_over = self._ask(wire.YIELD, stage) > 0
        return time.perf_counter() - start_s if handed_over else 0.0

    def iteration_done(self, record: IterationRecord) -> None:
        """Tell the arbiter."""
        self._tell(wire.pack_iteration(record))

    def interval(self, stage: int, start_s: float, end_s: float, wait_s: float) -> None:
        """Tell the runtime's trace; both sides read the same monotonic clock."""
        self._tell(wire.INTERVAL_MESSAGE.pack(wire.INTERVAL, stage, start_s, end_s, wait_s))

    def _channel(self) -> socket.socket:
        channel: socket.socket | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = self._open_channel()
        return channel

    def _open_channel(self) -> socket.socket:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._main, [bytes([wire.CHANNEL])], [theirs.fileno()])
        return own

    def _tell(self, message: bytes) -> None:
        """Send a message, whatever a signal handler of the script raises meanwhile: that comes after it."""
        raised: BaseException | None = None
        sent: list[int] = []
        while not sent and not self._lost:
            try:
                _call(self._channel().send, message, sent)
            except OSError:
                self._lost = True
            except BaseException as error:  # kept until the message is on its way
                raised = error
        if raised is not None:
            raise raised

    def _ask(self, kind: int, stage: int) -> float:
        """Send a request and wait for its answer: the seconds that the arbiter let wait.

        A signal handler of the script may raise at any time. Once the request stands at the runtime its answer is
        waited for, what it grants goes back, and then the script has its exception.
        """
        message = wire.STAGE_MESSAGE.pack(kind, stage)
        raised: BaseException | None = None
        sent: list[int] = []
        answers: list[bytes] = []
        while not answers and not self._lost:
            try:
                if not sent:
                    _call(self._channel().send, message, sent)
                _call(self._channel().recv, wire.LARGEST_MESSAGE_BYTES, answers)
            except OSError:
                self._lost = True
            except BaseException as error:  # kept until the answer is there
                if not sent:
                    raise
                raised = error
        answer = answers[0] if answers else b""
        self._lost |= not answer  # the runtime closed the connection
        if raised is not None:
            if kind == wire.ACQUIRE and answer[:1] == bytes([wire.GRANTED]):
                self.release(stage)
            raise raised
        return self._waited_s(answer)

    def _waited_s(self, answer: bytes) -> float:
        if not answer:
            return 0.0
        kind, waited_s = wire.ANSWER.unpack(answer)
        if kind == wire.INTERRUPTED:
            raise SystemExit(128 + signal.SIGTERM)
        return float(waited_s)


def is_gated(environment: Mapping[str, str]) -> bool:
    """Whether this process is a member's own (and not only a child of one), so that its stages are granted."""
    return _own_address(environment) is not None


def _call(function: Callable[[Argument], Result], argument: Argument, results: list[Result]) -> None:
    """Append what a function returns, even if a signal handler raises right after: Python runs it between two steps."""
    results.extend(map(function, (argument,)))


def gate_from_environment(environment: Mapping[str, str]) -> ProcessGate | None:
    """The gate of this process; None when it is no member's own process (or only a child of one)."""
    address = _own_address(environment)
    if address is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        main = socket.socket(fileno=address.socket_fd)
        main.set_inheritable(False)
        page = mmap.mmap(address.page_fd, wire.PAGE_BYTES, prot=mmap.PROT_READ)
        os.close(address.page_fd)
        return ProcessGate(main, page, traced=address.traced)
    return None


def _own_address(environment: Mapping[str, str]) -> GateAddress | None:
    address = GateAddress.parse(environment.get(wire.VARIABLE, ""))
    return address if address is not None and address.pid == os.getpid() else None
