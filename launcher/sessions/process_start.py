"""Starts the supervisors of members' processes: as children of the runtime, or as steps of its Slurm job.

A step is a process of its own to Slurm, with its own record of CPU time, memory and exit code. The runtime starts it in
its own job, and not a member's `muri run` in the member's: Slurm answers the end of an `srun` by killing its step.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from muri import inherited
from muri.errors import MuriError, UsageError
from muri.launcher import protocol
from muri.launcher.sessions import process_supervisor
from muri.launcher.sessions.setup import call_later

logger = logging.getLogger("muri.launcher")

START_LIMIT_S: Final = 60.0
"""How long a supervisor may take to come: Slurm's controller may be busy."""

DETACH_S: Final = 2.0
"""How long a step's `srun` stays after its supervisor has come: Slurm completes the start with it."""

_HELLO_LIMIT_S: Final = 5.0
_POLL_S: Final = 0.2
_BINDING: Final = ("SLURM", "SBATCH_", "SRUN_", "CUDA_", "GPU_", "ROCR_", "HIP_", "ZE_", "PMI")
"""Variables that begin so would bind a new step to the runtime's own, or to its GPUs."""

_KEPT: Final = ("SLURM_CONF",)


class StartError(MuriError):
    """No supervisor came: nothing of the script has run."""


class SupervisorLostError(MuriError):
    """A supervisor ended without having told of its command's end."""


class Starter(Protocol):
    """A way to start supervisors."""

    @property
    def what(self) -> str:
        """The name of the started program, for messages."""

    @property
    def detaches(self) -> bool:
        """Whether the supervisor goes on without the process that has started it."""

    def command(self, member: str, supervisor: Sequence[str]) -> list[str]:
        """The command that leads to the command of a member's supervisor."""

    def environment(self) -> dict[str, str]:
        """The environment of that command."""


class ChildStarter:
    """Supervisors are children of this process."""

    what = "its process"
    detaches = False

    def command(self, member: str, supervisor: Sequence[str]) -> list[str]:
        """The supervisor itself."""
        del member
        return list(supervisor)

    def environment(self) -> dict[str, str]:
        """This process's own."""
        return dict(os.environ)


@dataclass(frozen=True, slots=True)
class StepStarter:
    """Supervisors are steps of the job in which this process runs, on its node.

    Attributes:
        job_id: The job.
        node: The node.
        gpus: The job's GPUs on that node; each step has all of them.
    """

    job_id: str
    node: str
    gpus: int
    what: str = field(default="its step", init=False)
    detaches: bool = field(default=True, init=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], gpus: int) -> "StepStarter":
        """Steps of the job and on the node that Slurm's variables name.

        Raises:
            UsageError: They name none.
        """
        try:
            return cls(environment["SLURM_JOB_ID"], environment["SLURMD_NODENAME"], gpus)
        except KeyError as error:
            raise UsageError(f"--steps works in a step of a Slurm job: {error} is not set") from error

    def command(self, member: str, supervisor: Sequence[str]) -> list[str]:
        """`srun` and the supervisor."""
        return [
            "srun", f"--jobid={self.job_id}", f"--nodelist={self.node}", f"--job-name={member}",
            "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", f"--gres=gpu:{self.gpus}", "--cpu-bind=none",
            "--mpi=none", "--input=none", *supervisor,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """This process's own without what describes its own step."""
        return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_BINDING)}


_controls: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_controls() -> None:
    """Close the connections in a forked process, which must not keep them open when the runtime dies."""
    for control in list(_controls):
        control.close()


os.register_at_fork(after_in_child=_close_controls)


class Supervisor:
    """A supervisor that has come, seen from the runtime.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, control: socket.socket, pid: int) -> None:
        self.pid: Final = pid
        self._control = control

    def run(self, wanted: Mapping[str, Any], files: Sequence[int]) -> None:
        """Let it start a command.

        Args:
            wanted: The command and what belongs to it, as `process_supervisor._become` reads it.
            files: The command's standard input, output and error, the gate's socket, the shared page.

        Raises:
            SupervisorLostError: It has ended.
        """
        body = json.dumps(wanted).encode()
        try:
            socket.send_fds(self._control, [process_supervisor.LENGTH.pack(len(body))], list(files))
            self._control.sendall(body)
        except OSError as error:
            raise SupervisorLostError("its process was ended before its script began") from error

    def pass_on(self, signum: int) -> None:
        """Let it send its command a signal; nothing happens once it has ended."""
        with contextlib.suppress(OSError):
            self._control.sendall(process_supervisor.SIGNAL.pack(signum))

    def wake(self) -> None:
        """Continue it, if a signal has stopped it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def started(self) -> int:
        """Wait until the command runs; its process id, 0 if the supervisor has ended."""
        report = self._report(process_supervisor.STARTED)
        return 0 if report is None else int(report[0])

    def ended(self) -> tuple[int, bool] | None:
        """Wait for the command's end.

        Returns:
            Its exit code and whether it, or rather its step, was told to end by another than the runtime; None
            if the supervisor has ended before it.
        """
        report = self._report(process_supervisor.ENDED)
        return None if report is None else (int(report[0]), bool(report[1]))

    def await_end(self) -> None:
        """Wait until it has ended, and with it all that the command has left behind."""
        with contextlib.suppress(OSError):
            while self._control.recv(1):
                pass

    def _report(self, form: struct.Struct) -> tuple[Any, ...] | None:
        with contextlib.suppress(OSError):
            report = self._control.recv(form.size, socket.MSG_WAITALL)
            return form.unpack(report) if len(report) == form.size else None
        return None


@contextlib.contextmanager
def supervised(starter: Starter, run_dir: Path, member: str) -> Iterator[Supervisor]:
    """Start a supervisor; at the end it is to have ended.

    Args:
        starter: How.
        run_dir: The private directory in which they meet.
        member: The member's job id.

    Raises:
        StartError: It did not come.
    """
    address = run_dir / f"start-{secrets.token_hex(4)}.sock"
    supervisor = [sys.executable, "-I", "-S", inherited.__file__, process_supervisor.__file__, str(address)]
    with contextlib.ExitStack() as open_ones:
        try:
            with _listening(run_dir, address) as listener:
                process = subprocess.Popen(
                    starter.command(member, supervisor),
                    stdin=subprocess.DEVNULL,
                    env=starter.environment(),
                    start_new_session=True,
                )
                if not starter.detaches:
                    open_ones.callback(process.wait)
                control, pid = _await_supervisor(listener, process, starter.what)
        except OSError as error:
            raise StartError(f"{starter.what} could not be started: {error}") from error
        open_ones.enter_context(control)
        _controls.add(control)
        if starter.detaches:
            call_later(DETACH_S, _detach, process)
        yield Supervisor(control, pid)


@contextlib.contextmanager
def _listening(run_dir: Path, address: Path) -> Iterator[socket.socket]:
    protocol.require_short(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, contextlib.ExitStack() as named:
        with protocol.publishing(run_dir):
            listener.bind(os.fspath(address))
            named.callback(address.unlink, missing_ok=True)
            listener.listen()
        yield listener


def _await_supervisor(
    listener: socket.socket, process: "subprocess.Popen[bytes]", what: str
) -> tuple[socket.socket, int]:
    """Wait until a supervisor has come; returns the connection and the supervisor's process id."""
    listener.settimeout(_POLL_S)
    end_s = time.monotonic() + START_LIMIT_S
    while True:
        exited = process.poll()
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if exited is not None:
                raise StartError(f"{what} did not start (code {exited})") from None
            if time.monotonic() >= end_s:
                process.terminate()
                call_later(DETACH_S, _detach, process)
                raise StartError(f"{what} did not start within {START_LIMIT_S:g} s") from None
            continue
        pid = _greeted(connection)
        if pid:
            return connection, pid
        connection.close()  # another runtime has looked for a listener


def _greeted(connection: socket.socket) -> int:
    """The supervisor's process id, as it and the kernel say; 0 for another process."""
    hello = process_supervisor.HELLO
    try:
        protocol.require_same_user(connection)
        connection.settimeout(_HELLO_LIMIT_S)
        said = connection.recv(hello.size, socket.MSG_WAITALL)
        connection.settimeout(None)
    except (OSError, protocol.ProtocolError) as error:
        logger.warning("a supervisor was not let in: %s", error)
        return 0
    return protocol.peer_pid(connection) if len(said) == hello.size else 0


def _detach(process: "subprocess.Popen[bytes]") -> None:
    """End a step's `srun`, if it is still there, and leave the step alone.

    When Slurm ends the runtime's job, it sends `srun` a SIGTERM too, which would then have the step killed at once.
    `srun` has a second process that has the step killed after a SIGKILL; both end here at the same time.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
