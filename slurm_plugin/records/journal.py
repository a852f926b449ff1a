"""The controller's memory between cycles: intents and facts in SQLite, in WAL mode with full synchronization.

An intent is on disk before the RPC that carries it out, so that a controller killed between any two lines knows at
its next start which actions it had begun.
"""

import json
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from muri.errors import MuriError
from muri.profiler.errors import StoreError
from muri.profiler.store_file import set_aside, tells_damage
from muri.slurm_plugin.renamed import OLD_JOIN_FIELDS
from muri.text import json_of

log = logging.getLogger("muri.controller")

SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE intents (
    token TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    payload TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('begun', 'done', 'abandoned')),
    submitted_job INTEGER,
    begun_s REAL NOT NULL
) STRICT;
CREATE INDEX intents_by_state ON intents (state);
CREATE TABLE facts (
    name TEXT NOT NULL,
    subject TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (name, subject)
) STRICT;
"""


# Kinds of intents.
GROUP: Final = "group"
JOIN: Final = "join"
PREEMPT: Final = "preempt"
DRY_RUN: Final = "dry-run"

# Names of facts. Running sites' journals hold these words.
EXCLUSION: Final = "bar"
"""By job id: why the job must not be grouped again."""

PAIR: Final = "pair"
"""By pilot job: measurements of two members that share without turns."""

DRY_RUN_FAILED: Final = "dry-run-failed"
"""By profile key: a `Failure`."""

LARGEST_GROUP: Final = "largest-group"
"""By job id: the largest group that Slurm lately had room for, why, and since when."""

RELEASE_REFUSED: Final = "release-refused"
"""By job id: why Slurm refused to release a job to its own scheduler, and since when."""

PYTHON: Final = "python"
"""By profile key and digest of the submission's environment: a `MeasuredPython`."""

GPU_MEM: Final = "gpu-mem"
"""By job id: the GiB per GPU that the job asks for since an out-of-memory error."""

FIRST_SUBMIT: Final = "first-submit"
"""By job id: when the job was submitted first, seconds since the epoch."""

GROUP_RUN: Final = "group-run"
"""By pilot job: which members ran at the same time, until their reports are written."""

SERVICE: Final = "service"
"""By job id: a `Service`."""

CLAIMS: Final = "claims"
"""By user: how well jobs kept to their stated durations."""

COUNTERS: Final = "counters"
"""By metric: its counters."""


def not_grouped_again(why: str) -> str:
    """Return the fact EXCLUSION in words for people."""
    return f"not grouped again: {why}"


class JournalError(MuriError):
    """The journal cannot be opened or written; without it the controller does not act."""


class CorruptJournalError(JournalError):
    """The journal's file is damaged; the jobs' own AdminComment holds what is needed to go on without it."""


def set_aside_journal(path: Path, damage: CorruptJournalError, now: datetime) -> None:
    """Rename a damaged journal and its side files by the UTC time, and log it; nothing is deleted.

    Raises:
        JournalError: They cannot be renamed.
    """
    try:
        place = set_aside(path, now)
    except StoreError as error:
        raise JournalError(str(error)) from error
    log.error("%s It was set aside as %s and an empty one begun.", damage, place)


@dataclass(frozen=True, slots=True)
class Intent:
    """Something that the controller set out to do."""

    token: str  # Unique name; the jobs that it submits carry it in their AdminComment
    kind: str  # GROUP, JOIN, PREEMPT or DRY_RUN
    payload: dict[str, Any]  # The data needed to continue it
    state: str  # "begun": perhaps half done; "done": every step was made; "abandoned": taken back
    submitted_job: int | None  # Id of the job submitted for it, None while unknown
    begun_s: float  # Seconds since the epoch


def random_token() -> str:
    """Return a new name that cannot be guessed."""
    return secrets.token_hex(6)


class Journal:
    """The journal file, made when it is missing. Each method is one durable transaction; `new_token` names an intent.

    Raises:
        JournalError: It cannot be opened, is damaged, or was written by a newer version.
    """

    def __init__(self, path: Path, new_token: Callable[[], str] = random_token) -> None:
        self.new_token = new_token
        self._path = path
        self._payloads: dict[str, tuple[str, dict[str, Any]]] = {}
        self._open()

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, timeout=10, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._migrate()
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            raise self._error("open", error) from error

    def _error(self, action: str, error: Exception) -> JournalError:
        """Return the error that says what cannot be done, and what to do about it."""
        return (CorruptJournalError if tells_damage(error) else JournalError)(
            f"cannot {action} the journal {self._path}: {error}. Check its directory's permissions and space; if it is "
            "damaged, move it aside: the jobs' own AdminComment holds what is needed to resume."
        )

    def start_over(self, damage: CorruptJournalError, now: datetime) -> None:
        """Set a damaged file aside and begin an empty one.

        Raises:
            JournalError: That fails.
        """
        self._connection.close()
        set_aside_journal(self._path, damage, now)
        self._open()

    def _migrate(self) -> None:
        if (version := self._version()) > SCHEMA_VERSION:
            raise JournalError(f"{self._path} was written by a newer Muri (schema {version}); upgrade this one")
        if version == SCHEMA_VERSION:
            return
        with self._transaction():
            version = self._version()  # another process may have been first
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    self._connection.execute(statement)
            elif version == 1:
                self._rename_fields()
            if version < SCHEMA_VERSION:
                self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _rename_fields(self) -> None:
        """Bring a journal of 0.2 to the names of this version."""
        self._connection.execute("ALTER TABLE intents RENAME COLUMN host_job TO submitted_job")
        joins = self._connection.execute("SELECT token, payload FROM intents WHERE kind=?", (JOIN,)).fetchall()
        for token, text in joins:
            payload = {OLD_JOIN_FIELDS.get(name, name): value for name, value in self._parsed(text).items()}
            self._connection.execute(
                "UPDATE intents SET payload=? WHERE token=?", (json.dumps(payload, sort_keys=True), token)
            )

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._error("write", error) from error
        finally:
            # After any failure, such as a text that SQLite cannot store: an open one blocks all later ones.
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):  # in a damaged file this fails, too
                    self._connection.execute("ROLLBACK")

    def _read(self, query: str, argument: object) -> list[Any]:
        """Return the rows of a query."""
        try:
            return self._connection.execute(query, (argument,)).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._error("read", error) from error

    def _parsed(self, text: str) -> Any:
        """Read a value that was written as JSON."""
        try:
            return json_of(text)
        except (TypeError, ValueError) as error:
            raise CorruptJournalError(f"the journal {self._path} is damaged: a value in it cannot be read.") from error

    def __enter__(self) -> Self:
        """Use the journal in a with statement; it is closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._connection.close()

    def begin(self, token: str, kind: str, payload: dict[str, Any], now_s: float) -> None:
        """Write down an intent before its first RPC."""
        with self._transaction():
            self._connection.execute(
                "INSERT INTO intents VALUES (?, ?, ?, 'begun', NULL, ?)",
                (token, kind, json.dumps(payload, sort_keys=True), now_s),
            )

    def set_submitted_job(self, token: str, job_id: int) -> None:
        """Remember the job that was submitted for an intent."""
        self._change("UPDATE intents SET submitted_job=? WHERE token=?", job_id, token)

    def finish(self, token: str, state: str) -> None:
        """Close an intent as "done" or "abandoned"."""
        self._change("UPDATE intents SET state=? WHERE token=?", state, token)

    def _change(self, statement: str, value: object, token: str) -> None:
        """Change an intent; one that is not found, as by a damaged index, would stay as it is for ever."""
        with self._transaction():
            found = self._connection.execute(statement, (value, token)).rowcount
        if not found:
            raise CorruptJournalError(f"the journal {self._path} is damaged: it does not find intent {token}.")

    def intents(self, state: str | None = None) -> tuple[Intent, ...]:
        """Return intents, oldest first; all of them or those in one state."""
        rows = self._read(
            "SELECT token, kind, payload, state, submitted_job, begun_s FROM intents WHERE ?1 IS NULL OR state=?1 "
            "ORDER BY begun_s, token",
            state,
        )
        return tuple(Intent(r[0], r[1], self._payload(r[0], r[2]), r[3], r[4], r[5]) for r in rows)

    def _payload(self, token: str, text: str) -> dict[str, Any]:
        """Return an intent's payload, parsed once: closed ones are read for days, several times in every cycle."""
        known = self._payloads.get(token)
        if known is None or known[0] != text:
            known = self._payloads[token] = text, self._parsed(text)
        return known[1]

    def forget_before(self, begun_s: float) -> None:
        """Drop closed intents that began before a time, so that the file stays small."""
        with self._transaction():
            forgotten = self._connection.execute(
                "DELETE FROM intents WHERE state <> 'begun' AND begun_s < ? RETURNING token", (begun_s,)
            ).fetchall()
        for (token,) in forgotten:
            self._payloads.pop(token, None)

    def set_fact(self, name: str, subject: str, value: Any) -> None:
        """Remember something about a job or a model."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (name, subject, json.dumps(value, sort_keys=True))
            )

    def replace_facts(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all facts of some names, in one transaction; by name and subject."""
        rows = [(name, subject, json.dumps(value, sort_keys=True))
                for name, values in facts.items() for subject, value in values.items()]  # fmt: skip
        with self._transaction():
            self._connection.executemany("DELETE FROM facts WHERE name=?", [(name,) for name in facts])
            self._connection.executemany("INSERT INTO facts VALUES (?, ?, ?)", rows)

    def facts(self, name: str) -> dict[str, Any]:
        """Return all facts of one name by subject."""
        rows = self._read("SELECT subject, value FROM facts WHERE name=? ORDER BY subject", name)
        return {subject: self._parsed(value) for subject, value in rows}

    def forget_fact(self, name: str, subject: str) -> None:
        """Drop a fact, if it is there."""
        with self._transaction():
            self._connection.execute("DELETE FROM facts WHERE name=? AND subject=?", (name, subject))


_Entry = TypeVar("_Entry")
_Read = TypeVar("_Read")


def readable(entries: Iterable[_Entry], read: Callable[[_Entry], _Read]) -> Iterator[_Read]:
    """Read the journal's entries; a damaged one is logged and left out."""
    for entry in entries:
        try:
            yield read(entry)
        except (KeyError, TypeError, ValueError, IndexError):
            log.exception("an entry of the journal cannot be read and is left out: %r", entry)


def by_job(facts: Mapping[str, Any], read: Callable[[Any], _Read]) -> dict[int, _Read]:
    """Read the facts of one name about jobs, by job id."""
    return dict(readable(facts.items(), lambda fact: (int(fact[0]), read(fact[1]))))


RETRY_AFTER_S: Final = 86400.0
"""A model whose dry runs failed is tried again after a day: scripts and nodes are mended meanwhile."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Failed dry runs of a model."""

    count: int  # Since the last success, or since the earlier ones expired
    why: str  # Cause of the last one
    last_s: float  # Its time, seconds since the epoch

    def expired(self, now_s: float) -> bool:
        """Whether the model may be tried again whatever the count."""
        return now_s - self.last_s > RETRY_AFTER_S

    @property
    def fact(self) -> list[Any]:
        """The journal's form."""
        return [self.count, self.why, self.last_s]


def read_failure(fact: Any, now_s: float) -> Failure | None:
    """Read a fact; one without a time, of an old version, counts as new. None when it is damaged."""
    try:
        count, why, *last_s = fact
        return Failure(int(count), str(why), float(last_s[0]) if last_s else now_s)
    except (TypeError, ValueError):
        return None


def current(facts: Mapping[str, Any], now_s: float) -> dict[str, Failure]:
    """Return the readable failures that have not expired, by the profile key's text."""
    found = {key: read_failure(fact, now_s) for key, fact in facts.items()}
    return {key: each for key, each in found.items() if each is not None and not each.expired(now_s)}
