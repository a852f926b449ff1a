"""Status files for users: each finds their own jobs in a file that nobody else can read.

The status directory holds `<uid>.json`, root's own, for every user with jobs, and `cycle.json`, which says when the
last cycle finished and nothing of any job. So no text of one user reaches another, whatever Slurm's PrivateData says.
"""

import errno
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from muri.files import write_atomically
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.status import (
    STATUS_NAME,
    NoStatusError,
    Status,
    age_s,
    lines_of,
    read_status,
    with_lines,
    write_status,
)
from muri.slurm_plugin.private_files import ROOT_UID, user_name
from muri.slurm_plugin.records.roles import View

log = logging.getLogger("muri.controller")

CYCLE_NAME: Final = "cycle.json"

_OTHERS_WRITE: Final = 0o022


def report(config: Config, status: Status, view: View) -> None:
    """Write a cycle's status for the controller's user, and to each user what concerns their own jobs.

    A user's file that cannot be written costs only that file: the cycle itself has succeeded.
    """
    lines = lines_of(status.jobs)
    write_status(config.state_dir / STATUS_NAME, status, lines)
    try:
        _publish(config.status_dir, status, lines, view)
    except OSError as error:
        log.warning(
            "users cannot see why their jobs wait: cannot write %s: %s. See `muri doctor`",
            config.status_dir, error.strerror,
        )  # fmt: skip


def _publish(folder: Path, status: Status, lines: Mapping[int, str], view: View) -> None:
    """Replace the files of users that have jobs, and remove those of users that have none.

    Raises:
        OSError: The directory or a file cannot be written, or the directory is not this user's alone to write.
    """
    _make_public_directory(folder)
    about = replace(status, errors=(), slurm_calls={})  # what Slurm refused may quote anybody
    own: dict[int, list[str]] = {}
    for job_id, line in lines.items():
        if job_id in view.jobs:
            own.setdefault(view.jobs[job_id].uid, []).append(line)
    for uid, users in own.items():
        write_atomically(folder / f"{uid}.json", with_lines(about, users), 0o400, reader=uid)
    for path in folder.glob("*.json"):
        if path.stem.isdecimal() and int(path.stem) not in own:
            path.unlink()
    write_atomically(folder / CYCLE_NAME, with_lines(about, ()), 0o644)  # last: its time says that all is written


def _make_public_directory(folder: Path) -> None:
    for path in (folder.parent, folder):
        if not path.exists():
            path.mkdir()
            path.chmod(0o755)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS_WRITE:
        raise NotADirectoryError(errno.ENOTDIR, "it must be a directory that only the controller may write")


def latest_status(config: Config) -> tuple[Status, str | None]:
    """Return what the last cycle decided, as far as this user may know, and whose jobs it tells of.

    Returns:
        The status, with None for all jobs or the name of the user whose jobs it has. Where no controller has left
        anything, such as on a login host, the status is empty and of a cycle at time 0.

    Raises:
        StatusError: A status file is damaged.
    """
    try:
        return read_status(config.state_dir / STATUS_NAME), None
    except NoStatusError:
        reader = None if os.geteuid() == ROOT_UID else user_name(os.geteuid())
    for name in (f"{os.geteuid()}.json", CYCLE_NAME):
        try:
            return read_status(config.status_dir / name), reader
        except NoStatusError:
            continue
    return Status(0.0, "", ""), reader


def cycle_age_s(config: Config, now_s: float) -> float | None:
    """Return the seconds since the last finished cycle, for any user; None when that is not known here."""
    ages = (age_s(path, now_s) for path in (config.state_dir / STATUS_NAME, config.status_dir / CYCLE_NAME))
    return next((age for age in ages if age is not None), None)
