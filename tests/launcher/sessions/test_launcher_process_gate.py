"""The gate of a member's process and the runtime's end of it, over a real socket pair."""

import gc
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

import pytest
from member_gates import Gates, gates_of
from polling import DEADLINE_S, until

from muri.launcher import process_gate
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.job.stage_clock import IterationRecord
from muri.launcher.process_gate import ProcessGate, gate_from_environment
from muri.launcher.sessions.process_session import Channels

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

    channels = Channels("1", FairArbiter(), count, None)
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
    ):
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        Channels("1", one.arbiter, one.records.append, None).open(theirs)
        own.send(message)
        assert own.recv(10) == b""
        own.close()
    until(lambda: caplog.text.count("is not understood") == 4, "four warnings")
    two.gate.acquire(GPU)
    assert two.holds(GPU)
    assert one.records == []


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
