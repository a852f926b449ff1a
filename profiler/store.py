"""The store of stage profiles: one SQLite file, safe with many readers and writers."""

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from muri.clock import MACHINE_CLOCK, Clock
from muri.profiler.exchange import to_dict
from muri.profiler.records import (
    GPU_MEM_GIB,
    ITERATIONS,
    TIME_S,
    Document,
    ProfileDetail,
    ProfileError,
    ProfileKey,
    StageProfile,
    first_fault,
)
from muri.profiler.store_file import JournalMode, StoreFile
from muri.text import json_of

log = logging.getLogger("muri.profiler")

DEFAULT_STATE_DIR: Final = Path("/var/lib/muri")
STORE_NAME: Final = "profiles.db"

HISTORY_PER_KEY: Final = 50
"""Measurements kept of one model; older ones are dropped when a new one arrives."""

MOST_OF_A_USER: Final = 1000
"""Models of a user: combinations of name, batch size and GPUs. Whose jobs name ever new ones must not fill the disk."""

OBSERVATIONS_PER_KEY: Final = 1000

DRIFT: Final = "drift"
"""The `who` of marks that the controller sets because live figures moved away; no user has that name."""

ACCUMULATES: Final = "accumulates"
"""Kind of the documents that name models whose batches can be split, by the profile key's text."""


def _sql(text: str) -> str:
    """Write out THE_KEY as a comparison and KEY as the columns of a profile key, FIGURES as those of a measurement."""
    figures = "load_s, preprocess_s, propagate_s, synchronize_s, iteration_s, gpu_mem_gib, iterations, measured_at"
    text = text.replace("THE_KEY", "model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ? AND user = ?")
    text = text.replace("KEY", "model, batch_size, gpu_count, gpu_type, user")
    return text.replace("FIGURES", f"{figures}, source, detail")


_INSERT: Final = _sql("INSERT INTO measurement (KEY, FIGURES) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")
_NEWEST_OF_ALL: Final = _sql(
    "SELECT id, KEY, FIGURES FROM measurement WHERE id IN (SELECT max(id) FROM measurement GROUP BY KEY) ORDER BY KEY"
)
_OF_KEY: Final = _sql("SELECT id, KEY, FIGURES FROM measurement WHERE THE_KEY ORDER BY id DESC LIMIT ?")
_BEYOND_OF_USER: Final = """
    SELECT model, batch_size, gpu_count, gpu_type, user FROM measurement WHERE user = ?
    GROUP BY model, batch_size, gpu_count, gpu_type ORDER BY max(id) DESC LIMIT -1 OFFSET ?
"""
_DELETE_KEY: Final = _sql("DELETE FROM measurement WHERE THE_KEY")
_DELETE_OLD_OF_KEY: Final = _sql(
    "DELETE FROM measurement WHERE id IN (SELECT id FROM measurement WHERE THE_KEY ORDER BY id DESC LIMIT -1 OFFSET ?)"
)
_PUT_DOCUMENT: Final = """
    INSERT INTO document (kind, name, measured_at, body) VALUES (?, ?, ?, ?)
    ON CONFLICT (kind, name) DO UPDATE SET measured_at = excluded.measured_at, body = excluded.body
"""
_DOCUMENTS_OF_KIND: Final = "SELECT name, measured_at, body FROM document WHERE kind = ? ORDER BY name"
_DELETE_DOCUMENT: Final = "DELETE FROM document WHERE kind = ? AND name = ?"
_OBSERVE: Final = """
    INSERT INTO observation (model, batch_size, gpu_count, gpu_type, user, observed_at, job_id, iterations, stage_s,
        gpu_mem_gib)
    SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10 WHERE NOT EXISTS (
        SELECT 1 FROM observation
        WHERE model = ?1 AND batch_size = ?2 AND gpu_count = ?3 AND gpu_type = ?4 AND user = ?5
            AND job_id = ?7 AND iterations = ?8
    )
"""
"""A report that is read twice is one observation: its job has done no iteration since."""

_OBSERVATIONS_OF_KEY: Final = _sql(
    "SELECT id, observed_at, job_id, iterations, stage_s, gpu_mem_gib FROM observation WHERE THE_KEY ORDER BY id"
)
_DELETE_OBSERVATIONS: Final = _sql("DELETE FROM observation WHERE THE_KEY")
_DELETE_OLD_OBSERVATIONS: Final = _sql(
    "DELETE FROM observation WHERE id IN (SELECT id FROM observation WHERE THE_KEY ORDER BY id DESC LIMIT -1 OFFSET ?)"
)
_MARK_STALE: Final = _sql(
    "INSERT INTO stale (KEY, since, reason, who) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_STALE_MARKS: Final = _sql("SELECT KEY, since, reason, who FROM stale ORDER BY KEY")
_CLEAR_STALE: Final = _sql("DELETE FROM stale WHERE THE_KEY")
_WRITE_AUDIT: Final = _sql(
    "INSERT INTO audit (at, who, action, KEY, before, after) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_AUDIT: Final = _sql("SELECT id, at, who, action, KEY, before, after FROM audit ORDER BY id")


class Author(NamedTuple):
    """Who changes the store, and when."""

    who: str  # User name, or `DRIFT`
    at: str  # UTC time, ISO-8601
    action: str  # "set", "rm", "import", "publish" or "withdraw" of a command; the controller's "stale" and "clear"


@dataclass(frozen=True, slots=True)
class Observation:
    """A running job's report of its iterations."""

    observed_at: str  # UTC time, ISO-8601
    job_id: int
    iterations: int  # Iterations that it had done by then
    # Seconds per iteration lately in which it used each resource, waits left out, in the order of `STAGES`
    stage_s: tuple[float, ...]
    gpu_mem_gib: float | None = None  # GPU memory of its processes then; None where it was not read

    def __post_init__(self) -> None:
        """Refuse figures that no job reports."""
        name = f"a report of job {self.job_id}"
        checks = [(name, ITERATIONS, self.iterations), (name, GPU_MEM_GIB, self.gpu_mem_gib or 0.0)]
        if fault := first_fault([*checks, *((name, TIME_S, value) for value in self.stage_s)]):
            raise ProfileError(fault)


@dataclass(frozen=True, slots=True)
class StaleMark:
    """A profile that is to be measured again; it serves planning until then."""

    key: ProfileKey
    since: str  # UTC time, ISO-8601
    reason: str  # For people
    who: str  # User name, or `DRIFT`


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change made by hand, or a mark; see `Author`."""

    at: str
    who: str
    action: str
    key: ProfileKey
    before: dict[str, Any] | None  # Figures as in an export, None without any
    after: dict[str, Any] | None


class Stored(NamedTuple):
    """How many profiles were new and how many took the place of an older one."""

    added: int
    replaced: int


def default_store_path(site_state_dir: Callable[[], str | None] = lambda: None) -> Path:
    """$MURI_PROFILES, or profiles.db in $MURI_STATE_DIR, in the site's state directory, or in /var/lib/muri."""
    if explicit := os.environ.get("MURI_PROFILES"):
        return Path(explicit)
    return Path(os.environ.get("MURI_STATE_DIR") or site_state_dir() or DEFAULT_STATE_DIR) / STORE_NAME


Item = TypeVar("Item")


class ProfileStore(StoreFile):
    """Profiles under (model, batch size, GPU count, GPU type, user), with their earlier measurements.

    A row that cannot be true, as an older version or another program may have left it, is skipped and named in the
    log: it costs one profile, never the whole list.

    A change by a person is written into the audit table in the same transaction: pass an `author`.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        journal: JournalMode | None = None,
        clock: Clock = MACHINE_CLOCK,
        viewer: str | None = None,
    ) -> None:
        """Open the store as `StoreFile` does, to show what is of the viewer and published; None: all."""
        self._viewer = viewer
        self._left_out: set[tuple[str, object]] = set()
        super().__init__(path, read_only=read_only, journal=journal, clock=clock)

    def put(self, profile: StageProfile) -> Stored:
        """Store a profile; the one it replaces becomes history.

        A user with too many models (a new name for each job) loses those that were measured longest ago.
        """
        stored = self.put_all((profile,))
        if stored.added and profile.key.user:
            for key in self._rows(_BEYOND_OF_USER, (profile.key.user, MOST_OF_A_USER)):
                self.remove(ProfileKey(*key))
        return stored

    def put_all(self, profiles: Iterable[StageProfile], author: Author | None = None) -> Stored:
        """Store several profiles, all or none.

        One that is not an estimate takes the stale mark off its key, with the observations that led to it.
        """
        added = replaced = 0
        with self._transaction() as connection:
            for profile in profiles:
                old = self.get(profile.key)
                added, replaced = added + (old is None), replaced + (old is not None)
                _insert(connection, profile)
                if not profile.is_estimate:
                    connection.execute(_CLEAR_STALE, _values(profile.key))
                    connection.execute(_DELETE_OBSERVATIONS, _values(profile.key))
                if author is not None:
                    _audit(connection, author, profile.key, None if old is None else to_dict(old), to_dict(profile))
        return Stored(added, replaced)

    def get(self, key: ProfileKey) -> StageProfile | None:
        """The newest profile of a key, None when it was never measured."""
        return next(iter(self._select(_OF_KEY, (*_values(key), 1))), None)

    def list(self) -> tuple[StageProfile, ...]:
        """The newest profile of every key, by key."""
        return self._select(_NEWEST_OF_ALL)

    def history(self, key: ProfileKey) -> tuple[StageProfile, ...]:
        """The kept measurements of a key, the newest first."""
        return self._select(_OF_KEY, (*_values(key), HISTORY_PER_KEY))

    def remove(self, key: ProfileKey, author: Author | None = None) -> bool:
        """Forget a key, its history, observations and mark; returns whether there was a profile."""
        with self._transaction() as connection:
            old = self.get(key)
            for statement in (_DELETE_KEY, _CLEAR_STALE, _DELETE_OBSERVATIONS):
                connection.execute(statement, _values(key))
            if old is not None and author is not None:
                _audit(connection, author, key, to_dict(old), None)
        return old is not None

    def observe(self, key: ProfileKey, observation: Observation) -> None:
        """Keep a running job's report: the same report once, and of each key only the newest."""
        at, job_id, iterations, stage_s, gpu_mem_gib = astuple(observation)
        with self._transaction() as connection:
            connection.execute(_OBSERVE, (*_values(key), at, job_id, iterations, json.dumps(stage_s), gpu_mem_gib))
            connection.execute(_DELETE_OLD_OBSERVATIONS, (*_values(key), OBSERVATIONS_PER_KEY))

    def observations(self, key: ProfileKey) -> tuple[Observation, ...]:
        """The reports of running jobs since the key was measured, the oldest first."""
        return self._sane("observation", self._rows(_OBSERVATIONS_OF_KEY, _values(key)), _observation)

    def mark_stale(self, key: ProfileKey, reason: str, author: Author) -> bool:
        """Mark a key to be measured again; returns whether it was not marked before."""
        with self._transaction() as connection:
            values = (*_values(key), author.at, reason, author.who)
            new = connection.execute(_MARK_STALE, values).rowcount > 0
            if new:
                _audit(connection, author, key, None, {"reason": reason})
        return new

    def clear_stale(self, key: ProfileKey, author: Author) -> bool:
        """Take a mark back, and forget the observations that led to it; returns whether there was one."""
        with self._transaction() as connection:
            marked = connection.execute(_CLEAR_STALE, _values(key)).rowcount > 0
            if marked:
                connection.execute(_DELETE_OBSERVATIONS, _values(key))
                _audit(connection, author, key, None, None)
        return marked

    def stale_marks(self) -> tuple[StaleMark, ...]:
        """All marks, by key."""
        marks = (StaleMark(ProfileKey(*row[:5]), *row[5:]) for row in self._rows(_STALE_MARKS))
        return tuple(mark for mark in marks if self._shows(mark.key))

    def audit(self) -> tuple[AuditEntry, ...]:
        """Every change made by hand and every mark, the oldest first."""
        entries = self._sane("audit", self._rows(_AUDIT), _audit_entry)
        return tuple(entry for entry in entries if self._shows(entry.key))

    def put_document(self, kind: str, document: Document) -> None:
        """Store a document; one of the same kind and name is replaced."""
        body = json.dumps(document.body, ensure_ascii=False, sort_keys=True)
        with self._transaction() as connection:
            connection.execute(_PUT_DOCUMENT, (kind, document.name, document.measured_at, body))

    def documents(self, kind: str) -> tuple[Document, ...]:
        """All documents of a kind, by name."""
        rows = self._rows(_DOCUMENTS_OF_KIND, (kind,))
        return self._sane("document", rows, lambda row: Document(row[0], row[1], dict(json_of(row[2]))))

    def remove_document(self, kind: str, name: str) -> bool:
        """Forget a document; returns whether there was one."""
        with self._transaction() as connection:
            return connection.execute(_DELETE_DOCUMENT, (kind, name)).rowcount > 0

    def _select(self, query: str, values: tuple[object, ...] = ()) -> tuple[StageProfile, ...]:
        profiles = self._sane("measurement", self._rows(query, values), _profile)
        return tuple(profile for profile in profiles if self._shows(profile.key))

    def _shows(self, key: ProfileKey) -> bool:
        return self._viewer is None or key.serves(self._viewer)

    def _sane(self, table: str, rows: Iterable[Any], read: Callable[[Any], Item]) -> tuple[Item, ...]:
        """Read rows; those that cannot be true are left out and named in the log, once for each open store."""
        found: list[Item] = []
        for row in rows:
            try:
                found.append(read(row))
            except (ProfileError, TypeError, ValueError, OverflowError) as error:  # SQLite columns don't enforce types
                place = (table, row[0])
                if place not in self._left_out:
                    self._left_out.add(place)
                    log.warning("%s: row %s of table %s is left out: %s", self.path, row[0], table, error)
        return tuple(found)


def _values(key: ProfileKey) -> tuple[object, ...]:
    return (key.model, key.batch_size, key.gpu_count, key.gpu_type, key.user)


def _insert(connection: sqlite3.Connection, profile: StageProfile) -> None:
    figures = (*profile.stage_s, profile.iteration_s, profile.gpu_mem_gib)
    about = (profile.iterations, profile.measured_at, profile.source, json.dumps(profile.detail.to_dict()))
    connection.execute(_INSERT, (*_values(profile.key), *figures, *about))
    connection.execute(_DELETE_OLD_OF_KEY, (*_values(profile.key), HISTORY_PER_KEY))


def _audit(
    connection: sqlite3.Connection,
    author: Author,
    key: ProfileKey,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    sides = (json.dumps(side or {}, ensure_ascii=False) for side in (before, after))
    connection.execute(_WRITE_AUDIT, (author.at, author.who, author.action, *_values(key), *sides))


def _profile(row: Any) -> StageProfile:
    """The row as a record, whose constructor checks the figures once more."""
    _, model, batch_size, gpu_count, gpu_type, user, *values, detail = row
    if not all(isinstance(text, str) for text in (model, gpu_type, user, *values[-2:])):
        raise ProfileError("a name, time or source is not text")
    key = ProfileKey(model, batch_size, gpu_count, gpu_type, user)
    return replace(StageProfile(key, *values), detail=ProfileDetail.from_dict(dict(json_of(detail))))


def _observation(row: Any) -> Observation:
    _, at, job_id, iterations, stage_s, gpu_mem_gib = row
    times_s = tuple(map(float, json_of(stage_s)))
    held_gib = None if gpu_mem_gib is None else float(gpu_mem_gib)
    return Observation(str(at), int(job_id), int(iterations), times_s, held_gib)


def _audit_entry(row: Any) -> AuditEntry:
    _, at, who, action, *key, before, after = row
    return AuditEntry(at, who, action, ProfileKey(*key), *(dict(json_of(side)) or None for side in (before, after)))
