"""Opening the store's SQLite file, in a way that its file system allows, and naming what goes wrong.

Two ways of writing, chosen by `journal_of`:

* "wal": a write-ahead log. Readers and a writer don't wait for each other, and a commit needs no fsync to
  outlive its process. It needs memory that all processes share, which only one machine can give.
* "delete": a rollback journal, with an fsync at each commit. It needs only file locks.
"""

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, get_args
from urllib.parse import quote

from muri.profiler.errors import (
    CorruptStoreError,
    JournalChoiceError,
    StoreBusyError,
    StoreError,
    StorePermissionError,
)
from muri.profiler.file_system import file_system_of, is_network

BUSY_TIMEOUT_S: Final = 30.0
JOURNAL_VARIABLE: Final = "MURI_STORE_JOURNAL"

Journal = Literal["wal", "delete"]
JOURNALS: Final[tuple[Journal, ...]] = get_args(Journal)

_SYNCHRONOUS: Final[dict[Journal, str]] = {"wal": "NORMAL", "delete": "FULL"}
_FORMAT_BYTES: Final = slice(18, 20)
_FORMAT_OF_WAL: Final = b"\x02\x02"
_RETRY_S: Final = 0.005


def journal_of(path: Path) -> Journal:
    """How the store is to be written: $MURI_STORE_JOURNAL, else what its file system allows.

    A store that has a rollback journal keeps it on any file system: machines to which it is remote may
    have it open.

    Raises:
        JournalChoiceError: The variable holds something else.
    """
    forced = os.environ.get(JOURNAL_VARIABLE, "")
    if forced:
        if forced not in JOURNALS:
            raise JournalChoiceError(JOURNAL_VARIABLE, forced, JOURNALS)
        return forced
    if is_network(file_system_of(path)):
        return "delete"
    return existing_journal(path) or "wal"


def existing_journal(path: Path) -> Journal | None:
    """What the file's header says; None when there is no header yet."""
    try:
        with path.open("rb") as file:
            header = file.read(_FORMAT_BYTES.stop)
    except OSError:
        return None
    if len(header) < _FORMAT_BYTES.stop:
        return None
    return "wal" if header[_FORMAT_BYTES] == _FORMAT_OF_WAL else "delete"


def connect(path: Path, journal: Journal | None = None) -> sqlite3.Connection:
    """Open for writing; makes the file and its directory when they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = journal or journal_of(path)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        _use_journal(connection, journal)
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[journal]}")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_journal(connection: sqlite3.Connection, journal: Journal) -> None:
    """Switch the way of writing; SQLite's own busy timeout does not cover this statement."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            if connection.execute(f"PRAGMA journal_mode = {journal}").fetchone()[0] == journal:
                return
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise sqlite3.OperationalError("database is locked: others have it open in another journal mode")
        time.sleep(_RETRY_S)


def begin(connection: sqlite3.Connection) -> None:
    """Take the write lock, all who wait with the same chance.

    SQLite's own pauses grow with the time that a process has waited, so that under load the newest come first
    and one may wait for ever.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(random.uniform(0, _RETRY_S))  # noqa: S311 -- no secret
    finally:
        connection.execute(f"PRAGMA busy_timeout = {1000 * BUSY_TIMEOUT_S:.0f}")


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open for reading; where SQLite can't make its side files, as a file that nobody is writing."""
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if any(exists(side_file(path, end)) for end in ("-wal", "-journal")):
            raise  # a writer is at work, or was killed: ignoring its log would show old or broken data
        return sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
    except BaseException:
        connection.close()
        raise
    return connection


def side_file(path: Path, end: str) -> Path:
    """The file that SQLite keeps beside a store: "-wal", "-shm" or "-journal"."""
    return path.with_name(path.name + end)


def exists(path: Path) -> bool:
    """Whether the file exists; one in a directory that may not be entered counts as existing."""
    try:
        return path.exists()
    except PermissionError:
        return True


@contextmanager
def named_errors(path: Path, action: str) -> Iterator[None]:
    """Turn SQLite's and the system's errors into Muri's."""
    try:
        yield
    except PermissionError as error:
        raise StorePermissionError(path, action) from error
    except OSError as error:
        raise StoreError(f"cannot {action} the profile store {path}: {error.strerror}") from error
    except sqlite3.OperationalError as error:
        raise _operational(path, action, error) from error
    except sqlite3.DatabaseError as error:
        raise CorruptStoreError(path, str(error)) from error


def _is_busy(error: sqlite3.OperationalError) -> bool:
    """Whether others were in the way; "locking protocol" is SQLite's word for too many at the same instant."""
    return any(word in str(error) for word in ("locked", "busy", "locking protocol"))


def _operational(path: Path, action: str, error: sqlite3.OperationalError) -> StoreError:
    text = str(error)
    if _is_busy(error):
        return StoreBusyError(path, BUSY_TIMEOUT_S)
    if path.is_dir():
        return StoreError(f"cannot {action} the profile store {path}: it is a directory; name a file in it")
    if "unable to open" in text or "readonly" in text or "access permission" in text:
        return StorePermissionError(path, action)
    if "no such table" in text or "no such column" in text or "malformed" in text:
        return CorruptStoreError(path, text)
    return StoreError(f"cannot {action} the profile store {path}: {text}")
