"""Which file system a file is on, and whether SQLite's write-ahead log can work there."""

from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

NETWORK: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "quobyte",
        "smb2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    }
)
"""Kinds, as the kernel names them, whose files several machines may open at once."""


def file_system_of(path: Path) -> str:
    """Kind of the file system that a path is on, as the kernel names it; "" when it cannot be told.

    Args:
        path: A file or directory; it need not exist yet.
    """
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    whole = path.absolute()
    with suppress(OSError):  # a link that may not be followed: the path as it is written is the best that is known
        whole = whole.resolve()
    return next((kinds[folder] for folder in (whole, *whole.parents) if folder in kinds), "")


def is_network(kind: str) -> bool:
    """Whether files on this kind may be open on several machines; all of FUSE counts, for nobody can tell."""
    return kind in NETWORK or kind.partition(".")[0] in ("fuse", "fuseblk")
