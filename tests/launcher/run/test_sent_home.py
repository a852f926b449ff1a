"""`muri run` between its question and the script that it becomes, with a runtime of the test's own."""

import os
import signal
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from launcher_harness import Launcher, Process, ends
from polling import DEADLINE_S

from muri.launcher import process_gate, protocol
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.sessions.process_session import Channels

NUMBER = "7"


class Runtime:
    """Takes one member's connection, and answers by hand."""

    def __init__(self, launcher: Launcher) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(protocol.pilot_socket(launcher.run_dir, NUMBER)))
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        launcher.grant = {protocol.PILOT_VARIABLE: NUMBER}

    def take(self) -> socket.socket:
        """The connection of a member that has asked."""
        connection, _ = self._listener.accept()
        connection.settimeout(DEADLINE_S)
        question = protocol.receive_with_files(connection, 3)
        assert question is not None
        for file in question[1]:
            os.close(file)
        return connection

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


@pytest.fixture
def runtime(launcher: Launcher) -> Iterator[Runtime]:
    runtime = Runtime(launcher)
    yield runtime
    runtime.close()


def send_home(connection: socket.socket, variables: dict[str, str]) -> socket.socket:
    """Answer a member; the runtime's end of its gate."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page_fd, _ = process_gate.make_page()
    frame = {"type": protocol.HOME, "traced": False, "environment": variables}
    with theirs, connection:
        protocol.send_with_files(connection, frame, (theirs.fileno(), page_fd))
    os.close(page_fd)
    return ours


@pytest.mark.parametrize("automatic", ["0", "1"])
def test_a_script_gets_the_runtimes_variables_and_tells_how_it_ends(
    launcher: Launcher, runtime: Runtime, automatic: str
) -> None:
    text = """
        import os, sys
        gate = int(os.environ["MURI_GATE"].split(":")[1])
        print(os.environ["A"], os.get_inheritable(gate))
        sys.exit(300)
    """
    member = launcher.member("101", launcher.script(text), MURI_AUTOMATIC=automatic)
    listener = Mock()
    channels = Channels("101", FairArbiter(), lambda _record: False, None, listener)
    channels.open(send_home(runtime.take(), {"A": "b"}))
    assert ends(member) == 44
    channels.close(DEADLINE_S)
    assert launcher.out("101") == "b False\n"
    listener.note_exit.assert_called_with(44)


def test_a_signal_that_comes_before_the_answer_is_the_scripts(launcher: Launcher, runtime: Runtime) -> None:
    member: Process = launcher.member("101", launcher.script("print('never')"))
    connection = runtime.take()
    member.send_signal(signal.SIGUSR1)
    assert protocol.receive(connection) == {"type": "signal", "signum": signal.SIGUSR1}
    with send_home(connection, {}):
        assert ends(member) == -signal.SIGUSR1
    assert launcher.out("101") == ""
