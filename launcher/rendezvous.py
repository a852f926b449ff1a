"""Where members find their runtime: a private directory with one socket name per member."""

import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muri.errors import MuriError

RUN_DIR_VARIABLE: Final = "MURI_RUN_DIR"
LONGEST_SOCKET_PATH: Final = 107
"""The kernel's limit for the path of a Unix socket, in bytes."""


class RendezvousError(MuriError):
    """The run directory cannot be trusted or used."""


def default_run_dir(environment: Mapping[str, str]) -> Path:
    """$MURI_RUN_DIR, else /tmp/muri-<uid>."""
    return Path(environment.get(RUN_DIR_VARIABLE) or f"/tmp/muri-{os.geteuid()}")  # noqa: S108 (verified)


def verify_run_dir(run_dir: Path) -> None:
    """Make sure that only this user can enter the directory.

    Raises:
        RendezvousError: It is a link, not a directory, another user's, or open to others.
    """
    status = run_dir.lstat()
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise RendezvousError(f"the run directory {run_dir} is a link or a file; remove it or set {RUN_DIR_VARIABLE}")
    if status.st_uid != os.geteuid():
        raise RendezvousError(
            f"the run directory {run_dir} belongs to user id {status.st_uid}, not to {os.geteuid()}; "
            f"set {RUN_DIR_VARIABLE} to a directory of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise RendezvousError(
            f"the run directory {run_dir} has mode {stat.S_IMODE(status.st_mode):04o}, so others can enter; "
            f"it must be 0700: chmod 700 {run_dir}"
        )


def make_run_dir(run_dir: Path) -> None:
    """Create the directory if it is missing and verify it.

    Raises:
        RendezvousError: It cannot be made, or cannot be trusted.
    """
    try:
        run_dir.mkdir(mode=0o700, exist_ok=True)
        verify_run_dir(run_dir)
    except OSError as error:
        raise RendezvousError(f"cannot use the run directory {run_dir}: {error.strerror}") from error


def member_socket(run_dir: Path, job_id: str, rank: int | None = None) -> Path:
    """The name under which a member finds its runtime; with a rank in a group of several ranks."""
    return run_dir / (f"job-{job_id}.sock" if rank is None else f"job-{job_id}.r{rank}.sock")


def host_socket(run_dir: Path, host_job: str) -> Path:
    """The name under which a new member finds the runtime of a host job."""
    return run_dir / f"host-{host_job}.sock"


def runtime_socket(run_dir: Path, pid: int) -> Path:
    """The socket on which a runtime listens; the members' names lead to it."""
    return run_dir / f"runtime-{pid}.sock"


def require_short(path: Path) -> None:
    """Refuse a socket path that the kernel cannot take.

    Raises:
        RendezvousError: The path is too long.
    """
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise RendezvousError(
            f"the socket path {path} is longer than {LONGEST_SOCKET_PATH} bytes; set {RUN_DIR_VARIABLE} to a "
            "shorter directory"
        )


def connect(path: Path) -> socket.socket | None:
    """Connect to a runtime's socket; None when nobody listens there.

    Raises:
        RendezvousError: Something else than absence stands in the way.
    """
    require_short(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise RendezvousError(f"cannot connect to {path}: {error.strerror}") from error
    return connection


def remove_stale_sockets(run_dir: Path) -> None:
    """Remove the names that runtimes which died have left behind."""
    for path in sorted(run_dir.glob("*.sock")):
        probe = connect(path)
        if probe is None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        else:
            probe.close()
