"""The run directory and the protocol: who is refused, and what is not a frame."""

import itertools
import os
import signal
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from launcher_harness import Launcher, ends

from muri.files import RendezvousError, make_run_dir
from muri.launcher import protocol
from muri.launcher.protocol import AttachRequest, ProtocolError
from muri.launcher.run import command
from muri.launcher.run.command import PythonLine
from muri.launcher.runtime.admission import AdmissionControl
from muri.launcher.runtime.server import Server, _send_last
from muri.pythons import own_python


def test_run_dir_is_made_private_and_that_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    make_run_dir(run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    make_run_dir(run_dir)
    monkeypatch.setattr(os, "geteuid", lambda: run_dir.stat().st_uid + 1)
    with pytest.raises(RendezvousError, match="belongs to user id"):
        make_run_dir(run_dir)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_run_dir_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(RendezvousError, match=rf"mode {mode:04o}.*chmod 700"):
        make_run_dir(tmp_path)


def test_run_dir_that_is_a_link_or_a_file_or_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file", "absent/run"):
        with pytest.raises(RendezvousError, match=r"link or a file|File exists|No such file"):
            make_run_dir(tmp_path / name)


def test_peer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    with here, there:
        assert protocol.peer_of(here) == (os.getpid(), os.geteuid())
        protocol.require_same_user(here)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ProtocolError, match="not to 12345"):
            protocol.require_same_user(here)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_users_process_gets_nothing_from_the_runtime(launcher: Launcher) -> None:
    launcher.threads("101")
    path = protocol.pilot_socket(launcher.run_dir, protocol.NO_JOB).resolve()
    path.chmod(0o777)  # as if both doors had been opened: the peer's uid still counts
    launcher.run_dir.chmod(0o711)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                answer = protocol.receive(connection) or {}
                code = 0 if answer.get("type") == "refused" and "user id 65534" in answer["reason"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def a_server(run_dir: Path, pilot: str) -> Server:
    """A server of a pilot job, to which no script comes."""
    nothing = cast(Any, None)
    return Server(run_dir, nothing, Mock(), AdmissionControl(pilot, nothing))


def test_a_runtime_that_starts_does_not_remove_the_socket_of_one_that_starts_too_or_works(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first, second, third = (a_server(tmp_path, pilot) for pilot in ("901", "902", "903"))
    starting = threading.Thread(target=second.start)

    class SlowSocket(socket.socket):
        """Bound, it does not listen yet: the other runtime has the time to start."""

        def listen(self, backlog: int = 0, /) -> None:
            starting.start()
            starting.join(0.5)
            super().listen(backlog)

    first._socket.close()
    first._socket = SlowSocket(socket.AF_UNIX)
    first.start()
    starting.join()
    third.start()
    for server, pilot in ((first, "901"), (second, "902"), (third, "903")):
        connection = protocol.connect(protocol.pilot_socket(tmp_path, pilot))
        assert connection is not None, pilot
        connection.close()
        server.close()


@pytest.mark.parametrize("frame", [{"type": "signal"}, {"type": "signal", "signum": "x"}])
def test_a_frame_without_a_signal_ends_the_connection_and_the_thread(tmp_path: Path, frame: protocol.Frame) -> None:
    session = Mock(member="101", checkpointed=False)
    session.ended.is_set.return_value = False
    server = a_server(tmp_path, "900")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        protocol.send(theirs, frame)
        server._listen(ours, session)
    session.deliver.assert_not_called()
    session.end.assert_called_once_with(signal.SIGTERM)
    server.close()


def test_a_member_for_whom_no_thread_is_left_hears_so_and_the_next_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    plain, starts = threading.Thread.start, itertools.count()
    server = a_server(tmp_path, "900")

    def start(thread: Any) -> None:
        if thread._target == server._serve and next(starts) == 0:
            raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    threading.Thread(target=int, name="connection").start()  # as of a server that a test before this one has left
    server.start()
    for answer in (None, "refused"):
        with cast(socket.socket, protocol.connect(protocol.pilot_socket(tmp_path, "900"))) as connection:
            connection.settimeout(10)  # a server that has died would leave it waiting
            if answer:
                connection.sendall(bytes(5))
            heard = protocol.receive(connection)
            assert (heard and heard["type"]) == answer
    server.close()


def test_a_member_that_cannot_be_told_of_its_scripts_end_does_not_wait_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "send", Mock(side_effect=OSError("No buffer space available")))
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(10)
        _send_last(here, {"type": "exit", "code": 0})
        assert protocol.receive(there) is None


def test_too_long_socket_path_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="MURI_RUN_DIR"):
        protocol.connect(tmp_path / ("x" * 120))


def test_a_job_with_gpus_of_its_own_takes_no_notice_of_the_run_dir(launcher: Launcher) -> None:
    launcher.run_dir.chmod(0o755)
    assert launcher.ran("102", launcher.script("print('ran')")) == "ran\n"
    assert launcher.err("102") == ""
    launcher.run_dir.chmod(0o700)


def a_request() -> AttachRequest:
    line = PythonLine((), ("-u", "-W", "error"), False, "train.py", ("--name", "caf\udce9"))
    return command.build_request("101", line, own_python())


def test_request_and_files_survive_the_journey(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    path = tmp_path / "out"
    with here, there, path.open("wb") as file:
        sent = a_request()
        thread = threading.Thread(
            target=protocol.send_with_files, args=(here, sent.to_frame(), [file.fileno()] * 3), daemon=True
        )
        thread.start()
        received = protocol.receive_with_files(there, 3)
        thread.join()
        assert received is not None
        assert AttachRequest.from_frame(received[0]) == sent
        for descriptor in received[1]:
            os.write(descriptor, b"x")
            os.close(descriptor)
    assert path.read_bytes() == b"xxx"


@pytest.mark.parametrize(("count", "understood"), [(0, True), (2, True), (1, False)])
def test_an_answer_brings_a_gates_files_or_none(count: int, understood: bool) -> None:
    here, there = socket.socketpair()
    with here, there:
        protocol.send_with_files(here, {"type": "home"}, [0] * count)
        with nullcontext() if understood else pytest.raises(ProtocolError, match="open files too"):
            answer = protocol.receive_with_files(there, 2, maybe_none=True)
            assert answer is not None
            assert len(answer[1]) == count
            for descriptor in answer[1]:
                os.close(descriptor)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x02\x00\x00\x00\x02{}", "version 2"),
        (b"\x01\xff\xff\xff\xff{}", "announced"),
        (b"\x01\x00\x00\x00\x02{]", "not JSON"),
        (b"\x01\x00\x00\x00\x02[]", "no type"),
        (b"\x01\x00\x00\x00\x09{}", "within a frame"),
        (b"\x01\x00", "within a frame"),
        (b"", None),
    ],
)
def test_what_is_not_a_frame_is_refused(data: bytes, message: str | None) -> None:
    here, there = socket.socketpair()
    with there:
        here.sendall(data)
        here.close()
        with nullcontext() if message is None else pytest.raises(ProtocolError, match=message):
            assert protocol.receive(there) is None


def test_frame_without_files_or_fields_is_refused(launcher: Launcher) -> None:
    launcher.threads("101")
    for frame, files, reason in ((a_request().to_frame(), [], "open files"), ({"type": "attach"}, [0, 1, 2], "lacks")):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(protocol.pilot_socket(launcher.run_dir, protocol.NO_JOB)))
            protocol.send_with_files(connection, frame, files)
            answer = protocol.receive(connection)
        assert answer is not None
        assert answer["type"] == "refused"
        assert reason in answer["reason"]
    assert ends(launcher.member("101", launcher.script("print('fine')"))) == 0
