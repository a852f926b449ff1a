"""Finds the runtime of the job's group and attaches the script to it.

A script that runs as a thread there gets this process's signals, and this process its exit code. Any other script runs
here, with a gate to the runtime.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.files import RendezvousError, default_run_dir, verify_run_dir
from muri.launcher import protocol
from muri.launcher.job.environment import ATTACH_TIMEOUT_VARIABLE, run_of, seconds_of, task_of
from muri.launcher.job.scheduler import Membership
from muri.launcher.process_gate import gate_variables
from muri.launcher.script.checkpoint import conclude, go_back_for_memory

FORWARDED_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STANDARD_FILES: Final = (0, 1, 2)

_POLL_S: Final = 0.25
_EARLIER_RUN_S: Final = 100.0
"""A group gives a script of a job that Slurm has ended 60 s to be saved and 20 s to end; then it is killed."""
_FIRST_DOUBT_S: Final = 10.0
"""A runtime that has not come by then may never come: Slurm is asked whether its pilot job still runs."""


class RuntimeLostError(MuriError):
    """The runtime did not run the script to its end: the job must run again, not end."""

    exit_code = 75


class NoTurnsError(MuriError):
    """The script cannot take turns in its group; it may share the GPUs without them."""


class NoMemberError(RuntimeLostError):
    """The runtime knows the job as no member."""


def open_runtime(path: Path) -> socket.socket | None:
    """Connect to the runtime that listens under a name in the run directory; None when there is none.

    A RendezvousError or ProtocolError tells of a directory or a runtime that cannot be trusted.
    """
    try:
        verify_run_dir(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    connection = protocol.connect(path)
    if connection is not None:
        protocol.require_same_user(connection)
    return connection


def await_earlier_run(environment: Mapping[str, str], job_id: str) -> None:
    """Wait until no thread of an earlier run of the job is left in a group on this node, where it would write the same
    files; a runtime that does not answer is passed over.
    """
    frame = {"type": "leave", "job_id": job_id, "run": run_of(environment)}
    for path in sorted(default_run_dir(environment).glob(protocol.RUNTIMES)):
        with contextlib.suppress(MuriError, OSError), open_runtime(path) or contextlib.nullcontext() as connection:
            if connection is not None:
                connection.settimeout(_EARLIER_RUN_S)
                protocol.send_with_files(connection, frame, STANDARD_FILES)
                protocol.receive(connection)


def attach(connection: socket.socket, request: protocol.AttachRequest) -> int | dict[str, str]:
    """Attach to the runtime.

    Returns:
        The exit code of a script that has run there, as a thread, and has got this process's signals; for one that is
        to run here, the variables that it has besides the job's own, which tell it of its gate.

    Raises:
        RuntimeLostError: The runtime refused or died before the script ended.
        NoTurnsError: The member already runs another script there.
    """
    with connection:
        try:
            with _forwarding(connection) as came:
                protocol.send_with_files(connection, request.to_frame(), STANDARD_FILES)
                answer = _await_answer(connection)
        except (OSError, protocol.ProtocolError) as error:
            raise RuntimeLostError(f"the connection to the group's runtime broke: {error}") from error
    if not isinstance(answer, int):
        for number in came:  # they were meant for the script
            os.kill(os.getpid(), number)
    return answer


def _await_answer(connection: socket.socket) -> int | dict[str, str]:
    while (answer := protocol.receive_with_files(connection, 2, maybe_none=True)) is not None:
        frame, files = answer
        kind, reason = frame["type"], str(frame.get("reason", "no reason given"))
        if kind == protocol.HOME and files:
            return {**frame.get("environment", {}), **gate_variables(*files, traced=bool(frame.get("traced")))}
        if kind == "exit" and frame.get("out_of_memory"):
            go_back_for_memory(os.environ)
        if kind == "preempted":
            conclude(os.environ)
        if kind in {"exit", "preempted"}:
            return int(frame["code"])
        if kind == "lost":
            raise RuntimeLostError(f"the group's runtime gave the script up: {reason}")
        if kind == "refused" and frame.get("kind") == "busy":
            raise NoTurnsError(reason)
        if kind == "refused":
            error = NoMemberError if frame.get("kind") == "member" else RuntimeLostError
            raise error(f"the group's runtime refused the script: {reason}")
    raise RuntimeLostError("the group's runtime ended before the script did")


@contextlib.contextmanager
def _forwarding(connection: socket.socket) -> Iterator[list[int]]:
    """Forward signals; at the end everything is as before, and the list has those that came."""
    came: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        came.append(signum)
        with contextlib.suppress(OSError):  # receiving reports that the runtime is gone
            protocol.send(connection, {"type": "signal", "signum": signum})

    previous = {number: signal.signal(number, forward) for number in FORWARDED_SIGNALS}
    # A thread blocks those that this process did.
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    try:
        yield came
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_for_runtime(
    environment: Mapping[str, str], pilot: str, membership: Callable[[], Membership], clock: Clock = MACHINE_CLOCK
) -> socket.socket:
    """Wait for the runtime of this job's group, of several the one of this process's rank.

    If it is late, ask `membership()` whether the pilot job still runs.

    Raises:
        RuntimeLostError: No runtime came, or it cannot be trusted.
        NoTurnsError: There is no way to the runtime from here.
        UsageError: $MURI_ATTACH_TIMEOUT_S is not a number of seconds.
    """
    timeout_s = seconds_of(environment, ATTACH_TIMEOUT_VARIABLE)
    begun_s = clock()
    doubt_s = begun_s + _FIRST_DOUBT_S
    while True:
        run_dir, rank = default_run_dir(environment), task_of(environment)[0]
        try:
            connection = open_runtime(protocol.pilot_socket(run_dir, pilot)) or open_runtime(
                protocol.pilot_socket(run_dir, pilot, rank)
            )
        except (RendezvousError, protocol.ProtocolError) as error:
            raise RuntimeLostError(f"the runtime of pilot job {pilot} cannot be trusted: {error}") from error
        if connection is not None:
            return connection
        if clock() >= doubt_s:
            _require_pilot(membership(), pilot)
            if not run_dir.exists():
                raise NoTurnsError(f"there is no {run_dir} here, as in a container into which /run/muri is not mounted")
            doubt_s += clock() - begun_s
        if clock() >= begun_s + timeout_s:
            raise RuntimeLostError(f"the runtime of pilot job {pilot} did not come within {timeout_s:g} s")
        clock.sleep(_POLL_S)


def _require_pilot(membership: Membership, pilot: str) -> None:
    """Raise an error if the pilot job has ended, instead of waiting on."""
    try:
        runs = membership.runs(pilot)
    except MuriError:
        return  # it is asked again
    if not runs:
        raise RuntimeLostError(f"pilot job {pilot}, which was to hold the job's GPUs, has ended")


def require_no_group(job_id: str, membership: Membership) -> None:
    """Raise a RuntimeLostError if a job without a grant is in a group, or that is not known: it must not run alone."""
    try:
        place = membership.await_place(job_id)
    except MuriError as error:  # running alone could mean running without GPUs
        raise RuntimeLostError(f"it is not known whether job {job_id} is in a group: {error}") from error
    if place is not None:
        pilot = f" of pilot job {place.pilot}" if place.pilot else ""
        raise RuntimeLostError(
            f"job {job_id} is in the group{pilot}, whose GPUs Muri's SPANK plugin has not opened for it here"
        )
