"""Files that the controller trusts: their owners, other users' access, and how they are made."""

import errno
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muri.errors import MuriError

ROOT_UID: Final = 0

OTHERS_MAY: Final = 0o077
"""Permissions of users other than a file's owner, of any kind."""

_OTHERS_WRITE: Final = 0o022

_MOST_LINKS: Final = 40
"""As many as the kernel follows."""


class UnsafeFileError(MuriError):
    """A file or directory belongs to another user, is a link, or others could change it."""


def user_name(uid: int) -> str:
    """Return the name of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def only_its_owner_writes(facts: os.stat_result) -> bool:
    """Whether a file's own facts are those of a directory into which no other user may write."""
    return stat.S_ISDIR(facts.st_mode) and not facts.st_mode & _OTHERS_WRITE


def make_private_directory(path: Path) -> None:
    """Make a directory that only its owner, this process's user, can enter; one that exists is tightened to 0700.

    Raises:
        UnsafeFileError: It cannot be made or entered, is a link or a file, belongs to another user, or is open to
            others and seems to serve more than Muri.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        facts = os.fstat(handle)
        _require_own(path, facts)
        if facts.st_mode & OTHERS_MAY:
            # A directory such as /tmp or /var/lib, named by mistake, must stay open to other users.
            with os.scandir(handle) as entries:
                has_folders = any(entry.is_dir(follow_symlinks=False) for entry in entries)
            if facts.st_mode & stat.S_ISVTX or has_folders:
                raise UnsafeFileError(
                    f"{path} is open to others and not Muri's alone: name another directory, or chmod 700 {path}"
                )
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def open_private_file(path: Path) -> int:
    """Open a file of this process's user for reading and writing, mode 0600; an empty one is made if there is none.

    Returns:
        The file descriptor, which the caller closes.

    Raises:
        UnsafeFileError: It cannot be opened, is a link or no plain file, or belongs to another user.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        facts = os.fstat(handle)
        _require_own(path, facts, plain=True)
        os.fchmod(handle, 0o600)
    except BaseException:
        os.close(handle)
        raise
    return handle


def why_unsafe(path: Path) -> str | None:
    """Say why a file's content must not be trusted; None when only root and this process's user could change it.

    Args:
        path: An existing file or directory; each link on the way to it counts, with its directories.

    Raises:
        OSError: It, or a directory on the way, cannot be looked at.
    """
    for place in _on_the_way(path):
        facts = place.lstat()
        if facts.st_uid not in {ROOT_UID, os.geteuid()}:
            return f"{place} belongs to {user_name(facts.st_uid)}"
        # In a directory like /tmp no user can replace files of another one.
        shielded = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
        if facts.st_mode & _OTHERS_WRITE and not shielded and not stat.S_ISLNK(facts.st_mode):
            return f"others may write {place} (mode {stat.S_IMODE(facts.st_mode):04o})"
    return None


def _on_the_way(path: Path) -> Iterator[Path]:
    """Yield each directory and link that the kernel passes when it opens a path, and the end of the path."""
    here, links, left = Path("/"), 0, list(reversed(path.absolute().parts))
    while left:
        # An absolute link's first part is "/", which starts over.
        here = here.parent if left[-1] == ".." else here / left[-1]
        left.pop()
        yield here
        if here.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            left += reversed(here.readlink().parts)
            here = here.parent


def _require_own(path: Path, facts: os.stat_result, *, plain: bool = False) -> None:
    if plain and not stat.S_ISREG(facts.st_mode):
        raise UnsafeFileError(f"{path} is not a plain file; move it away")
    if facts.st_uid != os.geteuid():
        owner, user = user_name(facts.st_uid), user_name(os.geteuid())
        raise UnsafeFileError(f"{path} belongs to {owner}, not to {user}: run this as {owner}, or move it away")


def _refusal(path: Path, error: OSError) -> UnsafeFileError:
    if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EEXIST} and path.is_symlink():
        return UnsafeFileError(f"{path} is a link, which others could have made; name the place that it leads to")
    if error.errno in {errno.EACCES, errno.EPERM}:
        owner, user = _owner_of_nearest(path), user_name(os.geteuid())
        return UnsafeFileError(f"{user} may not use {path}: run this as {owner}, or as the controller's user")
    return UnsafeFileError(f"cannot use {path}: {error.strerror}")


def _owner_of_nearest(path: Path) -> str:
    """Return the owner of the first directory upwards whose facts can be read."""
    for folder in (path, *path.absolute().parents):
        try:
            return user_name(folder.stat().st_uid)
        except OSError:
            continue
    return user_name(ROOT_UID)
