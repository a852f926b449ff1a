"""How fast the storage of a dataset is, without the page cache's help."""

import errno
import mmap
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muri.profiler.sensitivity.errors import StorageError

CHUNK_BYTES: Final = 4 * 1024 * 1024
READ_LIMIT_MIB: Final = 512.0
READ_LIMIT_S: Final = 3.0

_MIB: Final = 1024 * 1024
_GIB: Final = 1024 * _MIB
_SEED: Final = 1
_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured read bandwidth.

    Attributes:
        mib_per_s: What was read over the time it took.
        read_mib: How much was read.
        direct: Whether the page cache was bypassed (O_DIRECT); otherwise its pages were dropped before.
    """

    mib_per_s: float
    read_mib: float
    direct: bool


def files_of(dataset: Path) -> tuple[Path, ...]:
    """All files of a dataset, in the order of their names.

    Raises:
        StorageError: There are none, or they cannot be listed.
    """
    if dataset.is_file():
        return (dataset,)
    if not dataset.exists():
        raise StorageError(f"there is no dataset {dataset}; give a file or a folder")
    found = tuple(sorted(path for path in dataset.rglob("*") if path.is_file()))
    if not found:
        raise StorageError(f"the folder {dataset} holds no files that may be read")
    return found


def size_gib(files: Iterable[Path]) -> float:
    """Size of all files together."""
    return sum(path.stat().st_size for path in files) / _GIB


def measure_bandwidth(
    files: Sequence[Path], *, limit_mib: float = READ_LIMIT_MIB, limit_s: float = READ_LIMIT_S
) -> Bandwidth:
    """Read files in a shuffled order, as training does, until a limit is reached.

    Raises:
        StorageError: Nothing could be read.
    """
    shuffled = list(files)
    random.Random(_SEED).shuffle(shuffled)  # noqa: S311 -- an order, no secret
    read_bytes, direct = 0, True
    begin_s = time.perf_counter()
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:  # O_DIRECT needs memory at the start of a page
        for path in shuffled:
            fd, bypassed = _open(path)
            direct = direct and bypassed
            try:
                while count := os.readv(fd, [buffer]):
                    read_bytes += count
                    spent_s = time.perf_counter() - begin_s
                    if read_bytes >= limit_mib * _MIB or spent_s >= limit_s:
                        return Bandwidth(read_bytes / _MIB / spent_s, read_bytes / _MIB, direct)
            except OSError as error:
                raise StorageError(f"cannot read {path}: {error.strerror}") from error
            finally:
                os.close(fd)
    if not read_bytes:
        raise StorageError(f"the {len(files)} files of the dataset are empty")
    return Bandwidth(read_bytes / _MIB / (time.perf_counter() - begin_s), read_bytes / _MIB, direct)


def _open(path: Path) -> tuple[int, bool]:
    """Open past the page cache, or without the file's pages in it where the file system has no O_DIRECT."""
    try:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return fd, False
