"""Files that others read while they are written again and again."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str, mode: int | None = None) -> None:
    """Replace a file in one step, so that a reader sees all of the old text or all of the new.

    Args:
        path: The file; its directory must exist.
        text: What it will hold.
        mode: Permissions, such as 0o644; None for those that the umask leaves.

    Raises:
        OSError: The directory is missing, full or not writable.
    """
    # The process id keeps two writers apart; the leading dot hides the draft from those who list the directory.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    if mode is not None:
        draft.chmod(mode)
    draft.replace(path)


def atomic_json(path: Path, document: Any, mode: int | None = None, **layout: Any) -> None:
    """Replace a file by a document in JSON; `layout` as `json.dumps` takes it. See `write_atomically`."""
    write_atomically(path, json.dumps(document, **layout) + "\n", mode)
