"""The run directory: where the jobs of one user and the runtime of their group meet on a node.

Root makes /run/muri/<uid> when a job starts (the SPANK plugin does so). Where it is missing, the directory lies in
/tmp, where another user may have taken its name: then it is refused.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

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
    """Make sure that only this user can enter the directory.

    Raises:
        RendezvousError: It is a link, no directory, belongs to another user, or is open to others.
    """
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
    """Create the directory if it is missing and verify it.

    Raises:
        RendezvousError: It cannot be made, or cannot be trusted.
    """
    try:
        run_dir.mkdir(mode=0o700, exist_ok=True)
        verify_run_dir(run_dir)
    except OSError as error:
        raise RendezvousError(f"cannot use the run directory {run_dir}: {error.strerror}") from error
