"""Files that others read while they are written again and again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

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
