"""Profiles as JSON, to move them between clusters; every error names its place in the file."""

import json
from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

from muri.profiler.errors import ExchangeError
from muri.profiler.records import OLD_NAMES, ProfileDetail, ProfileError, ProfileKey, StageProfile
from muri.text import json_of, nearest

SCHEMA: Final = "muri-profiles"
VERSION: Final = 1

_KEY_FIELDS: Final = ("model", "batch_size", "gpu_count", "gpu_type", "user")
_TIMES: Final = ("load_s", "preprocess_s", "propagate_s", "synchronize_s", "iteration_s")
_MEASURED: Final = ("gpu_mem_gib", "iterations", "measured_at", "source")
_OPTIONAL: Final[dict[str, Any]] = {
    "user": "",
    "gpu_mem_gib": 0.0,
    "iterations": 0,
    "measured_at": "",
    "source": "import",
    "detail": {},
}
_TEXTS: Final = ("model", "gpu_type", "user", "measured_at", "source")
_FIELDS: Final = (*_KEY_FIELDS, *_TIMES, *_MEASURED, "detail")
_DETAILS: Final = tuple(item.name for item in fields(ProfileDetail))


def to_dict(profile: StageProfile) -> dict[str, Any]:
    """A profile as plain JSON values."""
    record = {name: getattr(profile.key, name) for name in _KEY_FIELDS}
    record |= {name: getattr(profile, name) for name in (*_TIMES, *_MEASURED)}
    detail = profile.detail.to_dict()
    return record | {"detail": detail} if detail else record


def to_json(profiles: Iterable[StageProfile]) -> str:
    """Profiles as the text of an export file."""
    document = {"schema": SCHEMA, "version": VERSION, "profiles": [to_dict(profile) for profile in profiles]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str, name: str) -> tuple[StageProfile, ...]:
    """Read an export file, which `name` names in errors.

    Raises:
        ExchangeError: The text names the place of the fault, and what would be right.
    """
    try:
        document = json_of(text)
    except json.JSONDecodeError as error:
        raise ExchangeError(f"{name}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise ExchangeError(f"{name}: not an export of profiles: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ExchangeError(f'{name}: not an export of profiles: "schema" must be "{SCHEMA}"')
    if document.get("version") != VERSION:
        raise ExchangeError(f"{name}: version is {document.get('version')!r}; this version of Muri reads {VERSION}")
    records = document.get("profiles")
    if not isinstance(records, list):
        raise ExchangeError(f'{name}: "profiles" must be a list')
    found: dict[ProfileKey, StageProfile] = {}
    for index, record in enumerate(records):
        profile = _read(record, f"{name}: profiles[{index}]")
        if profile.key in found:
            first = list(found).index(profile.key)
            raise ExchangeError(f"{name}: profiles[{index}] repeats profiles[{first}]: {profile.key}")
        found[profile.key] = profile
    return tuple(found.values())


def _read(record: object, place: str) -> StageProfile:
    values = {**_OPTIONAL, **_known(record, _FIELDS, place)}
    for field in _FIELDS:
        if field not in values:
            raise ExchangeError(f"{place}.{field}: missing")
    for field in _TEXTS:
        _check_text(values[field], field, f"{place}.{field}")
    key = ProfileKey(**{field: values.pop(field) for field in _KEY_FIELDS})
    place_of_detail = f"{place}.detail"
    detail = _known(values.pop("detail"), (*_DETAILS, *OLD_NAMES), place_of_detail)
    for field, value in detail.items():
        if value is None:  # which `from_dict` takes for not measured
            raise ExchangeError(f"{place_of_detail}.{field}: is null; leave out what was not measured")
    try:
        known = ProfileDetail.from_dict(detail)
    except ProfileError as error:
        raise ExchangeError(f"{place_of_detail}: {error}") from error
    try:
        return StageProfile(key, **values, detail=known)
    except ProfileError as error:
        raise ExchangeError(f"{place}: {error}") from error


def _known(record: object, valid: tuple[str, ...], place: str) -> dict[str, Any]:
    """Return an object's fields (ExchangeError: it is something else, or has a field that is not valid)."""
    if not isinstance(record, dict):
        raise ExchangeError(f"{place}: must be an object with some of the fields {', '.join(valid)}")
    for field in record:
        if field not in valid:
            near = nearest(field, valid)
            hint = f"did you mean {near[0]!r}?" if near else f"valid are: {', '.join(valid)}"
            raise ExchangeError(f"{place}.{field}: unknown field; {hint}")
    return record


def _check_text(value: object, field: str, place: str) -> None:
    if not isinstance(value, str) or not value.isprintable():
        raise ExchangeError(f"{place}: must be text without control characters, found {value!r}")
    if field in ("model", "gpu_type") and not value.strip():
        raise ExchangeError(f"{place}: must not be empty")
    if field == "measured_at" and value:
        try:
            datetime.fromisoformat(value)
        except ValueError as error:
            raise ExchangeError(f"{place}: must be a time such as 2026-03-01T12:00:00Z, found {value!r}") from error
