"""Exclusive locks on files and directories, given up by the kernel even if we are killed."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sandbox.progress import Progress


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


@contextlib.contextmanager
def locked_directory(directory: Path, progress: Progress, waiting_for: str) -> Iterator[None]:
    """Hold an exclusive lock on a directory, made if missing; the body may remove the directory."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # removed by another process in between
        try:
            _wait_for_lock(descriptor, progress, waiting_for)
            if _same_file(descriptor, directory):
                yield
                return
        finally:
            os.close(descriptor)


def _wait_for_lock(descriptor: int, progress: Progress, waiting_for: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress.step(f"waiting for {waiting_for}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
