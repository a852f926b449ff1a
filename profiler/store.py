"""The store of stage profiles: one SQLite file, safe with many readers and writers."""

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote

import yaml

from muri.profiler import schema
from muri.profiler.errors import (
    CorruptStoreError,
    StoreBusyError,
    StoreError,
    StoreMissingError,
    StorePermissionError,
    StoreVersionError,
)
from muri.profiler.records import ProfileDetail, ProfileError, ProfileKey, StageProfile

DEFAULT_STATE_DIR: Final = Path("/var/lib/muri")
DEFAULT_CONFIG: Final = "/etc/muri/muri.yaml"
STORE_NAME: Final = "profiles.db"
BUSY_TIMEOUT_S: Final = 30.0
HISTORY_PER_KEY: Final = 50
"""Measurements kept of one model; older ones are dropped when a new one arrives."""


class Stored(NamedTuple):
    """How many profiles were new and how many took the place of an older one."""

    added: int
    replaced: int


def default_store_path() -> Path:
    """$MURI_PROFILES, or profiles.db in $MURI_STATE_DIR, in the site's state_dir, or in /var/lib/muri."""
    explicit = os.environ.get("MURI_PROFILES")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("MURI_STATE_DIR") or _site_state_dir() or DEFAULT_STATE_DIR) / STORE_NAME


def _site_state_dir() -> str | None:
    """The controller's state_dir, so that the commands and the controller mean the same store.

    Only that key is looked at: `muri config check` is there to judge the file.
    """
    try:
        config = yaml.safe_load(Path(os.environ.get("MURI_CONFIG") or DEFAULT_CONFIG).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    value = config.get("state_dir") if isinstance(config, dict) else None
    return value if isinstance(value, str) else None


class Document(NamedTuple):
    """Something measured that is no stage profile, such as how two models disturb each other.

    Attributes:
        name: What it is about, unique in its kind.
        measured_at: UTC time, ISO-8601.
        body: Plain JSON values; the module that owns the kind gives them their meaning.
    """

    name: str
    measured_at: str
    body: dict[str, Any]


class ProfileStore:
    """Profiles under (model, batch size, GPU count, GPU type), with their earlier measurements.

    Use it as a context manager, in the thread that opened it.

    Args:
        path: The SQLite file; its directory is made when missing, unless `read_only`.
        read_only: Open an existing store without changing anything, for users who may not write.

    Raises:
        StoreError: The file is missing (read-only), damaged, locked, of a newer version, or
            not permitted; the subclass and the text say which.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        if read_only and not _exists(path):
            raise StoreMissingError(path)
        with _named_errors(path, "read" if read_only else "write"):
            self._connection = _connect_read_only(path) if read_only else _connect(path)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

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

    def put(self, profile: StageProfile) -> Stored:
        """Store a profile; the one it replaces becomes history."""
        return self.put_all((profile,))

    def put_all(self, profiles: Iterable[StageProfile]) -> Stored:
        """Store several profiles, all or none."""
        added = replaced = 0
        with self._transaction() as connection:
            for profile in profiles:
                known = _count(connection, profile.key) > 0
                added, replaced = added + (not known), replaced + known
                _insert(connection, profile)
        return Stored(added, replaced)

    def get(self, key: ProfileKey) -> StageProfile | None:
        """The newest profile of a key, None when it was never measured."""
        newest = self._select(schema.OF_KEY, (*_values(key), 1))
        return newest[0] if newest else None

    def list(self) -> tuple[StageProfile, ...]:
        """The newest profile of every key, by key."""
        return self._select(schema.NEWEST_OF_ALL)

    def history(self, key: ProfileKey) -> tuple[StageProfile, ...]:
        """The kept measurements of a key, the newest first."""
        return self._select(schema.OF_KEY, (*_values(key), HISTORY_PER_KEY))

    def remove(self, key: ProfileKey) -> bool:
        """Forget a key and its history.

        Returns:
            Whether there was anything to forget.
        """
        with self._transaction() as connection:
            return connection.execute(schema.DELETE_KEY, _values(key)).rowcount > 0

    def put_document(self, kind: str, document: Document) -> None:
        """Store a document; one of the same kind and name is replaced."""
        body = json.dumps(document.body, ensure_ascii=False, sort_keys=True)
        with self._transaction() as connection:
            connection.execute(schema.PUT_DOCUMENT, (kind, document.name, document.measured_at, body))

    def documents(self, kind: str) -> tuple[Document, ...]:
        """All documents of a kind, by name."""
        with _named_errors(self.path, "read"):
            rows = self._connection.execute(schema.DOCUMENTS_OF_KIND, (kind,)).fetchall()
        return tuple(Document(name, measured_at, _json(self.path, body)) for name, measured_at, body in rows)

    def remove_document(self, kind: str, name: str) -> bool:
        """Forget a document; returns whether there was one."""
        with self._transaction() as connection:
            return connection.execute(schema.DELETE_DOCUMENT, (kind, name)).rowcount > 0

    def _select(self, query: str, values: tuple[object, ...] = ()) -> tuple[StageProfile, ...]:
        with _named_errors(self.path, "read"):
            rows = self._connection.execute(query, values).fetchall()
        try:
            return tuple(_profile(self.path, row) for row in rows)
        except (ProfileError, TypeError) as error:  # SQLite columns don't enforce types
            raise CorruptStoreError(self.path, str(error)) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Take the write lock first, so that reading and writing are one step for others."""
        if self.read_only:
            raise StorePermissionError(self.path, "write")
        with _named_errors(self.path, "write"):
            self._connection.execute("BEGIN IMMEDIATE")
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
            raise StoreVersionError(
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
        with _named_errors(self.path, "read"):
            version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
            owner = int(self._connection.execute("PRAGMA application_id").fetchone()[0])
            tables = int(self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if owner != schema.APPLICATION_ID and tables:
            raise StoreVersionError(f"{self.path} is a database of another program; give another --store")
        if version > len(schema.MIGRATIONS):
            raise StoreVersionError(
                f"the profile store {self.path} has format {version}; this version of Muri knows up to "
                f"{len(schema.MIGRATIONS)}. Use the newer Muri, or another store with --store"
            )
        return version


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        _use_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging; SQLite's own busy timeout does not cover this statement."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] == "wal":
                return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _connect_read_only(path: Path) -> sqlite3.Connection:
    """Open for reading; where SQLite can't make its side files, as a file that nobody is writing."""
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if _exists(path.with_name(path.name + "-wal")):
            raise  # a writer is at work: ignoring its log would show old or broken data
        return sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
    except BaseException:
        connection.close()
        raise
    return connection


def _exists(path: Path) -> bool:
    """Whether the file exists; one in a directory that may not be entered counts as existing."""
    try:
        return path.exists()
    except PermissionError:
        return True


@contextmanager
def _named_errors(path: Path, action: str) -> Iterator[None]:
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


def _operational(path: Path, action: str, error: sqlite3.OperationalError) -> StoreError:
    text = str(error)
    if "locked" in text or "busy" in text:
        return StoreBusyError(path, BUSY_TIMEOUT_S)
    if path.is_dir():
        return StoreError(f"cannot {action} the profile store {path}: it is a directory; name a file in it")
    if "unable to open" in text or "readonly" in text or "access permission" in text:
        return StorePermissionError(path, action)
    if "no such table" in text or "no such column" in text or "malformed" in text:
        return CorruptStoreError(path, text)
    return StoreError(f"cannot {action} the profile store {path}: {text}")


def _values(key: ProfileKey) -> tuple[object, ...]:
    return (key.model, key.batch_size, key.gpu_count, key.gpu_type)


def _count(connection: sqlite3.Connection, key: ProfileKey) -> int:
    return int(connection.execute(schema.COUNT_OF_KEY, _values(key)).fetchone()[0])


def _insert(connection: sqlite3.Connection, profile: StageProfile) -> None:
    figures = (*profile.stage_s, profile.iteration_s, profile.gpu_mem_gib)
    about = (profile.iterations, profile.measured_at, profile.source, json.dumps(profile.detail.to_dict()))
    connection.execute(schema.INSERT, (*_values(profile.key), *figures, *about))
    connection.execute(schema.DELETE_OLD_OF_KEY, (*_values(profile.key), HISTORY_PER_KEY))


def _profile(path: Path, row: Any) -> StageProfile:
    """The row as a record, which checks its figures once more."""
    _, model, batch_size, gpu_count, gpu_type, *figures, detail = row
    key = ProfileKey(model, batch_size, gpu_count, gpu_type)
    return StageProfile(key, *figures, detail=ProfileDetail.from_dict(_json(path, detail)))


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise CorruptStoreError(path, f"a record is no JSON object: {text[:40]!r}") from error
