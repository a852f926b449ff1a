"""Status files for users: each finds their own jobs in a file that nobody else can read.

The status directory holds `<uid>.json` for every user with jobs, and `cycle.json`, which says when the last cycle
finished and nothing of any job. So no text of one user reaches another, whatever Slurm's PrivateData says.
"""

import errno
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from muri.files import atomic_json
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.status import (
    STATUS_NAME,
    NoStatusError,
    Status,
    age_s,
    read_status,
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
    write_status(config.state_dir / STATUS_NAME, status)
    try:
        _publish(config.status_dir, status, {job_id: job.uid for job_id, job in view.jobs.items()})
    except OSError as error:
        log.warning(
            "users cannot see why their jobs wait: cannot write %s: %s. See `muri doctor`",
            config.status_dir, error.strerror,
        )  # fmt: skip


def _publish(folder: Path, status: Status, owners: Mapping[int, int]) -> None:
    """Replace the files of users that have jobs, and remove those of users that have none.

    Raises:
        OSError: The directory or a file cannot be written, or the directory is not this user's alone to write.
    """
    _make_public_directory(folder)
    about = asdict(replace(status, jobs=(), errors=(), slurm_calls={}))  # what Slurm refused may quote anybody
    own: dict[int, list[dict[str, object]]] = {}
    for job in status.jobs:
        if job.job_id in owners:
            own.setdefault(owners[job.job_id], []).append(asdict(job))
    for uid, jobs in own.items():
        atomic_json(folder / f"{uid}.json", about | {"jobs": jobs}, 0o400, uid, sort_keys=True)
    for path in folder.glob("*.json"):
        if path.stem.isdecimal() and int(path.stem) not in own:
            path.unlink()
    atomic_json(folder / CYCLE_NAME, about, 0o644, sort_keys=True)  # last: its time says that all is written


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
