"""Finds the status files of the groups on this node."""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from muri.errors import MuriError, UsageError
from muri.launcher import rendezvous

STALE_S: Final = 10.0
"""A runtime writes its status every second; an older file is that of one that died or hangs."""

_STATUS_NAME: Final = re.compile(r"host-\d+(\.rank\d+)?\.json")
_RUN_DIR_NAME: Final = re.compile(r"muri-(\d+)")


class NoGroupError(MuriError):
    """There is no group to look at."""


class StatusFileError(UsageError):
    """A status file was named that is none."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group's status.

    Attributes:
        path: Where it was read.
        status: The content of the file, see docs/telemetry.md.
        age_s: Seconds since it was written.
    """

    path: Path
    status: Mapping[str, Any]
    age_s: float

    @property
    def stale(self) -> bool:
        """Whether the runtime has stopped writing."""
        return self.age_s > STALE_S

    def to_json(self) -> dict[str, object]:
        """For `--json`."""
        return {"file": str(self.path), "age_s": round(self.age_s, 1), "stale": self.stale, **self.status}


def read_group(path: Path, now_s: float | None = None) -> GroupView:
    """Read one status file.

    Raises:
        StatusFileError: It is missing, unreadable or something else.
    """
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StatusFileError(f"cannot read the status file {path}: {error.strerror}") from error
    except ValueError as error:
        raise StatusFileError(f"{path} is no status file of a runtime: it is not JSON ({error})") from error
    if not isinstance(status, dict) or not isinstance(status.get("members"), dict) or "discipline" not in status:
        raise StatusFileError(
            f"{path} is no status file of a runtime: it lacks the members; a runtime writes one with --status-file"
        )
    return GroupView(path, status, max(0.0, (now_s or time.time()) - _written_s(status, path)))


def _written_s(status: Mapping[str, Any], path: Path) -> float:
    try:
        return datetime.fromisoformat(str(status["updated"])).timestamp()
    except (KeyError, ValueError):
        return path.stat().st_mtime


def run_dirs(environment: Mapping[str, str]) -> list[Path]:
    """The run directories to look into: the user's own; for root those of all users, if nobody tampered with them."""
    own = rendezvous.default_run_dir(environment)
    if os.geteuid() != 0 or environment.get(rendezvous.RUN_DIR_VARIABLE):
        return [own]
    return sorted(path for path in own.parent.glob("muri-*") if _belongs_to_its_user(path))


def _belongs_to_its_user(path: Path) -> bool:
    name = _RUN_DIR_NAME.fullmatch(path.name)
    try:
        facts = path.lstat()
    except OSError:
        return False
    return name is not None and not path.is_symlink() and facts.st_uid == int(name[1]) and not facts.st_mode & 0o077


def find_groups(environment: Mapping[str, str]) -> list[GroupView]:
    """All groups on this node, ordered by file; a file that vanishes or is being replaced is left out.

    Raises:
        NoGroupError: There is none; the text says where one could be looked at.
    """
    looked, groups = run_dirs(environment), []
    for run_dir in looked:
        try:
            names = sorted(path for path in run_dir.iterdir() if _STATUS_NAME.fullmatch(path.name))
        except OSError:
            continue
        for path in names:
            try:
                groups.append(read_group(path))
            except StatusFileError:
                continue
    if not groups:
        raise NoGroupError(_nothing_found(looked))
    return groups


def _nothing_found(looked: list[Path]) -> str:
    where = ", ".join(map(str, looked)) or "/tmp/muri-<uid>"  # noqa: S108 (only named)
    return (
        f"no group of yours runs on this node (looked in {where}). A group's status is on the node that it runs on: "
        "find its host job in the column GROUP of `muri queue`, then `srun --overlap --pty --jobid=GROUP muri top`. "
        "For a runtime that you started yourself: muri top --file STATUS, as given to its --status-file"
    )
