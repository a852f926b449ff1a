"""A runtime's view of processes that are not its children, and sessions of those that it cannot see."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from polling import DEADLINE_S, until

from muri.launcher import process_gate, protocol
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.protocol import AttachRequest
from muri.launcher.sessions import peer_process
from muri.launcher.sessions.peer_process import PeerProcess
from muri.launcher.sessions.process_session import ProcessSession, share_waiting_hint
from muri.launcher.sessions.setup import MemberSession

REQUEST = AttachRequest(
    job_id="101", target="train.py", module=False, arguments=(), cwd="/", environment={}, umask=0o022, prefix="/p",
    python="3.8", executable="/p/python",
)  # fmt: skip


@pytest.fixture(autouse=True, params=["5.3", "4.18"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that knows files that stand for processes, and one that does not."""
    if request.param == "4.18":
        monkeypatch.setattr(peer_process, "_open_pidfd", lambda _pid: -1)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[str]"]:
    """A process with an odd name, which SIGTERM ends, and a child that ignores it; it tells the child's number."""
    words = r"printf '(odd\377) S' >/proc/$$/comm; trap '' TERM; sleep 1000 & trap - TERM; echo $!; wait"
    with subprocess.Popen(["sh", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def child_of(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_signals_and_the_end_are_those_of_one_process_and_of_no_other(sleeper: "subprocess.Popen[str]") -> None:
    peer, other = PeerProcess(sleeper.pid), PeerProcess(child_of(sleeper))
    assert not peer.has_ended
    assert [each.pid for each in peer.family()] == [other.pid]
    peer.send(signal.SIGTERM)
    peer.wait()
    assert peer.has_ended, "although its parent has not asked for its exit code yet"
    assert not list(peer.family())
    assert not other.has_ended
    peer.send(signal.SIGKILL)
    other.send(signal.SIGKILL)
    other.wait()
    assert sleeper.wait() == -signal.SIGTERM


def test_a_process_that_cannot_be_seen_gets_no_signal_and_never_seems_to_end() -> None:
    for number in (0, 2**22 + 1):  # not of this namespace; none
        peer = PeerProcess(number)
        assert (peer.pid, peer.has_ended, list(peer.family())) == (0, False, [])
        peer.send(signal.SIGKILL)
        with pytest.raises(OSError, match=r"No such (file|process)"):
            peer.error_output()


def test_who_has_connected_and_is_gone_is_not_mixed_up_with_another_process() -> None:
    here, there = socket.socketpair()
    with here:
        assert PeerProcess.of(here).pid == os.getpid()
        there.close()
        assert PeerProcess.of(here).pid == 0


def test_a_line_reaches_the_standard_error_of_a_process(sleeper: "subprocess.Popen[str]") -> None:
    assert sleeper.stderr is not None
    with os.fdopen(PeerProcess(sleeper.pid).error_output(), "w") as file:
        file.write("a notice\n")
    assert sleeper.stderr.readline() == "a notice\n"


def a_session(process: PeerProcess, arbiter: FairArbiter) -> tuple[ProcessSession, socket.socket, list[MemberSession]]:
    """A session that has started, the process's end of its gate, and the sessions that have ended."""
    page_fd, ended = share_waiting_hint(arbiter), list[MemberSession]()
    session = ProcessSession(REQUEST, process, arbiter, page_fd, lambda _session: False)
    session.start(ended.append)
    here, there = socket.socketpair()
    with here, there:
        session.hand_over(here, {"A": "b"})
        answer = protocol.receive_with_files(there, 2)
    os.close(page_fd)
    assert answer is not None
    frame, (gate, page) = answer
    os.close(page)
    assert (frame["type"], frame["environment"], frame["traced"]) == ("home", {"A": "b"}, False)
    return session, socket.socket(fileno=gate), ended


def test_a_process_that_cannot_be_seen_ends_with_its_channel() -> None:
    session, gate, ended = a_session(PeerProcess(0), FairArbiter())
    gate.send(process_gate.EXIT_MESSAGE.pack(process_gate.EXIT, 3))
    assert not session.is_over
    gate.close()
    assert session.ended.wait(DEADLINE_S)
    assert (session.exit_code, session.lost, session.client_pid) == (3, False, 0)
    until(lambda: ended == [session], "the word of its end")


def watched_processes() -> int:
    """The files of this process that stand for processes."""
    return sum("pidfd" in os.path.realpath(file) for file in Path("/proc/self/fd").iterdir())


def test_a_session_that_has_ended_watches_nothing_however_long_it_is_remembered(
    sleeper: "subprocess.Popen[str]",
) -> None:
    child_of(sleeper)
    before = watched_processes()
    session, gate, ended = a_session(PeerProcess(sleeper.pid), FairArbiter())
    gate.close()
    sleeper.kill()
    until(lambda: ended == [session], "its end")
    assert watched_processes() == before
    session.end(signal.SIGUSR1, 0.0)
    assert session.is_over


def test_a_session_that_is_given_up_ends_once_and_its_process_goes_on(sleeper: "subprocess.Popen[str]") -> None:
    child_of(sleeper)
    session, gate, ended = a_session(PeerProcess(sleeper.pid), FairArbiter())
    assert session.client_pid == sleeper.pid
    with gate:
        session.shut_down(0.0)
        assert (session.exit_code, session.lost, session.is_over) == (None, True, True)
        assert gate.recv(10) == b""
        assert sleeper.poll() is None
        sleeper.terminate()
        until(lambda: not watches(session), "its watch to end")
        assert ended == [session]


def test_where_no_thread_is_left_a_session_has_ended_before_its_script_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ended, arbiter = threading.Thread.start, list[MemberSession](), FairArbiter()

    def start(thread: threading.Thread) -> None:
        if thread.name == "process-101":
            raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    session = ProcessSession(REQUEST, PeerProcess(0), arbiter, -1, lambda _session: False)
    with pytest.raises(RuntimeError, match="new thread"):
        session.start(ended.append)
    assert ended == [session]
    assert session.lost


def watches(session: ProcessSession) -> bool:
    """Whether a thread still waits for the end of a session's process."""
    return any(thread.name == f"process-{session.member}" for thread in threading.enumerate())


def test_what_hangs_is_told_why_and_ended_with_what_it_has_started_although_it_is_stopped(
    sleeper: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muri.launcher.sessions.setup.HUNG_GRACE_S", 0.3)
    child = child_of(sleeper)
    session, gate, ended = a_session(PeerProcess(sleeper.pid), FairArbiter())
    for pid in (sleeper.pid, child):
        os.kill(pid, signal.SIGSTOP)
    with gate:
        session.end_as_hung("it hangs")
        assert sleeper.stderr is not None
        assert sleeper.stderr.readline() == "muri: it hangs\n"
        assert sleeper.wait(DEADLINE_S) == -signal.SIGTERM
        assert session.ended.wait(DEADLINE_S)
    until(lambda: len(ended) == 1, "the word of its end")
    assert (session.exit_code, session.hung) == (None, True)
    assert Path(f"/proc/{child}").exists(), "children of a process that ends in time are its job's business"
    os.kill(child, signal.SIGKILL)


def test_what_does_not_end_in_time_is_killed_with_what_it_has_started() -> None:
    deaf = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, lambda *_: 0); print(0, flush=True)\n"
            "import os; os.dup2(os.open(os.devnull, 1), 1)\n"
            "import subprocess; subprocess.run(['sleep', '1000'])"]  # fmt: skip
    with subprocess.Popen(deaf, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peer = PeerProcess(process.pid)
        until(lambda: list(peer.family()), "its child")
        (family,) = peer.family()
        session, gate, _ = a_session(peer, FairArbiter())
        with gate:
            session.end(signal.SIGTERM, 0.2)
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
        until(lambda: family.has_ended, "the end of its child")
