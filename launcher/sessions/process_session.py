"""One member's script in its own job, under the same arbiter as the sessions in threads.

Everything but the GPU's turns belongs to the member's job: its processes, its files, its end. The script's requests for
resources come over channels, one for each thread of the script (`process_gate`), and go to the arbiter; so does what
only the script knows of itself. Its end is the kernel's word (`peer_process`), or its main channel's where the process
cannot be seen.
"""

import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from muri.group_spec import MemberSpec
from muri.launcher import process_gate, protocol
from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.job.environment import descendants_of, threads_of
from muri.launcher.job.stage_clock import (
    NO_TURNS,
    STAGE_COUNT,
    TURNS,
    TURNS_INDEX,
    IntervalListener,
    IterationRecord,
    StageClock,
)
from muri.launcher.protocol import AttachRequest
from muri.launcher.sessions.peer_process import PeerProcess
from muri.launcher.sessions.setup import (
    CANCEL_GRACE_S,
    MemberSession,
    call_later,
    take_short_turns,
    write_notice,
)

logger = logging.getLogger("muri.launcher")

LAST_WORDS_S: Final = 5.0
"""How long reading the last messages of an ended process may take."""

_FILE: Final = struct.Struct("i")


class ProcessSession(MemberSession):
    """Watches one script that runs in its own job; see `MemberSession` for the attributes.

    The page tells yield points whether a member waits (`share_waiting_hint`). `had_company` tells whether another
    member has run beside a session; `on_interval` is called with every stage held.
    """

    isolation = "process"

    def __init__(
        self,
        request: AttachRequest,
        process: PeerProcess,
        arbiter: Arbiter,
        page_fd: int,
        had_company: Callable[[MemberSession], bool],
        on_interval: IntervalListener | None = None,
        spec: MemberSpec | None = None,
    ) -> None:
        # `fault` stays None, because an error in the process's own CUDA context ends no other member; `stopped_at`
        # stays None and `checkpointed` False, because a checkpoint is known to the process alone.
        super().__init__(request, arbiter, spec)
        self.clock = StageClock()  # never entered: filled from what the process tells
        self.ended = threading.Event()
        self.client_pid = process.pid
        self._process = process
        self._page_fd = page_fd
        self._had_company = had_company
        self._traced = on_interval is not None
        self._facts: dict[str, Any] | None = None
        self._told_code: int | None = None
        self._given_up = False
        self._over = False
        self._channels = Channels(self.member, arbiter, self._count, on_interval, self)

    def start(self, on_end: Callable[[MemberSession], None]) -> None:
        """Watch the script.

        Raises:
            OSError: No file is left for that; the session has ended.
            RuntimeError: No thread is left for that; the session has ended.
        """
        self._on_end = on_end
        self.join_arbiter()
        if self._process.pid:
            with contextlib.suppress(ProcessLookupError):
                take_short_turns(self._process.pid)
        try:
            own, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channels.open(own)
            threading.Thread(target=self._watch, name=f"process-{self.member}", daemon=True).start()
        except (OSError, RuntimeError):
            self._conclude(given_up=True)
            raise

    def hand_over(self, connection: socket.socket, variables: Mapping[str, str]) -> None:
        """Let the process become the script: answer it with the gate's socket, the page, and variables of the script.

        Raises:
            OSError: The process is gone.
        """
        frame = {"type": protocol.HOME, "traced": self._traced, "environment": dict(variables)}
        with self._theirs:
            protocol.send_with_files(connection, frame, (self._theirs.fileno(), self._page_fd))

    @property
    def lost(self) -> bool:
        """Whether the runtime's end came before the script's."""
        return self._given_up

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, even if that is still to be noted."""
        return self._over or self._process.has_ended

    def end(self, signum: int, grace_s: float = CANCEL_GRACE_S) -> None:
        """Send the script's process a signal, and kill it with all that it has started after the grace time."""
        family = list(self._process.family())
        self._process.send(signum)
        for each in (self._process, *family):
            each.send(signal.SIGCONT)  # a stopped process acts on the signal once it is continued
        call_later(grace_s, self._kill, family)

    def tell(self, text: str) -> None:
        """Write a line to the standard error of the script's process, as far as it can be seen."""
        try:
            file = self._process.error_output()  # now: the process may be about to be ended
        except OSError:
            return
        write_notice(file, text)

    def facts(self) -> Mapping[str, Any] | None:
        """What the script's process has told of itself."""
        return self._facts

    def working_threads(self) -> list[Path]:
        """The threads of the script's process and of its subprocesses."""
        pid = self.client_pid
        return [thread for each in (pid, *descendants_of(pid)) for thread in threads_of(each)] if pid else []

    def shut_down(self, grace_s: float) -> None:
        """The runtime ends: the script's gate opens for good, and its job goes on until Slurm ends it."""
        self._conclude(given_up=True)

    def note_facts(self, facts: dict[str, Any]) -> None:
        """Take what the process tells of itself."""
        self._facts = facts

    def note_exit(self, code: int) -> None:
        """Take the exit code with which the process is about to end."""
        self._told_code = code

    def note_out_of_memory(self) -> bool:
        """Take note that the script ends for lack of GPU memory; whether it has had company."""
        self.out_of_memory = True
        return self._had_company(self)

    def _count(self, record: IterationRecord) -> bool:
        clock = self.clock
        told = clock.count(record)
        for stage, (stage_s, wait_s) in enumerate(zip(record.stage_s, record.wait_s, strict=True)):
            clock.stage_s[stage] += stage_s
            clock.wait_s[stage] += wait_s
        for function in clock.at_boundary:
            function()
        return told

    def _kill(self, family: list[PeerProcess]) -> None:
        if not self.ended.is_set():
            logger.warning("the process of member %s did not end in time and is killed", self.member)
            family += self._process.family()
            for each in (self._process, *family):
                each.send(signal.SIGKILL)

    def _watch(self) -> None:
        if self._process.pid:
            self._process.wait()
        else:
            self._channels.main_closed.wait()
        self._conclude(given_up=False)

    def _conclude(self, *, given_up: bool) -> None:
        """Free the turns at once, take what was told until now, and report the end; nothing the second time."""
        with self._verdict:
            if self._over:
                return
            self._over = True
        self._given_up = given_up
        self._arbiter.leave(self.member)
        self._channels.close(LAST_WORDS_S)
        self.exit_code = None if given_up else self._told_code
        self.client_pid = 0
        if not given_up:  # the table keeps sessions that have ended
            self._process.close()
        self.ended.set()
        self._on_end(self)


def share_waiting_hint(arbiter: Arbiter) -> int:
    """Put the arbiter's `waiting_hint` where processes see it; returns the page's descriptor."""
    page_fd, arbiter.waiting_hint = process_gate.make_page()
    arbiter.waiting_hint[TURNS_INDEX] = TURNS if arbiter.takes_turns else NO_TURNS
    return page_fd


@dataclass(eq=False)
class Channels:
    """Serves all channels of one member's process, a thread for each."""

    member: str
    arbiter: Arbiter
    on_iteration: Callable[[IterationRecord], bool]  # whether the arbiter is to be told of it
    on_interval: IntervalListener | None  # called with each stage held; None for no calls
    listener: ProcessSession  # takes the messages of the process about itself
    main_closed: threading.Event = field(default_factory=threading.Event)  # the process has closed its first channel
    _served: list[tuple["_Channel", threading.Thread]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, main: socket.socket) -> None:
        """Serve the process's first socket in the background, and the channels that come over it."""
        self.serve(_MainChannel(self, main))

    def serve(self, served: "_Channel") -> None:
        """Serve a channel in the background until its other end closes."""
        thread = threading.Thread(target=served.serve, name=f"channel-{self.member}", daemon=True)
        with self._lock:
            thread.start()
            self._served = [*(each for each in self._served if each[1].is_alive()), (served, thread)]

    def close(self, limit_s: float) -> None:
        """Read all that the process has told, and close all channels, even if others hold their other ends."""
        end_s = time.monotonic() + limit_s
        for kind in (_MainChannel, _Channel):  # the main one first: over it come the others
            with self._lock:
                served = [each for each in self._served if isinstance(each[0], kind)]
            for channel, _ in served:
                channel.close()
            for _, thread in served:
                thread.join(max(0.0, end_s - time.monotonic()))


class _Channel:
    """The requests of one thread of the script, and the turns that it holds."""

    def __init__(self, owner: Channels, channel: socket.socket) -> None:
        self._owner = owner
        self._socket = channel
        self._held: set[int] = set()
        self._handlers: dict[int, Callable[[bytes], None]] = {
            process_gate.ACQUIRE: self._acquire,
            process_gate.YIELD: self._yield,
            process_gate.RELEASE: self._release,
            process_gate.ITERATION: self._iteration,
            process_gate.INTERVAL: self._interval,
            process_gate.FACTS: lambda message: owner.listener.note_facts(process_gate.unpack_facts(message)),
            process_gate.EXIT: lambda message: owner.listener.note_exit(process_gate.EXIT_MESSAGE.unpack(message)[1]),
            process_gate.OUT_OF_MEMORY: lambda _message: self._answer(float(owner.listener.note_out_of_memory())),
            process_gate.CHANNEL: lambda _message: None,  # the descriptor that came with it is open already
        }

    def serve(self) -> None:
        try:
            with self._socket, contextlib.suppress(ConnectionError, WaitInterruptedError):
                while self._serve_one():
                    pass
        except (KeyError, OSError, struct.error, ValueError) as error:
            logger.warning("member %s: its process sent what is not understood (%r)", self._owner.member, error)
        finally:  # a thread of the script may end within a stage
            for stage in self._held:
                self._owner.arbiter.release(self._owner.member, stage)

    def close(self) -> None:
        """End the reading, after what is there already; the end of `serve` opens the process's gate."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def _serve_one(self) -> bool:
        message = self._receive()
        if message:
            self._handlers[message[0]](message)
        return bool(message)

    def _receive(self) -> bytes:
        return self._socket.recv(process_gate.LARGEST_MESSAGE_BYTES)

    def _acquire(self, message: bytes) -> None:
        stage = _stage_of(message)
        waited_s = self._owner.arbiter.acquire(self._owner.member, stage)
        self._held.add(stage)
        self._answer(waited_s)

    def _yield(self, message: bytes) -> None:
        stage = _stage_of(message)
        try:
            self._answer(self._owner.arbiter.yield_point(self._owner.member, stage))
        except WaitInterruptedError:
            self._held.discard(stage)
            raise

    def _answer(self, figure: float) -> None:
        self._socket.send(process_gate.ANSWER.pack(figure))

    def _release(self, message: bytes) -> None:
        stage = _stage_of(message)
        self._held.discard(stage)
        self._owner.arbiter.release(self._owner.member, stage)

    def _iteration(self, message: bytes) -> None:
        record = process_gate.unpack_iteration(message)
        if self._owner.on_iteration(record):
            self._owner.arbiter.iteration_done(self._owner.member, record)

    def _interval(self, message: bytes) -> None:
        _, stage, start_s, end_s, wait_s = process_gate.INTERVAL_MESSAGE.unpack(message)
        if self._owner.on_interval is not None:
            self._owner.on_interval(_known(stage), start_s, end_s, wait_s)


class _MainChannel(_Channel):
    """The channel over which the process sends those of its threads."""

    def serve(self) -> None:
        try:
            super().serve()
        finally:
            self._owner.main_closed.set()

    def _receive(self) -> bytes:
        # Not `recv_fds`, which takes no notice of its flags: what this process starts would hold the channel open.
        space = socket.CMSG_LEN(_FILE.size)
        message, files, _, _ = self._socket.recvmsg(process_gate.LARGEST_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for _, _, file in files:
            number = _FILE.unpack(file)[0]
            try:
                channel = socket.socket(fileno=number)
            except OSError:  # it is something else
                os.close(number)
                raise
            self._owner.serve(_Channel(self._owner, channel))
        return message


def _stage_of(message: bytes) -> int:
    return _known(process_gate.STAGE_MESSAGE.unpack(message)[1])


def _known(stage: int) -> int:
    if stage >= STAGE_COUNT:
        raise ValueError(f"there is no stage number {stage}")
    return stage
