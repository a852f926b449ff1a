"""The protocol between a member's process and the runtime's arbiter, and the process's side of it.

The runtime gives the process one end of a SOCK_SEQPACKET pair and a page of shared memory. Only `ACQUIRE`, `YIELD` and
`OUT_OF_MEMORY` are answered; the process does not wait after a release or a finished iteration. Where the runtime
closes a channel, the gate opens for good: the script goes on without turns. The page holds one byte per
resource, set while a yield point has to ask: a member waits for the resource, or has a minimum speed and the stage had
no yield point yet. One more byte tells that members take no turns, or that there is only one; then no resource is
asked for. It may change at any time: granted resources are given back all the same, and a stage that began without
turns asks at its next yield point. Each thread of the script that is gated has a channel of its own, so a prefetch
thread that waits does not keep the training thread waiting.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from muri.launcher.job.stage_clock import NO_TURNS, STAGE_COUNT, TURNS, TURNS_INDEX, Gate, IterationRecord
from muri.text import json_of

VARIABLE: Final = "MURI_GATE"
"""Tells a member's process its own number (children inherit the variable but must not use it), its inherited
descriptors of the socket and the shared page, and whether the runtime traces every interval, with colons between."""

ACQUIRE: Final = b"A"[0]
RELEASE: Final = b"R"[0]
YIELD: Final = b"Y"[0]
ITERATION: Final = b"D"[0]
INTERVAL: Final = b"T"[0]
FACTS: Final = b"F"[0]
CHANNEL: Final = b"L"[0]
"""Comes with an open socket: another thread of the member speaks over that."""

EXIT: Final = b"X"[0]
"""Comes with the exit code, right before a script's normal end."""

OUT_OF_MEMORY: Final = b"M"[0]
"""The script ends for lack of GPU memory; the answer is 1 where others have shared its GPU, else 0."""

STAGE_MESSAGE: Final = struct.Struct("=BB")
ANSWER: Final = struct.Struct("=d")
"""The seconds waited, or what the question says."""

EXIT_MESSAGE: Final = struct.Struct("=Bi")
INTERVAL_MESSAGE: Final = struct.Struct("=BBddd")
_ITERATION_MESSAGE: Final = struct.Struct(f"=B{1 + 2 * STAGE_COUNT}d")
LARGEST_MESSAGE_BYTES: Final = 1024
PAGE_BYTES: Final = mmap.PAGESIZE


def pack_iteration(record: IterationRecord) -> bytes:
    """Return the message about a finished iteration."""
    return _ITERATION_MESSAGE.pack(ITERATION, record.iteration_s, *record.stage_s, *record.wait_s)


def unpack_iteration(message: bytes) -> IterationRecord:
    """Read the message of `pack_iteration`.

    Raises:
        struct.error: It has another length.
        ValueError: A time is not a finite number.
    """
    _, iteration_s, *times_s = _ITERATION_MESSAGE.unpack(message)
    if not all(map(math.isfinite, (iteration_s, *times_s))):
        raise ValueError("an iteration's times must be finite")
    return IterationRecord(iteration_s, tuple(times_s[:STAGE_COUNT]), tuple(times_s[STAGE_COUNT:]))


def unpack_facts(message: bytes) -> dict[str, Any]:
    """Read the message of `ProcessGate.facts`.

    Raises:
        ValueError: It is not a JSON object with such facts.
    """
    facts = json_of(message[1:])
    if not isinstance(facts, dict) or not all(isinstance(facts.get(name, 0), int) for name in ("depth", "period")):
        raise ValueError("these are not facts of a script")
    return facts


def make_page() -> tuple[int, mmap.mmap]:
    """Return the close-on-exec descriptor of a zeroed page that processes can share, and the page."""
    file = os.memfd_create("muri-waiting")
    os.ftruncate(file, PAGE_BYTES)
    return file, mmap.mmap(file, PAGE_BYTES)


Argument = TypeVar("Argument")
Result = TypeVar("Result")


class ProcessGate(Gate):
    """Grants stages by asking the runtime; opens for good when the runtime is gone."""

    def __init__(self, main: socket.socket, page: mmap.mmap, *, traced: bool = False) -> None:
        self.traced: Final = traced
        self._main = main
        self._page = page
        self._local = threading.local()
        # As many entries as the member holds of each resource: one thread may give back what another one was granted.
        self._granted: Final[list[list[None]]] = [[] for _ in range(STAGE_COUNT)]
        self._lost = False

    @property
    def takes_turns(self) -> bool:
        """Return whether members wait for each other, or would if there were another one."""
        return self._page[TURNS_INDEX] != NO_TURNS

    @property
    def asks(self) -> bool:
        """Return whether members take turns now, and there is more than one."""
        return self._page[TURNS_INDEX] == TURNS

    def acquire(self, stage: int) -> float:
        """Wait for the stage's resource; the way to the runtime and back counts as waiting."""
        if not self.asks:
            return 0.0
        start_s = time.perf_counter()
        self._ask(ACQUIRE, stage)
        self._granted[stage].append(None)
        return time.perf_counter() - start_s

    def release(self, stage: int) -> None:
        """Pass the resource on, without waiting for an answer."""
        try:
            self._granted[stage].pop()
        except IndexError:  # the stage began without turns
            return
        self._tell(STAGE_MESSAGE.pack(RELEASE, stage))

    def yield_point(self, stage: int) -> float:
        """Ask whether another member should go first, only if one waits."""
        if not self._granted[stage]:
            return self.acquire(stage)
        if not self._page[stage]:
            return 0.0
        start_s = time.perf_counter()
        handed_over = self._ask(YIELD, stage) > 0
        return time.perf_counter() - start_s if handed_over else 0.0

    def iteration_done(self, record: IterationRecord) -> None:
        """Tell the arbiter."""
        self._tell(pack_iteration(record))

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Tell the runtime the facts that only this process knows of itself."""
        self._tell(bytes([FACTS]) + json.dumps(facts, separators=(",", ":")).encode())

    def exit(self, code: int) -> None:
        """Tell the runtime the exit code with which this process ends."""
        self._tell(EXIT_MESSAGE.pack(EXIT, code))

    def had_company(self) -> bool:
        """Tell the runtime that the script ends for lack of GPU memory; return whether others have shared its GPU."""
        return self._ask(OUT_OF_MEMORY, 0) > 0

    def interval(self, stage: int, start_s: float, end_s: float, wait_s: float) -> None:
        """Tell the runtime's trace; both sides read the same monotonic clock."""
        self._tell(INTERVAL_MESSAGE.pack(INTERVAL, stage, start_s, end_s, wait_s))

    def _channel(self) -> socket.socket:
        channel: socket.socket | None = getattr(self._local, "channel", None)
        if channel is None:
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                handle = array.array("i", [theirs.fileno()])
                self._main.sendmsg([bytes([CHANNEL])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handle)])
            self._local.channel = channel
        return channel

    def _tell(self, message: bytes) -> None:
        """Send a message; raise an exception of the script's signal handlers only afterwards."""
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
        """Send a request, wait for its answer, and return it: the seconds that the arbiter let wait; 0 without one.

        A signal handler of the script may raise at any time. Once the request is sent its answer is waited for, and a
        granted resource given back, before the script gets its exception.
        """
        message = STAGE_MESSAGE.pack(kind, stage)
        raised: BaseException | None = None
        sent: list[int] = []
        answers: list[bytes] = []
        while not answers and not self._lost:
            try:
                if not sent:
                    _call(self._channel().send, message, sent)
                _call(self._channel().recv, LARGEST_MESSAGE_BYTES, answers)
            except OSError:
                self._lost = True
            except BaseException as error:  # kept until the answer is there
                if not sent:
                    raise
                raised = error
        answer = answers[0] if answers else b""
        self._lost |= not answer  # the runtime closed the connection
        if raised is not None:
            if kind == ACQUIRE and answer:
                self._tell(STAGE_MESSAGE.pack(RELEASE, stage))
            raise raised
        return float(ANSWER.unpack(answer)[0]) if answer else 0.0


def is_gated(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a member's own (and not only a child of one), so that its stages are granted."""
    return _own_address(environment) is not None


def _call(function: Callable[[Argument], Result], argument: Argument, results: list[Result]) -> None:
    """Append a function's result, even if a signal handler raises right after: Python runs it between two steps."""
    results.extend(map(function, (argument,)))


_made: Final[dict[str, ProcessGate | None]] = {}
_making: Final = threading.Lock()
os.register_at_fork(after_in_child=_made.clear)


def gate_from_environment(environment: Mapping[str, str]) -> ProcessGate | None:
    """Return the one gate of this process; None when it is not a member's own process (or only a child of one)."""
    address = _own_address(environment)
    if address is None:
        return None
    with _making:  # two threads may mark their first stage at once
        text = environment[VARIABLE]
        if text not in _made:
            _made[text] = _make(*address)
        return _made[text]


def _make(socket_fd: int, page_fd: int, traced: int) -> ProcessGate | None:
    with contextlib.suppress(OSError, ValueError):
        # First: another program that has taken this process over may have files of its own under these numbers.
        page = mmap.mmap(page_fd, PAGE_BYTES, prot=mmap.PROT_READ)
        main = socket.socket(fileno=socket_fd)
        main.set_inheritable(False)
        os.close(page_fd)
        return ProcessGate(main, page, traced=bool(traced))
    return None


def gate_variables(socket_fd: int, page_fd: int, *, traced: bool) -> dict[str, str]:
    """Return the variable by which the program that this process becomes finds its gate, and keep both files open."""
    for file in (socket_fd, page_fd):
        os.set_inheritable(file, True)
    return {VARIABLE: f"{os.getpid()}:{socket_fd}:{page_fd}:{int(traced)}"}


def _own_address(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    parts = environment.get(VARIABLE, "").split(":")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        return None
    pid, socket_fd, page_fd, traced = map(int, parts)
    return (socket_fd, page_fd, traced) if pid == os.getpid() else None
