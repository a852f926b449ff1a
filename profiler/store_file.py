"""The store's file: whose it is, its format, transactions, its integrity, and setting a damaged one aside."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from muri.profiler import schema
from muri.profiler.errors import (
    CorruptStoreError,
    StoreMissingError,
    StoreOutdatedError,
    StorePermissionError,
    StoreVersionError,
)
from muri.profiler.store_connection import Journal, begin, connect, connect_read_only, exists, named_errors, side_file

SIDE_FILES: Final = ("-wal", "-shm", "-journal")
_PROBLEMS_SHOWN: Final = 5


class StoreFile:
    """A store's file, open in the thread that opened it; a context manager.

    Args:
        path: The SQLite file; its directory is made when missing, unless `read_only`.
        read_only: Open an existing store without changing anything, for users who may not write.
        journal: How to write; None for the choice of `journal_of`.

    Raises:
        StoreError: The file is missing (read-only), damaged, locked, of a newer version, or
            not permitted; the subclass and the text say which.
    """

    def __init__(self, path: Path, *, read_only: bool = False, journal: Journal | None = None) -> None:
        self.path = path
        self.read_only = read_only
        self._journal = journal
        if read_only and not exists(path):
            raise StoreMissingError(path)
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        with named_errors(self.path, "read" if self.read_only else "write"):
            self._connection = connect_read_only(self.path) if self.read_only else connect(self.path, self._journal)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise
        return self._connection

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        """Set the damaged file aside and go on with an empty one, on the same object.

        Returns:
            The file's new place.
        """
        self.close()
        place = set_aside(self.path, now)
        self._connection = self._open()
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
            begin(self._connection)
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
        if version == len(schema.MIGRATIONS):
            return
        if self.read_only:
            raise StoreOutdatedError(
                f"the profile store {self.path} has format {version}, this version reads {len(schema.MIGRATIONS)}. "
                "Start the controller once: it brings the store up to date"
            )
        with self._transaction() as connection:
            for statements in schema.MIGRATIONS[self._version() :]:  # another process may have been first
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS)}")

    def _version(self) -> int:
        version, owner, tables = (
            int(self._rows(query)[0][0])
            for query in ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
        )
        if owner != schema.APPLICATION_ID and tables:
            raise StoreVersionError(f"{self.path} is a database of another program; give another --store")
        if version > len(schema.MIGRATIONS):
            raise StoreVersionError(
                f"the profile store {self.path} has format {version}; this version of Muri knows up to "
                f"{len(schema.MIGRATIONS)}. Use the newer Muri, or another store with --store"
            )
        return version


def set_aside(path: Path, now: datetime) -> Path:
    """Rename a damaged store and its side files; nothing is deleted.

    The side files go first: a log that stayed behind would be played into the next store.

    Args:
        path: The store.
        now: UTC time, for the new name.

    Returns:
        The new place, such as profiles.db.damaged-20261121T203000Z.

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
