"""The store's SQLite file: its format, how it is opened and locked, its integrity, and setting a damaged one aside.

Two ways of writing, chosen by `journal_of`:

* "wal": a write-ahead log. Readers and a writer don't wait for each other, and a commit needs no fsync to
  outlive its process. It needs memory that all processes share, which only one machine can give.
* "delete": a rollback journal, with an fsync at each commit. It needs only file locks.
"""

import os
import random
import sqlite3
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args
from urllib.parse import quote

import psutil

from muri.clock import MACHINE_CLOCK, Clock
from muri.profiler.errors import (
    CorruptStoreError,
    JournalChoiceError,
    NoStoreError,
    StoreBusyError,
    StoreError,
    StoreMissingError,
    StoreOutdatedError,
    StorePermissionError,
    StoreVersionError,
)

APPLICATION_ID: Final = 0x4D555249
"""“MURI”: tells a store from another program's database."""

MIGRATIONS: Final = (
    (
        "CREATE TABLE measurement (id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, batch_size "
        "INTEGER NOT NULL, gpu_count INTEGER NOT NULL, gpu_type TEXT NOT NULL, load_s REAL NOT NULL, "
        "preprocess_s REAL NOT NULL, propagate_s REAL NOT NULL, synchronize_s REAL NOT NULL, iteration_s REAL "
        "NOT NULL, gpu_mem_gib REAL NOT NULL, iterations INTEGER NOT NULL, measured_at TEXT NOT NULL, source "
        "TEXT NOT NULL)",
        "CREATE INDEX measurement_key ON measurement (model, batch_size, gpu_count, gpu_type, id)",
    ),
    (
        "ALTER TABLE measurement ADD COLUMN detail TEXT NOT NULL DEFAULT '{}'",
        "CREATE TABLE stale (model TEXT NOT NULL, batch_size INTEGER NOT NULL, gpu_count INTEGER NOT NULL, "
        "gpu_type TEXT NOT NULL, since TEXT NOT NULL, reason TEXT NOT NULL, who TEXT NOT NULL, PRIMARY KEY "
        "(model, batch_size, gpu_count, gpu_type))",
        "CREATE TABLE observation (id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, batch_size "
        "INTEGER NOT NULL, gpu_count INTEGER NOT NULL, gpu_type TEXT NOT NULL, observed_at TEXT NOT NULL, "
        "job_id INTEGER NOT NULL, iterations INTEGER NOT NULL, stage_s TEXT NOT NULL)",
        "CREATE INDEX observation_key ON observation (model, batch_size, gpu_count, gpu_type, id)",
        "CREATE TABLE audit (id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, who TEXT NOT NULL, "
        "action TEXT NOT NULL, model TEXT NOT NULL, batch_size INTEGER NOT NULL, gpu_count INTEGER NOT NULL, "
        "gpu_type TEXT NOT NULL, before TEXT NOT NULL, after TEXT NOT NULL)",
        "CREATE TABLE document (kind TEXT NOT NULL, name TEXT NOT NULL, measured_at TEXT NOT NULL, body TEXT "
        "NOT NULL, PRIMARY KEY (kind, name))",
    ),
    (
        # Until now all users shared every profile: what is there stays valid for all, as if published.
        "ALTER TABLE measurement ADD COLUMN user TEXT NOT NULL DEFAULT ''",
        "DROP INDEX measurement_key",
        "CREATE INDEX measurement_key ON measurement (model, batch_size, gpu_count, gpu_type, user, id)",
        "ALTER TABLE observation ADD COLUMN user TEXT NOT NULL DEFAULT ''",
        "DROP INDEX observation_key",
        "CREATE INDEX observation_key ON observation (model, batch_size, gpu_count, gpu_type, user, id)",
        "ALTER TABLE audit ADD COLUMN user TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE stale RENAME TO stale_of_all",
        "CREATE TABLE stale (model TEXT NOT NULL, batch_size INTEGER NOT NULL, gpu_count INTEGER NOT NULL, "
        "gpu_type TEXT NOT NULL, user TEXT NOT NULL, since TEXT NOT NULL, reason TEXT NOT NULL, who TEXT NOT "
        "NULL, PRIMARY KEY (model, batch_size, gpu_count, gpu_type, user))",
        "INSERT INTO stale SELECT model, batch_size, gpu_count, gpu_type, '', since, reason, who FROM stale_of_all",
        "DROP TABLE stale_of_all",
    ),
    ("ALTER TABLE observation ADD COLUMN gpu_mem_gib REAL",),
)
"""Statements that lead from each `user_version` to the next; never edited, only added to."""

SIDE_FILES: Final = ("-wal", "-shm", "-journal")
_PROBLEMS_SHOWN: Final = 5
_LOOKED_AT: Final = 4096  # bytes

_NETWORK_NAMES: Final = (
    "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 quobyte "
    "smb2 smb3 smbfs virtiofs wekafs"
)
NETWORK_FILE_SYSTEMS: Final = frozenset(_NETWORK_NAMES.split())
"""Kinds, as the kernel names them, whose files several machines may open at once."""

BUSY_TIMEOUT_S: Final = 30.0

JOURNAL_VARIABLE: Final = "MURI_STORE_JOURNAL"
JournalMode = Literal["wal", "delete"]
JOURNAL_MODES: Final[tuple[JournalMode, ...]] = get_args(JournalMode)

_SYNCHRONOUS: Final[dict[JournalMode, str]] = {"wal": "NORMAL", "delete": "FULL"}
_FORMAT_BYTES: Final = slice(18, 20)
"""File format versions for writing and reading in the header (SQLite's file format, section 1.3.3)."""

_FORMAT_OF_WAL: Final = b"\x02\x02"
_RETRY_S: Final = 0.005


class StoreFile:
    """A store's file, open in the thread that opened it; a context manager.

    Args:
        path: The SQLite file; its directory is made when missing, unless `read_only`.
        read_only: Open an existing store without changing anything, for users who may not write.
        journal: How to write; None for the choice of `journal_of`.
        clock: Measures waits for other writers.

    Raises:
        StoreError: The file is missing (read-only), damaged, locked, of a newer version, or
            not permitted; the subclass and the text say which.

    Attributes:
        is_replacement: Whether it is new because a damaged one was set aside; may be reset.
    """

    def __init__(
        self, path: Path, *, read_only: bool = False, journal: JournalMode | None = None, clock: Clock = MACHINE_CLOCK
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._journal = journal
        self._clock = clock
        if read_only and not exists(path):
            raise StoreMissingError(path)
        self._connection = self._open()
        self.is_replacement = False

    def _open(self) -> sqlite3.Connection:
        with named_errors(self.path, "read" if self.read_only else "write"):
            if self.read_only:
                self._connection = connect_read_only(self.path)
            else:
                self._connection = connect(self.path, self._journal, self._clock)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise
        return self._connection

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:
        """Close the file; the store can't be used any more."""
        self._connection.close()

    def check(self) -> None:
        """Read the whole file and compare it with its indexes.

        Raises:
            CorruptStoreError: Something does not fit together; the text says what.
            StoreError: It cannot be read.
        """
        rows = self._rows(f"PRAGMA integrity_check({_PROBLEMS_SHOWN})")
        problems = [str(row[0]) for row in rows if row[0] != "ok"]
        if problems:
            raise CorruptStoreError(self.path, "; ".join(problems))

    def start_over(self, now: datetime) -> Path:
        """Set the damaged file aside and go on with an empty one, on the same object."""
        self.close()
        place = set_aside(self.path, now)
        self._connection = self._open()
        self.is_replacement = True
        return place

    def _rows(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        with named_errors(self.path, "read"):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Take the write lock first, so that reading and writing are one step for others."""
        if self.read_only:
            raise StorePermissionError(self.path, "write")
        with named_errors(self.path, "write"):
            begin(self._connection, self._clock)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _prepare(self) -> None:
        """Check whose file it is and bring an older one up to date."""
        version = self._version()
        if version == len(MIGRATIONS):
            return
        if self.read_only:
            if not version:
                raise StoreOutdatedError(
                    f"the profile store {self.path} is an empty file. The controller fills the one in its state "
                    "directory once it measures a job; give another one with --store"
                )
            raise StoreOutdatedError(
                f"the profile store {self.path} has format {version}, this version reads {len(MIGRATIONS)}. "
                "Start the controller once: it brings the store up to date"
            )
        with self._transaction() as connection:
            for statements in MIGRATIONS[self._version() :]:  # another process may have been first
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _version(self) -> int:
        # In this order: another process may make the store, tables and marks at once, between two of these reads.
        tables, owner, version = (
            int(self._rows(query)[0][0])
            for query in ("SELECT count(*) FROM sqlite_master", "PRAGMA application_id", "PRAGMA user_version")
        )
        if owner != APPLICATION_ID and tables:
            raise StoreVersionError(f"{self.path} is a database of another program; give another --store")
        if version > len(MIGRATIONS):
            raise StoreVersionError(
                f"the profile store {self.path} has format {version}; this version of Muri knows up to "
                f"{len(MIGRATIONS)}. Use the newer Muri, or another store with --store"
            )
        return version


def set_aside(path: Path, now: datetime) -> Path:
    """Rename a damaged store and its side files; nothing is deleted.

    The side files go first: a log that stayed behind would be played into the next store.

    Raises:
        StoreError: A file cannot be renamed.
    """
    base = f"{path.name}.damaged-{now:%Y%m%dT%H%M%SZ}"
    names = (base, *(f"{base}.{number}" for number in range(2, 1000)))
    place = next(place for name in names if not (place := path.with_name(name)).exists())
    with named_errors(path, "set aside"):
        for end in SIDE_FILES:
            if side_file(path, end).exists():
                side_file(path, end).rename(side_file(place, end))
        path.rename(place)
    return place


def set_aside_stores(path: Path) -> tuple[Path, ...]:
    """Damaged stores that were set aside, by age."""
    found = path.parent.glob(f"{path.name}.damaged-*")
    return tuple(sorted(place for place in found if not place.name.endswith(SIDE_FILES)))


def file_system_of(path: Path) -> str:
    """Kind of the file system that a path is on, as the kernel names it; "" when it cannot be told."""
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    whole = path.absolute()
    with suppress(OSError):  # a link that may not be followed: the path as it is written is the best that is known
        whole = whole.resolve()
    return next((kinds[folder] for folder in (whole, *whole.parents) if folder in kinds), "")


def is_network(kind: str) -> bool:
    """Whether files on this kind may be open on several machines; all of FUSE counts, since its name says nothing."""
    return kind in NETWORK_FILE_SYSTEMS or kind.partition(".")[0] in ("fuse", "fuseblk")


def journal_of(path: Path) -> JournalMode:
    """How the store is to be written: $MURI_STORE_JOURNAL, else what its file system allows.

    A store that has a rollback journal keeps it on any file system: machines to which it is remote may
    have it open.

    Raises:
        JournalChoiceError: The variable holds something else.
    """
    forced = os.environ.get(JOURNAL_VARIABLE, "")
    if forced:
        if forced not in JOURNAL_MODES:
            modes = ", ".join(JOURNAL_MODES)
            raise JournalChoiceError(
                f"{JOURNAL_VARIABLE} is {forced!r}; valid are: {modes}, or nothing for the choice by file system"
            )
        return forced
    if is_network(file_system_of(path)):
        return "delete"
    return existing_journal(path) or "wal"


def existing_journal(path: Path) -> JournalMode | None:
    """What the file's header says; None when there is no header yet."""
    try:
        with path.open("rb") as file:
            header = file.read(_FORMAT_BYTES.stop)
    except OSError:
        return None
    if len(header) < _FORMAT_BYTES.stop:
        return None
    return "wal" if header[_FORMAT_BYTES] == _FORMAT_OF_WAL else "delete"


def connect(path: Path, journal: JournalMode | None = None, clock: Clock = MACHINE_CLOCK) -> sqlite3.Connection:
    """Open for writing; makes the file and its directory when they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = journal or journal_of(path)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        change = f"PRAGMA journal_mode = {journal}"
        _patiently(lambda: connection.execute(change).fetchone()[0] == journal, clock)
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[journal]}")
    except BaseException:
        connection.close()
        raise
    return connection


def _patiently(attempt: Callable[[], bool], clock: Clock) -> None:
    """Try until it succeeds; all processes that wait have the same chance.

    SQLite's own pauses grow with the time that a process has waited: under load the newest process would come
    first, and the oldest could wait until its timeout. They do not cover a change of the journal mode at all.
    """
    deadline = clock() + BUSY_TIMEOUT_S
    while True:
        try:
            if attempt():
                return
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or clock() > deadline:
                raise
        if clock() > deadline:
            raise sqlite3.OperationalError("database is locked: others have it open in another journal mode")
        clock.sleep(random.uniform(0, _RETRY_S))


def begin(connection: sqlite3.Connection, clock: Clock = MACHINE_CLOCK) -> None:
    """Take the write lock."""
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        _patiently(lambda: bool(connection.execute("BEGIN IMMEDIATE")), clock)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {1000 * BUSY_TIMEOUT_S:.0f}")


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open for reading; where SQLite can't make its side files, as a file without a writer."""
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
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if "not a database" in str(error) and _is_text(path):
            raise NoStoreError(path) from error
        raise CorruptStoreError(path, str(error)) from error


def _is_text(path: Path) -> bool:
    """Whether a file begins with readable text, as neither a database nor what is left of one does."""
    with suppress(OSError, UnicodeDecodeError), path.open("rb") as stream:
        return "\0" not in getincrementaldecoder("utf-8")().decode(stream.read(_LOOKED_AT))
    return False


_DAMAGED: Final = (
    "malformed", "not a database", "unsupported file format", "decode", "no such table", "no such column",
    "already exists",
)  # fmt: skip


def tells_damage(error: Exception) -> bool:
    """Whether an error of SQLite's tells of a damaged file, which no later try can read or write."""
    return any(words in str(error) for words in _DAMAGED)


def _is_busy(error: sqlite3.OperationalError) -> bool:
    """Whether others were in the way; "locking protocol" is SQLite's word for too many at the same instant."""
    return any(word in str(error) for word in ("locked", "busy", "locking protocol"))


def _operational(path: Path, action: str, error: sqlite3.OperationalError) -> StoreError:
    text = str(error)
    if _is_busy(error):
        return StoreBusyError(path, BUSY_TIMEOUT_S)
    with suppress(PermissionError):  # in a directory that may not be entered
        if path.is_dir():
            return StoreError(f"cannot {action} the profile store {path}: it is a directory; name a file in it")
    if "unable to open" in text or "readonly" in text or "access permission" in text:
        return StorePermissionError(path, action)
    if tells_damage(error):
        return CorruptStoreError(path, text)
    return StoreError(f"cannot {action} the profile store {path}: {text}")
