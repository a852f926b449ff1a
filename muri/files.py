"""Files that others read while they are written again and again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str, mode: int | None = None, owner: int | None = None) -> None:
    """Replace a file in one step, so that a reader sees all of the old text or all of the new.

    Args:
        path: The file; its directory must exist. A link is replaced, not followed.
        text: What it will hold.
        mode: Permissions, such as 0o644; None for those that the umask leaves.
        owner: User id of its owner; None for the user that runs this.

    Raises:
        OSError: The directory is missing, full or not writable, or the file cannot be given away.
    """
    # The process id keeps two writers apart; the leading dot hides the draft from those who list the directory.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # left by a writer that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Never wider than `mode`: whoever opens the draft early could read what is written later.
    handle = os.open(draft, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(text)
            if owner is not None:
                os.fchown(handle, owner, -1)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def atomic_json(path: Path, document: Any, mode: int | None = None, owner: int | None = None, **layout: Any) -> None:
    """Replace a file by a document in JSON; `layout` as `json.dumps` takes it. See `write_atomically`."""
    write_atomically(path, json.dumps(document, **layout) + "\n", mode, owner)
