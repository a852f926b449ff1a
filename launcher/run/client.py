"""Finds the runtime of the job's group, attaches the script to it, and forwards signals and the exit code."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError, UsageError
from muri.files import RendezvousError, default_run_dir, verify_run_dir
from muri.group_spec import Place
from muri.launcher import protocol
from muri.launcher.job.environment import attach_timeout_s, run_of, task_of
from muri.launcher.job.scheduler import Membership
from muri.launcher.script.checkpoint import conclude

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


class OutOfMemoryBesideOthersError(MuriError):
    """The script ended for lack of GPU memory while others shared its GPUs; `exit_code` is its own."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the script ran out of GPU memory while others shared its GPU")
        self.exit_code = exit_code


class AttachBusyError(UsageError):
    """The member already has a session in the runtime."""


def find_runtime(environment: Mapping[str, str], job_id: str) -> socket.socket | None:
    """Connect to the runtime of the job's group; None when there is none. Errors as of `open_runtime`."""
    return _open_any(environment, partial(protocol.member_socket, default_run_dir(environment), job_id))


def _open_any(environment: Mapping[str, str], name: Callable[[int | None], Path]) -> socket.socket | None:
    """Connect to the runtime of a group on one GPU, else to that of this process's rank; `name` takes the rank."""
    return open_runtime(name(None)) or open_runtime(name(task_of(environment)[0]))


def open_runtime(path: Path) -> socket.socket | None:
    """Connect to the runtime that listens under a name in the run directory; None when there is none.

    Raises:
        RendezvousError: The run directory cannot be trusted.
        ProtocolError: The runtime belongs to another user.
    """
    run_dir = path.parent
    if not run_dir.is_symlink() and not run_dir.exists():
        return None
    verify_run_dir(run_dir)
    connection = protocol.connect(path)
    if connection is not None:
        protocol.require_same_user(connection)
    return connection


def await_earlier_run(environment: Mapping[str, str], job_id: str) -> None:
    """Wait until no script of an earlier run of the job is left in a group on this node, where it would write the same
    files; a runtime that does not answer is passed over.
    """
    frame = {"type": "leave", "job_id": job_id, "run": run_of(environment)}
    for path in sorted(default_run_dir(environment).glob(protocol.RUNTIMES)):
        with contextlib.suppress(MuriError, OSError), open_runtime(path) or contextlib.nullcontext() as connection:
            if connection is not None:
                connection.settimeout(_EARLIER_RUN_S)
                protocol.send_with_files(connection, frame, STANDARD_FILES)
                protocol.receive(connection)


def attach(connection: socket.socket, request: protocol.AttachRequest) -> int:
    """Let the runtime run the script, forward signals, and return the script's exit code.

    Raises:
        RuntimeLostError: The runtime refused or died before the script ended.
        AttachBusyError: The member already runs another script there.
        OutOfMemoryBesideOthersError: The script ended for lack of GPU memory, and others shared the GPUs.
    """
    with connection:
        try:
            with _forwarding(connection):
                protocol.send_with_files(connection, request.to_frame(), STANDARD_FILES)
                return _await_exit(connection)
        except (OSError, protocol.ProtocolError) as error:
            raise RuntimeLostError(f"the connection to the group's runtime broke: {error}") from error


def _await_exit(connection: socket.socket) -> int:
    while (frame := protocol.receive(connection)) is not None:
        kind, reason = frame["type"], str(frame.get("reason", "no reason given"))
        if kind == "exit" and frame.get("out_of_memory"):
            raise OutOfMemoryBesideOthersError(int(frame["code"]))
        if kind == "preempted":
            conclude(os.environ)
        if kind in {"exit", "preempted"}:
            return int(frame["code"])
        if kind == "lost":
            raise RuntimeLostError(f"the group's runtime gave the script up: {reason}")
        if kind == "refused" and frame.get("kind") == "busy":
            raise AttachBusyError(reason)
        if kind == "refused":
            raise RuntimeLostError(f"the group's runtime refused the script: {reason}")
    raise RuntimeLostError("the group's runtime ended before the script did")


@contextlib.contextmanager
def _forwarding(connection: socket.socket) -> Iterator[None]:
    def forward(signum: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # receiving reports that the runtime is gone
            protocol.send(connection, {"type": "signal", "signum": signum})

    previous = {number: signal.signal(number, forward) for number in FORWARDED_SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)  # the script blocks those that this process did
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_for_runtime(
    environment: Mapping[str, str], job_id: str, membership: Membership, clock: Clock = MACHINE_CLOCK
) -> socket.socket | None:
    """Wait for the runtime if the scheduler says that the job is in a group; None when it may run alone.

    Raises:
        RuntimeLostError: The job is in a group, or that is not known, and no runtime came.
        UsageError: $MURI_ATTACH_TIMEOUT_S is not a number of seconds.
    """
    timeout_s = attach_timeout_s(environment)
    deadline_s = clock() + timeout_s
    place: Place | None = None
    begun_s, doubt_s = clock(), clock() + _FIRST_DOUBT_S
    while True:
        distrust, connection = _look_for_runtime(environment, job_id, place)
        if connection is not None:
            return connection
        if place is None:
            try:
                place = membership.await_place(job_id)
            except MuriError:
                pass  # the next poll asks again; running alone could mean running twice
            else:
                if place is None:
                    return None
                continue
        elif distrust is not None:
            raise RuntimeLostError(f"the runtime of the group of job {job_id} cannot be trusted: {distrust}")
        if clock() >= doubt_s:
            _require_pilot(membership, place)
            doubt_s += clock() - begun_s
        if clock() >= deadline_s:
            raise RuntimeLostError(f"the runtime of the group of job {job_id} did not come within {timeout_s:g} s")
        clock.sleep(_POLL_S)


def _require_pilot(membership: Membership, place: Place | None) -> None:
    """Raise an error if the pilot job has ended, instead of waiting on."""
    if place is None or not place.pilot:
        return
    try:
        runs = membership.runs(place.pilot)
    except MuriError:
        return  # it is asked again
    if not runs:
        raise RuntimeLostError(f"pilot job {place.pilot}, which was to hold the job's GPUs, has ended")


def _look_for_runtime(
    environment: Mapping[str, str], job_id: str, place: Place | None
) -> tuple[MuriError | None, socket.socket | None]:
    """Return a connection, None if there is none, after the reason why the run directory or runtime cannot be trusted.

    After a requeue the job's own name may still lead to the group that it was taken out of.
    """
    pilot = "" if place is None else place.pilot
    by_own_name = not run_of(environment) or (place is not None and not pilot)
    try:
        connection = find_runtime(environment, job_id) if by_own_name else None
        if connection is None and pilot:
            connection = _open_any(environment, partial(protocol.pilot_socket, default_run_dir(environment), pilot))
    except (RendezvousError, protocol.ProtocolError) as error:
        return error, None
    return None, connection
