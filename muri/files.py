"""Files that others read while written, and where processes meet: the run directory of a user's jobs on a node.

Root makes /run/muri/<uid> when a job starts (the SPANK plugin does so). Where it is missing, the directory lies in
/tmp, where another user may have taken its name: then it is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError

PRIVATE_FILE: Final = 0o600


def write_atomically(path: Path, text: str, mode: int | None = None, reader: int | None = None) -> None:
    """Replace a file in one step, so that a reader sees all of the old text or all of the new.

    Args:
        path: The file; its directory must exist. A link is replaced, not followed.
        text: The new content.
        mode: Permissions, such as 0o644; None for those that the umask leaves.
        reader: User id of the only user besides its owner who may read it; None: as `mode` says.

    Raises:
        OSError: The directory is missing, full or not writable, or its file system knows no readers.
    """
    # The process id keeps two writers apart; the leading dot hides the draft from those who list the directory.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # left by a writer that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Never wider than `mode`: a user who opens the draft early could read what is written later.
    handle = os.open(draft, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(text)
            if reader is not None:
                share_with(handle, reader, 0o4)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def atomic_json(path: Path, document: Any, mode: int | None = None, **layout: Any) -> None:
    """Replace a file by a document in JSON; `layout` as `json.dumps` takes it. See `write_atomically`."""
    write_atomically(path, json.dumps(document, **layout) + "\n", mode)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Let a file that a user asked for be written whole or not at all: a full disk leaves what was there before.

    Args:
        path: The file. A link stays and its target is replaced; a device or pipe is written to directly.

    Yields:
        The path to write to, of the same suffix.

    Raises:
        OSError: The directory is missing, full or not writable.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield draft
        if path.exists():
            import shutil  # takes time to load

            shutil.copymode(path, draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


_ACL: Final = "system.posix_acl_access"
_ACL_VERSION: Final = struct.Struct("<I")
_ACL_ENTRY: Final = struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID: Final = 0xFFFFFFFF


def share_with(handle: int, uid: int, may: int) -> None:
    """Give one user the same access to an open file as its owner, and others none, by an access control list.

    The file keeps its owner: another one could write it, and keep it on the owner's disk. A private group would do, but
    nothing shows that a user's group is private.

    Args:
        handle: The file.
        uid: The user.
        may: Permissions of both: 0o4 to read, 0o6 to write, too.

    Raises:
        OSError: The file system keeps no such lists, or the file is another user's.
    """
    entries = ((_OWNER, may, _NO_ID), (_USER, may, uid), (_GROUP, 0, _NO_ID), (_MASK, may, _NO_ID), (_OTHER, 0, _NO_ID))
    os.setxattr(handle, _ACL, _ACL_VERSION.pack(2) + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries))


RUN_DIR_VARIABLE: Final = "MURI_RUN_DIR"

SITE_RUN_DIR: Final = Path("/run/muri")
"""Where root makes a directory for each user."""

_OTHERS_MAY: Final = 0o077


class RendezvousError(MuriError):
    """The run directory, or a socket in it, cannot be trusted or used."""


def default_run_dir(environment: Mapping[str, str], site_run_dir: Path = SITE_RUN_DIR) -> Path:
    """$MURI_RUN_DIR, else /run/muri/<uid> where root has made it, else /tmp/muri-<uid>.

    In a container that maps users to others, <uid> is still the one outside: the job's.
    """
    explicit = environment.get(RUN_DIR_VARIABLE)
    if explicit:
        return Path(explicit)
    job_uid, uid = environment.get("SLURM_JOB_UID", ""), os.geteuid()
    of_job = site_run_dir / job_uid
    if job_uid.isdecimal() and of_job.is_dir() and of_job.stat().st_uid == uid:
        return of_job
    made_by_root = site_run_dir / str(uid)
    return made_by_root if made_by_root.is_dir() else Path(f"/tmp/muri-{uid}")  # noqa: S108 (verified)


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
