"""Where processes meet: the run directory of a user's jobs on a node, and connections that are not identified yet.

Root makes /run/muri/<uid> when a job starts (the SPANK plugin does so). Where it is missing, the directory lies in
/tmp, where another user may have taken its name: then it is refused.
"""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError

RUN_DIR_VARIABLE: Final = "MURI_RUN_DIR"

SITE_RUN_DIR: Final = Path("/run/muri")
"""Where root makes a directory for each user."""

_OTHERS_MAY: Final = 0o077


class RendezvousError(MuriError):
    """The run directory, or a socket in it, cannot be trusted or used."""


def default_run_dir(environment: Mapping[str, str], site_run_dir: Path = SITE_RUN_DIR) -> Path:
    """$MURI_RUN_DIR, else /run/muri/<uid> where root has made it, else /tmp/muri-<uid>."""
    explicit = environment.get(RUN_DIR_VARIABLE)
    if explicit:
        return Path(explicit)
    made_by_root = site_run_dir / str(os.geteuid())
    return made_by_root if made_by_root.is_dir() else Path(f"/tmp/muri-{os.geteuid()}")  # noqa: S108 (verified)


def use_file(status: Path) -> Path:
    """Where a pilot job writes what its node is used for, beside its runtime's status file."""
    return status.with_suffix(".use.json")


def verify_run_dir(run_dir: Path) -> None:
    """Raise a RendezvousError unless it is a directory of this user that others cannot enter."""
    status = run_dir.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RendezvousError(f"the run directory {run_dir} is a link or a file; remove it or set {RUN_DIR_VARIABLE}")
    if status.st_uid != os.geteuid():
        raise RendezvousError(
            f"the run directory {run_dir} belongs to user id {status.st_uid}, not to {os.geteuid()}; "
            f"set {RUN_DIR_VARIABLE} to a directory of your own"
        )
    if status.st_mode & _OTHERS_MAY:
        raise RendezvousError(
            f"the run directory {run_dir} has mode {stat.S_IMODE(status.st_mode):04o}, so others can enter; "
            f"it must be 0700: chmod 700 {run_dir}"
        )


def make_run_dir(run_dir: Path) -> None:
    """Create the directory if it is missing and verify it; a RendezvousError says why it cannot be used."""
    try:
        run_dir.mkdir(mode=0o700, exist_ok=True)
        verify_run_dir(run_dir)
    except OSError as error:
        raise RendezvousError(f"cannot use the run directory {run_dir}: {error.strerror}") from error


class Newcomers:
    """Bounds the connections that have not identified themselves, so that strangers leave room for peers.

    One more than `most` closes the oldest: an expected peer has identified itself by then.
    """

    def __init__(self, most: int, clock: Clock = MACHINE_CLOCK) -> None:
        self._most: Final = most
        self._clock: Final = clock
        self._lock = threading.Lock()
        self._since_s: dict[socket.socket, float] = {}

    def add(self, raw: socket.socket) -> None:
        """Add one; a thread that waits for the one that is closed for it sees its end."""
        with self._lock:
            self._since_s[raw] = self._clock()
            if len(self._since_s) > self._most:
                self._end(next(iter(self._since_s)))

    def take(self, raw: socket.socket) -> bool:
        """Remove a connection; returns whether it was still among them."""
        with self._lock:
            return self._since_s.pop(raw, None) is not None

    def end_older(self, than_s: float) -> None:
        """Close those that came so many seconds ago, whether or not they have sent something since."""
        with self._lock:
            late_s = self._clock() - than_s
            for raw in [raw for raw, since_s in self._since_s.items() if since_s <= late_s]:
                self._end(raw)

    def _end(self, raw: socket.socket) -> None:
        del self._since_s[raw]
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
