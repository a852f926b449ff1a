"""The store of stage profiles: one SQLite file, safe with many readers and writers."""

import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from muri.profiler import schema
from muri.profiler.errors import CorruptStoreError
from muri.profiler.exchange import to_dict
from muri.profiler.records import ProfileDetail, ProfileError, ProfileKey, StageProfile
from muri.profiler.store_file import StoreFile
from muri.profiler.upkeep import AuditEntry, Author, Observation, StaleMark

DEFAULT_STATE_DIR: Final = Path("/var/lib/muri")
DEFAULT_CONFIG: Final = "/etc/muri/muri.yaml"
STORE_NAME: Final = "profiles.db"
HISTORY_PER_KEY: Final = 50
"""Measurements kept of one model; older ones are dropped when a new one arrives."""
OBSERVATIONS_PER_KEY: Final = 1000


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


class ProfileStore(StoreFile):
    """Profiles under (model, batch size, GPU count, GPU type), with their earlier measurements.

    What a person changes is written into the audit table in the same transaction: pass an `author`.
    """

    def put(self, profile: StageProfile) -> Stored:
        """Store a profile; the one it replaces becomes history."""
        return self.put_all((profile,))

    def put_all(self, profiles: Iterable[StageProfile], author: Author | None = None) -> Stored:
        """Store several profiles, all or none.

        One that is no estimate takes the stale mark off its key, with the observations that led to it.
        """
        added = replaced = 0
        with self._transaction() as connection:
            for profile in profiles:
                old = self.get(profile.key)
                added, replaced = added + (old is None), replaced + (old is not None)
                _insert(connection, profile)
                if not profile.is_estimate:
                    connection.execute(schema.CLEAR_STALE, _values(profile.key))
                    connection.execute(schema.DELETE_OBSERVATIONS, _values(profile.key))
                if author is not None:
                    _audit(connection, author, profile.key, _figures(old), to_dict(profile))
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

    def measurements(self) -> dict[str, int]:
        """How many measurements are kept, by source."""
        return dict(self._rows(schema.COUNT_BY_SOURCE))

    def remove(self, key: ProfileKey, author: Author | None = None) -> bool:
        """Forget a key, its history, observations and mark.

        Returns:
            Whether there was anything to forget.
        """
        with self._transaction() as connection:
            old = self.get(key)
            for statement in (schema.DELETE_KEY, schema.CLEAR_STALE, schema.DELETE_OBSERVATIONS):
                connection.execute(statement, _values(key))
            if old is not None and author is not None:
                _audit(connection, author, key, _figures(old), None)
        return old is not None

    def observe(self, key: ProfileKey, observation: Observation) -> None:
        """Keep what a running job told; the same report twice is kept once, and only the newest of a key."""
        what = (observation.observed_at, observation.job_id, observation.iterations, json.dumps(observation.stage_s))
        with self._transaction() as connection:
            connection.execute(schema.OBSERVE, (*_values(key), *what))
            connection.execute(schema.DELETE_OLD_OBSERVATIONS, (*_values(key), OBSERVATIONS_PER_KEY))

    def observations(self, key: ProfileKey) -> tuple[Observation, ...]:
        """What running jobs told since the key was measured, the oldest first."""
        rows = self._rows(schema.OBSERVATIONS_OF_KEY, _values(key))
        try:
            return tuple(
                Observation(at, job_id, iterations, tuple(map(float, json.loads(stage_s))))
                for at, job_id, iterations, stage_s in rows
            )
        except (ValueError, TypeError) as error:
            raise CorruptStoreError(self.path, f"an observation of {key} is unreadable") from error

    def mark_stale(self, key: ProfileKey, reason: str, author: Author) -> bool:
        """Say that a key is to be measured again; returns whether it was not marked before."""
        with self._transaction() as connection:
            values = (*_values(key), author.at, reason, author.who)
            new = connection.execute(schema.MARK_STALE, values).rowcount > 0
            if new:
                _audit(connection, author, key, None, {"reason": reason})
        return new

    def clear_stale(self, key: ProfileKey, author: Author) -> bool:
        """Take a mark back, and forget the observations that led to it; returns whether there was one."""
        with self._transaction() as connection:
            marked = connection.execute(schema.CLEAR_STALE, _values(key)).rowcount > 0
            if marked:
                connection.execute(schema.DELETE_OBSERVATIONS, _values(key))
                _audit(connection, author, key, None, None)
        return marked

    def stale_marks(self) -> tuple[StaleMark, ...]:
        """All marks, by key."""
        return tuple(StaleMark(ProfileKey(*row[:4]), *row[4:]) for row in self._rows(schema.STALE_MARKS))

    def audit(self) -> tuple[AuditEntry, ...]:
        """Every change made by hand and every mark, the oldest first."""
        return tuple(
            AuditEntry(
                at, who, action, ProfileKey(*key), _json(self.path, before) or None, _json(self.path, after) or None
            )
            for at, who, action, *key, before, after in self._rows(schema.AUDIT)
        )

    def put_document(self, kind: str, document: Document) -> None:
        """Store a document; one of the same kind and name is replaced."""
        body = json.dumps(document.body, ensure_ascii=False, sort_keys=True)
        with self._transaction() as connection:
            connection.execute(schema.PUT_DOCUMENT, (kind, document.name, document.measured_at, body))

    def documents(self, kind: str) -> tuple[Document, ...]:
        """All documents of a kind, by name."""
        rows = self._rows(schema.DOCUMENTS_OF_KIND, (kind,))
        return tuple(Document(name, measured_at, _json(self.path, body)) for name, measured_at, body in rows)

    def remove_document(self, kind: str, name: str) -> bool:
        """Forget a document; returns whether there was one."""
        with self._transaction() as connection:
            return connection.execute(schema.DELETE_DOCUMENT, (kind, name)).rowcount > 0

    def _select(self, query: str, values: tuple[object, ...] = ()) -> tuple[StageProfile, ...]:
        rows = self._rows(query, values)
        try:
            return tuple(_profile(self.path, row) for row in rows)
        except (ProfileError, TypeError) as error:  # SQLite columns don't enforce types
            raise CorruptStoreError(self.path, str(error)) from error


def _values(key: ProfileKey) -> tuple[object, ...]:
    return (key.model, key.batch_size, key.gpu_count, key.gpu_type)


def _insert(connection: sqlite3.Connection, profile: StageProfile) -> None:
    figures = (*profile.stage_s, profile.iteration_s, profile.gpu_mem_gib)
    about = (profile.iterations, profile.measured_at, profile.source, json.dumps(profile.detail.to_dict()))
    connection.execute(schema.INSERT, (*_values(profile.key), *figures, *about))
    connection.execute(schema.DELETE_OLD_OF_KEY, (*_values(profile.key), HISTORY_PER_KEY))


def _figures(profile: StageProfile | None) -> dict[str, Any] | None:
    return None if profile is None else to_dict(profile)


def _audit(
    connection: sqlite3.Connection,
    author: Author,
    key: ProfileKey,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    sides = (json.dumps(side or {}, ensure_ascii=False) for side in (before, after))
    connection.execute(schema.WRITE_AUDIT, (author.at, author.who, author.action, *_values(key), *sides))


def _profile(path: Path, row: Any) -> StageProfile:
    """The row as a record, which checks its figures once more."""
    _, model, batch_size, gpu_count, gpu_type, *figures, detail = row
    key = ProfileKey(model, batch_size, gpu_count, gpu_type)
    return replace(StageProfile(key, *figures), detail=ProfileDetail.from_dict(_json(path, detail)))


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise CorruptStoreError(path, f"a record is no JSON object: {text[:40]!r}") from error
