"""One member's script in a process of its own, under the same arbiter as the sessions in threads.

The script's process is a step of the runtime's Slurm job or its child (`process_start`), so it has the GPUs of the
group's job; everything else belongs to the member, its Python too. Its requests for resources come over channels, one
for each thread of the script (`process_gate`), and go to the arbiter.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from muri.group_spec import MemberSpec
from muri.launcher import process_gate
from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.job.environment import continue_descendants, stop_descendants, task_of
from muri.launcher.job.script import MARK_VARIABLE
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
from muri.launcher.script.hooks import stages_wanted
from muri.launcher.sessions import process_supervisor
from muri.launcher.sessions.process_start import StartError, Supervisor, SupervisorLostError
from muri.launcher.sessions.setup import (
    GPU_VARIABLES,
    HUNG_GRACE_S,
    MemberSession,
    Roots,
    call_later,
    reported_code,
    take_short_turns,
    tell_hang,
    wait_without_spinning,
)

logger = logging.getLogger("muri.launcher")

CANCEL_GRACE_S: Final = 20.0
_TRACKED: Final = "SigCgt:"
_FILE: Final = struct.Struct("i")

_KILLED: Final = {128 + signal.SIGTERM, 128 + signal.SIGKILL}


Start = Callable[[str], AbstractContextManager[Supervisor]]
"""Starts the supervisor of a member: `process_start.supervised` where its other arguments are known."""


class ProcessSession(MemberSession):
    """Runs one attach request in a process; see `MemberSession` for the attributes.

    Args:
        request: What to run.
        files: The member's standard input, output and error; closed here.
        arbiter: Grants resources.
        page_fd: The page that tells yield points whether a member waits (`process_gate.make_page`).
        start: Starts the process that watches over the script's.
        on_interval: Called with every stage held; None for no calls.
        spec: The plan's figures of the member.
    """

    isolation = "process"
    checkpointed: Final = False
    """False, because the script's own process handles its checkpoint."""

    def __init__(
        self,
        request: AttachRequest,
        files: tuple[int, int, int],
        arbiter: Arbiter,
        page_fd: int,
        start: Start,
        on_interval: IntervalListener | None = None,
        spec: MemberSpec | None = None,
    ) -> None:
        # `fault` stays None, because an error in the process's own CUDA context ends no other member; `stopped_at`
        # stays None, because a checkpoint is known to the process alone.
        super().__init__(request, arbiter, spec)
        self.clock = StageClock()  # never entered: filled from what the process tells
        self.ended = threading.Event()
        self._cut_short = False
        self._files = files
        self._page_fd = page_fd
        self._start = start
        self._traced = on_interval is not None
        self._facts: dict[str, Any] | None = None
        self._channels = Channels(self.member, arbiter, self._count, on_interval, self._note_facts)
        self._supervisor: Supervisor | None = None
        self._script_pid = 0
        self._told_to_end = False
        self._told_by_others = False
        self._handles_end = False
        self._early: list[int] = []
        self._lock = threading.Lock()
        self._mark = Path(tempfile.gettempdir()) / f"muri-out-of-memory-{os.getpid()}-{secrets.token_hex(8)}"

    def start(self, on_end: Callable[[MemberSession], None]) -> None:
        """Run the script."""
        self._on_end = on_end
        self.join_arbiter()
        threading.Thread(target=self._main, name=f"process-{self.member}", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether the runtime's end cut the script short, so that its exit code means nothing."""
        return self.condemned or self._cut_short or self.lost_cause is not None

    def deliver(self, signum: int) -> None:
        """Pass the signal on; the process handles it as it would alone."""
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.pass_on(signum)
            elif self.exit_code is None:
                self._early.append(signum)

    def end(self, signum: int, grace_s: float = CANCEL_GRACE_S) -> None:
        """Pass the signal on, and kill the script after the grace time."""
        self.deliver(signum)
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.wake()
        self.go_on()  # a stopped process acts on the signal once it is continued
        call_later(grace_s, self._kill)

    def end_as_hung(self, cause: str) -> None:
        """Say why on the script's standard error."""
        with self._lock:
            if self.exit_code is not None:
                return
            self.hung = True
            tell_hang(self._files[2], cause)
        logger.warning("member %s: %s", self.member, cause)
        self.end(signal.SIGTERM, HUNG_GRACE_S)

    def facts(self) -> Mapping[str, Any] | None:
        """What the script's process has told of itself."""
        return self._facts

    def _note_facts(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def stop(self) -> None:
        """Stop the script and everything that it has started, but not the supervisor, which serves the runtime."""
        stop_descendants(self.roots().supervisor)

    def go_on(self) -> None:
        """Continue the script and everything that it has started."""
        continue_descendants(self.roots().supervisor)

    def roots(self) -> Roots:
        """The script's process, and the one that stands between it and the runtime."""
        with self._lock:
            supervisor = self._supervisor
        return Roots() if supervisor is None else Roots(process=self._script_pid, supervisor=supervisor.pid)

    def shut_down(self, grace_s: float) -> None:
        """The runtime ends: SIGTERM, and SIGKILL after the grace time."""
        self._handles_end = _handles(self._script_pid, signal.SIGTERM)
        self._told_to_end = True
        self.end(signal.SIGTERM, grace_s)

    def detach_output(self) -> None:
        """Nothing to do: the process holds the member's files itself and is ended."""

    def _kill(self) -> None:
        if not self.ended.is_set():
            logger.warning("the process of member %s did not end in time and is killed", self.member)
            self.deliver(signal.SIGKILL)

    def _count(self, record: IterationRecord) -> bool:
        clock = self.clock
        told = clock.count(record)
        for stage, (stage_s, wait_s) in enumerate(zip(record.stage_s, record.wait_s, strict=True)):
            clock.stage_s[stage] += stage_s
            clock.wait_s[stage] += wait_s
        for function in clock.at_boundary:
            function()
        return told

    def _main(self) -> None:
        code = 1
        try:
            with self._start(self.member) as supervisor:
                code = self._run(supervisor)
        except (StartError, SupervisorLostError, OSError, RuntimeError, MemoryError) as error:  # no thread is left, too
            self.lost_cause = str(error) or "no memory is left"
            logger.warning("member %s goes back to the queue: %s", self.member, error)
        finally:
            self._conclude(code)

    def _run(self, supervisor: Supervisor) -> int:
        """Run the script to its end, free its turns at once, end processes that it left; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            take_short_turns(supervisor.pid)
        self._hand_over(supervisor)
        self._script_pid = supervisor.started()
        ended = supervisor.ended()
        self._arbiter.leave(self.member)
        supervisor.await_end()
        with self._lock:
            self._supervisor = None
        self._channels.finish(process_supervisor.LIMIT_S)
        if ended is None:
            raise SupervisorLostError("its process was killed together with the one that watches over it")
        code, self._told_by_others = ended
        return code

    def _hand_over(self, supervisor: Supervisor) -> None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._channels.open(own)
            supervisor.run(self._wanted(), (*self._files, theirs.fileno(), self._page_fd))
        with self._lock:
            self._supervisor = supervisor
            early, self._early = self._early, []
        for signum in early:
            self.deliver(signum)

    def _wanted(self) -> dict[str, Any]:
        """What the supervisor starts."""
        request = self._request
        return {
            "command": script_command(request),
            "environment": _environment(request, self._mark),
            "own_variables": GPU_VARIABLES,
            "cwd": request.cwd,
            "umask": request.umask,
            "limits": dict(request.limits),
            "nice": request.nice,
            "blocked": request.blocked,
            "ignored": request.ignored,
            "traced": self._traced,
        }

    def _conclude(self, code: int) -> None:
        self._arbiter.leave(self.member)
        self.out_of_memory = code != 0 and self._mark.exists()
        self._mark.unlink(missing_ok=True)
        for file in self._files:
            with contextlib.suppress(OSError):
                os.close(file)
        with self._lock:
            self.exit_code = reported_code(code, hung=self.hung)
        self._cut_short = self._told_to_end and (self._handles_end or self._told_by_others or code in _KILLED)
        self.ended.set()
        self._on_end(self)


def script_command(request: AttachRequest) -> list[str]:
    """How the script runs as a process of its own: plain only if it wants no stages and is one rank alone."""
    hooks = stages_wanted(request.environment) or task_of(request.environment)[1] > 1
    runner = ["-m", "muri.launcher.script.solo"] if hooks else []
    module = ["-m"] if request.module else []
    return [request.executable, *request.options, *runner, *module, request.target, *request.arguments]


def _environment(request: AttachRequest, mark: Path) -> dict[str, str]:
    """The member's environment; the supervisor adds the GPUs."""
    own = {name: value for name, value in request.environment.items() if name not in GPU_VARIABLES}
    wait_without_spinning(own)
    if stages_wanted(request.environment):
        own[MARK_VARIABLE] = str(mark)
    return own


def share_waiting_hint(arbiter: Arbiter) -> int:
    """Put the arbiter's `waiting_hint` where processes see it; returns the page's descriptor."""
    page_fd, arbiter.waiting_hint = process_gate.make_page()
    arbiter.waiting_hint[TURNS_INDEX] = TURNS if arbiter.takes_turns else NO_TURNS
    return page_fd


def _handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines() if pid else []
        caught = next(int(line.split()[1], 16) for line in status if line.startswith(_TRACKED)) if status else 0
        return bool(caught >> (signum - 1) & 1)
    return False


class Channels:
    """Serves all channels of one member's process, a thread for each.

    Args:
        member: The member's job id.
        arbiter: Answers its requests.
        on_iteration: Called with each finished iteration; whether the arbiter is to be told of it.
        on_interval: Called with each stage held; None for no calls.
        on_facts: Called with what the process tells of itself; None for no calls.
    """

    def __init__(
        self,
        member: str,
        arbiter: Arbiter,
        on_iteration: Callable[[IterationRecord], bool],
        on_interval: IntervalListener | None,
        on_facts: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.member: Final = member
        self.arbiter: Final = arbiter
        self.on_iteration: Final = on_iteration
        self.on_interval: Final = on_interval
        self.on_facts: Final = on_facts
        self._served: list[threading.Thread] = []
        self._lock = threading.Lock()

    def open(self, main: socket.socket) -> None:
        """Serve the process's first socket in the background, and the channels that come over it."""
        self.serve(_MainChannel(self, main))

    def serve(self, served: "_Channel") -> None:
        """Serve a channel in the background until its other end closes."""
        thread = threading.Thread(target=served.serve, name=f"channel-{self.member}", daemon=True)
        with self._lock:
            thread.start()
            self._served = [*filter(threading.Thread.is_alive, self._served), thread]

    def finish(self, limit_s: float) -> None:
        """Wait until all that the process has told is read; its end closes channels that no other process holds."""
        end_s = time.monotonic() + limit_s
        while (open_ones := [*filter(threading.Thread.is_alive, self._served)]) and time.monotonic() < end_s:
            open_ones[0].join(max(0.0, end_s - time.monotonic()))


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
            process_gate.FACTS: self._note_facts,
            process_gate.CHANNEL: lambda _message: None,  # the descriptor that came with it is open already
        }

    def serve(self) -> None:
        try:
            with self._socket, contextlib.suppress(ConnectionError):
                while self._serve_one():
                    pass
        except (KeyError, struct.error, ValueError) as error:
            logger.warning("member %s: its process sent what is not understood (%r)", self._owner.member, error)
        finally:  # a thread of the script may end within a stage
            for stage in self._held:
                self._owner.arbiter.release(self._owner.member, stage)

    def _serve_one(self) -> bool:
        message = self._receive()
        if message:
            self._handlers[message[0]](message)
        return bool(message)

    def _receive(self) -> bytes:
        return self._socket.recv(process_gate.LARGEST_MESSAGE_BYTES)

    def _acquire(self, message: bytes) -> None:
        stage = _stage_of(message)
        try:
            waited_s = self._owner.arbiter.acquire(self._owner.member, stage)
        except WaitInterruptedError:
            self._answer(process_gate.INTERRUPTED, 0.0)
        else:
            self._held.add(stage)
            self._answer(process_gate.GRANTED, waited_s)

    def _yield(self, message: bytes) -> None:
        stage = _stage_of(message)
        try:
            self._answer(process_gate.GRANTED, self._owner.arbiter.yield_point(self._owner.member, stage))
        except WaitInterruptedError:
            self._held.discard(stage)
            self._answer(process_gate.INTERRUPTED, 0.0)

    def _answer(self, kind: int, waited_s: float) -> None:
        self._socket.send(process_gate.ANSWER.pack(kind, waited_s))

    def _release(self, message: bytes) -> None:
        stage = _stage_of(message)
        self._held.discard(stage)
        self._owner.arbiter.release(self._owner.member, stage)

    def _iteration(self, message: bytes) -> None:
        record = process_gate.unpack_iteration(message)
        if self._owner.on_iteration(record):
            self._owner.arbiter.iteration_done(self._owner.member, record)

    def _note_facts(self, message: bytes) -> None:
        if self._owner.on_facts is not None:
            self._owner.on_facts(process_gate.unpack_facts(message))

    def _interval(self, message: bytes) -> None:
        _, stage, start_s, end_s, wait_s = process_gate.INTERVAL_MESSAGE.unpack(message)
        if self._owner.on_interval is not None:
            self._owner.on_interval(stage, start_s, end_s, wait_s)


class _MainChannel(_Channel):
    """The channel over which the process sends those of its threads."""

    def _receive(self) -> bytes:
        # Not `recv_fds`, which takes no notice of its flags: what this process starts would hold the channel open.
        space = socket.CMSG_LEN(_FILE.size)
        message, files, _, _ = self._socket.recvmsg(process_gate.LARGEST_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for _, _, file in files:
            self._owner.serve(_Channel(self._owner, socket.socket(fileno=_FILE.unpack(file)[0])))
        return message


def _stage_of(message: bytes) -> int:
    _, stage = process_gate.STAGE_MESSAGE.unpack(message)
    if stage >= STAGE_COUNT:
        raise ValueError(f"there is no stage number {stage}")
    return int(stage)
