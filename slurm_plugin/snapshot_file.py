"""Snapshots as files: JSON that can be kept, compared line by line and replayed offline."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from muri.errors import UsageError
from muri.slurm_plugin.model import Job, JobState, Node, Snapshot

#: Raised whenever a file of the old form could no longer be read.
SCHEMA_VERSION = 1
_SCHEMA = "muri-snapshot"


class SnapshotFileError(UsageError):
    """A file is no snapshot; the text names the place of the error."""


def dump_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot as JSON text: the same snapshot gives the same bytes, whatever order it was read in."""
    document = {
        "schema": _SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "taken_s": snapshot.taken_s,
        "cluster": snapshot.cluster,
        "slurm_version": snapshot.slurm_version,
        "jobs": [asdict(job) for job in sorted(snapshot.jobs, key=lambda job: job.job_id)],
        "nodes": [asdict(node) for node in sorted(snapshot.nodes, key=lambda node: node.name)],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def load_snapshot(path: Path) -> Snapshot:
    """Read a snapshot file.

    Raises:
        SnapshotFileError: It cannot be read or is no snapshot.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise SnapshotFileError(f"{path}: cannot be read: {err}") from err
    return parse_snapshot(text, str(path))


def parse_snapshot(text: str, source: str = "snapshot") -> Snapshot:
    """Parse the text of `dump_snapshot`.

    Args:
        text: JSON text.
        source: The file's name, for messages.

    Raises:
        SnapshotFileError: It is no snapshot; the text says where and why.
    """
    try:
        document = json.loads(text)
    except ValueError as err:
        raise SnapshotFileError(f"{source}: it is no JSON: {err}") from err
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise SnapshotFileError(f"{source}: it is no snapshot; make one with `muri snapshot > {source}`")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise SnapshotFileError(
            f"{source}: schema_version is {document.get('schema_version')!r}, this Muri reads {SCHEMA_VERSION}; take "
            "the snapshot again"
        )
    values = {name: value for name, value in document.items() if name not in ("schema", "schema_version")}
    snapshot: Snapshot = _record(Snapshot, values, source)
    _refuse_twins([job.job_id for job in snapshot.jobs], f"{source}: jobs", "job_id")
    _refuse_twins([node.name for node in snapshot.nodes], f"{source}: nodes", "name")
    return snapshot


def _record(kind: Any, value: object, place: str) -> Any:
    """Build one of the model's records, checking names and types of all fields."""
    if not isinstance(value, Mapping):
        raise SnapshotFileError(f"{place}: an object is expected, not {_shown(value)}")
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    # What has a default came later: older files lack it.
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [name for name in needed if name not in value]:
        raise SnapshotFileError(f"{place}: {', '.join(missing)} missing")
    if unknown := sorted(set(value) - set(names)):
        raise SnapshotFileError(f"{place}: unknown {', '.join(unknown)}; known are {', '.join(names)}")
    return kind(**{name: _value(hints[name], value[name], f"{place}: {name}") for name in names if name in value})


def _value(kind: Any, value: object, place: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise SnapshotFileError(f"{place}: a list is expected, not {_shown(value)}")
        item = get_args(kind)[0]
        return tuple(_value(item, element, f"{place}[{index}]") for index, element in enumerate(value))
    if kind in (Job, Node):
        return _record(kind, value, place)
    if kind is JobState:
        return _state(value, place)
    if isinstance(kind, UnionType):
        return None if value is None else _value(get_args(kind)[0], value, place)
    allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise SnapshotFileError(f"{place}: {kind.__name__} is expected, not {_shown(value)}")
    return value


def _state(value: object, place: str) -> JobState:
    try:
        return JobState(value)  # type: ignore[arg-type]
    except ValueError:
        known = ", ".join(JobState)
        raise SnapshotFileError(f"{place}: {_shown(value)} is no job state; known are {known}") from None


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _refuse_twins(keys: list[Any], place: str, name: str) -> None:
    seen: set[Any] = set()
    for index, key in enumerate(keys):
        if key in seen:
            raise SnapshotFileError(f"{place}[{index}]: {name} {key!r} stands there twice")
        seen.add(key)
