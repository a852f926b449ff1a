"""Profiles as JSON, to move them between clusters; every error names its place in the file."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from muri.foreign import json_of
from muri.profiler.errors import ExchangeError
from muri.profiler.records import (
    PER_STAGE,
    STAGES,
    WHOLE,
    ProfileDetail,
    ProfileError,
    ProfileKey,
    StageProfile,
)
from muri.text import nearest

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
}
_DETAIL: Final = "detail"
_LEAST: Final = {"batch_size": 0, "gpu_count": 1, "iterations": 0}
_FIELDS: Final = (*_KEY_FIELDS, *_TIMES, *_MEASURED, _DETAIL)


def to_dict(profile: StageProfile) -> dict[str, Any]:
    """A profile as plain JSON values."""
    record = {name: getattr(profile.key, name) for name in _KEY_FIELDS}
    record |= {name: getattr(profile, name) for name in (*_TIMES, *_MEASURED)}
    detail = profile.detail.to_dict()
    return record | {_DETAIL: detail} if detail else record


def to_json(profiles: Iterable[StageProfile]) -> str:
    """Profiles as the text of an export file."""
    document = {"schema": SCHEMA, "version": VERSION, "profiles": [to_dict(profile) for profile in profiles]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str, name: str) -> tuple[StageProfile, ...]:
    """Read an export file.

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
    profiles = tuple(_read(record, f"{name}: profiles[{index}]") for index, record in enumerate(records))
    _refuse_repeats(profiles, name)
    return profiles


def _refuse_repeats(profiles: Iterable[StageProfile], name: str) -> None:
    first: dict[ProfileKey, int] = {}
    for index, profile in enumerate(profiles):
        if profile.key in first:
            raise ExchangeError(f"{name}: profiles[{index}] repeats profiles[{first[profile.key]}]: {profile.key}")
        first[profile.key] = index


def _read(record: object, place: str) -> StageProfile:
    if not isinstance(record, dict):
        raise ExchangeError(f"{place}: must be an object with the fields {', '.join(_FIELDS)}")
    for field in record:
        if field not in _FIELDS:
            raise ExchangeError(f"{place}.{field}: unknown field{_nearest(field, _FIELDS)}")
    values = {field: _value(record, field, place) for field in _FIELDS if field != _DETAIL}
    key = ProfileKey(**{field: values.pop(field) for field in _KEY_FIELDS})
    detail = _detail(record.get(_DETAIL, {}), f"{place}.{_DETAIL}")
    try:
        return StageProfile(key, **values, detail=detail)
    except ProfileError as error:
        raise ExchangeError(f"{place}: {error}") from error


def _detail(record: object, place: str) -> ProfileDetail:
    valid = [item.name for item in dataclasses.fields(ProfileDetail)]
    if not isinstance(record, dict):
        raise ExchangeError(f"{place}: must be an object with some of the fields {', '.join(valid)}")
    for field, value in record.items():
        if field not in valid:
            raise ExchangeError(f"{place}.{field}: unknown field{_nearest(field, valid)}")
        _figures(value, field, f"{place}.{field}")
    try:
        return ProfileDetail.from_dict(record)
    except ProfileError as error:
        raise ExchangeError(f"{place}: {error}") from error


def _figures(value: object, field: str, place: str) -> None:
    """Refuse a value that is not a number or, for figures per stage, no list of numbers."""
    if field in PER_STAGE:
        if not isinstance(value, list):
            raise ExchangeError(f"{place}: must be a list of {len(STAGES)} numbers, found {value!r}")
        for index, item in enumerate(value):
            _number(item, f"{place}[{index}]")
    elif field == "dangers":
        if not isinstance(value, list):
            raise ExchangeError(f"{place}: must be a list of names, found {value!r}")
    elif field in WHOLE:
        _whole(value, 0, place)
    else:
        _number(value, place)


def _nearest(field: str, valid: Sequence[str]) -> str:
    near = nearest(field, valid)
    return f"; did you mean {near[0]!r}?" if near else f"; valid are: {', '.join(valid)}"


def _value(record: dict[str, Any], field: str, place: str) -> Any:
    if field not in record:
        if field in _OPTIONAL:
            return _OPTIONAL[field]
        raise ExchangeError(f"{place}.{field}: missing")
    value = record[field]
    if field in _LEAST:
        return _whole(value, _LEAST[field], f"{place}.{field}")
    if field in (*_TIMES, "gpu_mem_gib"):
        return _number(value, f"{place}.{field}")
    return _text(value, field, f"{place}.{field}")


def _whole(value: object, least: int, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ExchangeError(f"{place}: must be a whole number ≥ {least}, found {value!r}")
    return value


def _number(value: object, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExchangeError(f"{place}: must be a number, found {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ExchangeError(f"{place}: the number is too large") from error


def _text(value: object, field: str, place: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ExchangeError(f"{place}: must be text without control characters, found {value!r}")
    if field in ("model", "gpu_type") and not value.strip():
        raise ExchangeError(f"{place}: must not be empty")
    if field == "measured_at" and value:
        try:
            datetime.fromisoformat(value)
        except ValueError as error:
            raise ExchangeError(f"{place}: must be a time such as 2026-03-01T12:00:00Z, found {value!r}") from error
    return value
