"""The gate of a member's process and the runtime's end of it, over a real socket pair."""

import errno
import gc
import math
import mmap
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from operator import le
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import pytest
from member_gates import Gates, gates_of
from polling import DEADLINE_S, until

from muri.launcher import process_gate
from muri.launcher.arbitration.arbiter import WaitInterruptedError
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.job.stage_clock import IterationRecord
from muri.launcher.process_gate import ProcessGate, gate_from_environment
from muri.launcher.sessions.peer_process import PeerProcess
from muri.launcher.sessions.process_session import Channels, ProcessSession

LOAD, GPU = 0, 2


class Member:
    """A gate, served by channels as the runtime would."""

    def __init__(self, name: str, gates: Gates) -> None:
        self.name, self.arbiter, self.records = name, gates.arbiter, gates.records[name]
        self.arbiter.join(name)
        self.gate = gates.open(name)

    def holds(self, stage: int) -> bool:
        """Return whether the arbiter would let no other member in."""
        return self.arbiter.holders()[stage] == self.name

    def waits(self) -> bool:
        """Whether it waits for anything."""
        return any(waiter.member == self.name for waiting in self.arbiter._waiting for waiter in waiting)


@pytest.fixture
def make() -> Iterator[Callable[[str], Member]]:
    with gates_of(FairArbiter(several_ranks=True)) as gates:  # a sole member asks, too
        yield lambda name: Member(name, gates)


def in_background(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_all_that_a_process_has_told_counts_when_its_channels_are_closed() -> None:
    records: list[IterationRecord] = []
    read_on = threading.Event()

    def count(record: IterationRecord) -> None:
        read_on.wait(DEADLINE_S)
        records.append(record)

    channels = Channels("1", FairArbiter(), count, None, Mock())
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels.open(theirs)
    told = [IterationRecord(float(step), (0.0,) * 4, (0.0,) * 4) for step in range(50)]
    for record in told:
        own.send(process_gate.pack_iteration(record))
    other, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(own, [bytes([process_gate.CHANNEL])], [channel.fileno()])
    channel.close()
    last = IterationRecord(50.0, (0.0,) * 4, (0.0,) * 4)
    other.send(process_gate.pack_iteration(last))
    channels.close(0.0)
    assert not records, "a runtime that does not come to read delays the end no longer than the limit"
    threading.Timer(0.05, read_on.set).start()
    channels.close(DEADLINE_S)  # although something still holds the other ends open
    assert records == [*told, last]
    for end in (own, other):
        end.settimeout(DEADLINE_S)
        assert end.recv(10) == b""
        end.close()


def test_yield_point_speaks_only_when_somebody_waits(make: Callable[[str], Member]) -> None:
    one, two = make("1"), make("2")
    one.gate.acquire(GPU)
    asked: list[tuple[int, int]] = []
    ask = one.gate._ask
    one.gate._ask = lambda kind, stage: (asked.append((kind, stage)), ask(kind, stage))[1]  # type: ignore[method-assign]
    assert one.gate.yield_point(GPU) == 0.0
    assert asked == []

    def second() -> None:
        two.gate.acquire(GPU)
        two.gate.release(GPU)

    thread = in_background(second)
    until(two.waits, "the second member's wait")
    assert one.gate.yield_point(GPU) > 0.0
    thread.join(DEADLINE_S)
    assert asked == [(process_gate.YIELD, GPU)]
    assert one.holds(GPU)
    assert one.gate.yield_point(GPU) == 0.0
    assert len(asked) == 1


def test_each_thread_waits_for_itself_and_gives_back_what_it_held(make: Callable[[str], Member]) -> None:
    one, two = make("1"), make("2")
    two.gate.acquire(LOAD)
    prefetch = in_background(lambda: one.gate.acquire(LOAD))
    until(one.waits, "the prefetching thread's wait")
    one.gate.acquire(GPU)  # not kept waiting by the other thread
    two.gate.release(LOAD)
    prefetch.join(DEADLINE_S)
    until(lambda: not one.holds(LOAD), "what the ended thread held")
    assert one.holds(GPU)


def test_what_this_process_starts_does_not_hold_a_channel_open(make: Callable[[str], Member]) -> None:
    def inherited() -> int:
        return len(subprocess.check_output(["ls", "/proc/self/fd"], close_fds=False).split())

    one, before = make("1"), inherited()
    one.gate.acquire(GPU)
    assert inherited() == before


def test_exception_of_a_signal_handler_waits_for_the_answer_and_gives_it_back(make: Callable[[str], Member]) -> None:
    one, two = make("1"), make("2")
    one.gate.acquire(GPU)
    in_handler = threading.Event()

    def handler(_signum: int, _frame: FrameType | None) -> None:
        in_handler.set()
        raise KeyError("from the handler")

    def disturb() -> None:
        until(two.waits, "the second member's wait")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert in_handler.wait(DEADLINE_S)
        one.gate.release(GPU)

    previous = signal.signal(signal.SIGUSR1, handler)
    thread = in_background(disturb)
    try:
        with pytest.raises(KeyError, match="from the handler"):
            two.gate.acquire(GPU)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    thread.join(DEADLINE_S)
    until(lambda: not two.holds(GPU), "the granted resource to come back")
    two.gate.acquire(GPU)  # question and answer still belong together
    assert two.holds(GPU)


def test_the_gate_opens_for_good_to_a_member_that_was_given_up_and_when_the_runtime_is_gone(
    make: Callable[[str], Member],
) -> None:
    one, two = make("1"), make("2")
    two.gate.acquire(GPU)
    waiting = in_background(lambda: one.gate.acquire(GPU))
    until(one.waits, "the first member's wait")
    one.arbiter.leave("1")
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert two.holds(GPU)
    for _ in range(2):
        one.gate.acquire(LOAD)
        one.gate.yield_point(LOAD)
        one.gate.release(LOAD)
    assert not one.holds(LOAD)
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gate = ProcessGate(own, mmap.mmap(-1, process_gate.PAGE_BYTES))
    theirs.close()
    gate.acquire(GPU)
    gate.release(GPU)
    own.close()


def test_nonsense_ends_the_channel_only(make: Callable[[str], Member], caplog: pytest.LogCaptureFixture) -> None:
    one, two = make("1"), make("2")
    for message in (
        b"?",
        bytes([process_gate.ACQUIRE]),
        bytes([process_gate.ACQUIRE, 9]),
        bytes([process_gate.ITERATION]) * 9,
        process_gate.pack_iteration(IterationRecord(math.nan, (0.0,) * 4, (0.0,) * 4)),
        process_gate.INTERVAL_MESSAGE.pack(process_gate.INTERVAL, 9, 0.0, 1.0, 0.0),
        bytes([process_gate.FACTS]) + b"5",
        bytes([process_gate.FACTS]) + b'{"depth": "deep"}',
    ):
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        Channels("1", one.arbiter, one.records.append, lambda *_: None, Mock()).open(theirs)
        own.settimeout(DEADLINE_S)
        own.send(message)
        assert own.recv(10) == b""
        own.close()
    until(lambda: caplog.text.count("is not understood") == 8, "eight warnings")
    two.gate.acquire(GPU)
    assert two.holds(GPU)
    assert one.records == []


def test_a_file_in_place_of_a_channel_ends_the_channels_and_is_closed(
    make: Callable[[str], Member], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    one = make("1")
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Channels("1", one.arbiter, one.records.append, None, Mock()).open(theirs)
    own.settimeout(DEADLINE_S)
    path = tmp_path / "no-socket"
    with path.open("wb") as file:
        socket.send_fds(own, [bytes([process_gate.CHANNEL])], [file.fileno()])
    assert own.recv(10) == b""
    own.close()
    until(lambda: caplog.text.count("is not understood") == 1, "a warning")
    assert path.resolve() not in {each.resolve() for each in Path("/proc/self/fd").iterdir()}


def test_a_session_that_finds_no_file_for_its_channel_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    arbiter, ends = FairArbiter(several_ranks=True), list[object]()
    session = ProcessSession(Mock(job_id="1"), PeerProcess(0), arbiter, 0, lambda _session: False)
    monkeypatch.setattr(socket, "socketpair", full)
    with pytest.raises(OSError, match="Too many"):
        session.start(ends.append)
    assert ends == [session]
    assert session.ended.is_set()
    with pytest.raises(WaitInterruptedError):
        arbiter.acquire("1", GPU)


def test_a_program_that_replaces_the_script_keeps_files_that_have_the_gates_numbers() -> None:
    own, theirs = socket.socketpair()
    free = os.dup(own.fileno())
    os.close(free)
    assert gate_from_environment({process_gate.VARIABLE: f"{os.getpid()}:{own.fileno()}:{free}:0"}) is None
    gc.collect()
    own.send(b"open")
    assert theirs.recv(10) == b"open"
    own.close()
    theirs.close()


def test_only_the_process_that_is_meant_takes_the_gate() -> None:
    own, theirs = socket.socketpair()
    page_fd, _ = process_gate.make_page()
    place = f"{own.detach()}:{page_fd}:0"
    for text in ("", "1:2:3", "a:b:c:d", f"{os.getppid()}:{place}"):
        assert gate_from_environment({process_gate.VARIABLE: text}) is None
    gate = gate_from_environment({process_gate.VARIABLE: f"{os.getpid()}:{place}"})
    assert gate is not None
    gate._main.close()
    theirs.close()


def test_member_processes_leave_no_descriptor_and_no_thread_behind() -> None:
    from muri_lab.benchmarks.switch_cost import measure_switches_s

    def counts() -> tuple[int, int]:
        gc.collect()  # sessions and their channels refer to each other
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    measure_switches_s(2)
    before = counts()
    for _ in range(3):
        measure_switches_s(2)
    until(lambda: all(map(le, counts(), before)), "descriptors and threads to be given back")
