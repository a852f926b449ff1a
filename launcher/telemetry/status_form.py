"""What a status file may hold where `muri top` reads it: it belongs to a user, and root shows those of all users."""

import json
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_Text = Annotated[str, Field(max_length=4096)]
_Figure = Annotated[float, Field(ge=-1e12, le=1e12)]
_Whole = Annotated[int, Field(ge=-(10**12), le=10**12)]

MOST_ROWS: Final = 64
"""A table has no more: of members, resources or GPUs."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Member(_Part):
    script: _Text | None = None
    state: _Text | None = None
    exit_code: _Whole | None = None
    iterations: _Whole | None = None
    iterations_per_s: _Figure | None = None
    speed: _Figure | None = None
    predicted_speed: _Figure | None = None
    promised_speed: _Figure | None = None
    share: dict[str, _Figure] | None = None


class _Resource(_Part):
    busy: _Figure = 0.0
    holder: _Text | None = None


class _Fault(_Part):
    cause: _Text | None = None


class _Change(_Part):
    reason: _Text | None = None


class _Status(_Part):
    discipline: _Text
    members: Annotated[dict[_Text, _Member], Field(max_length=MOST_ROWS)]
    pid: _Whole | _Text | None = None
    host_job: _Whole | _Text | None = None
    node: _Text | None = None
    total_speed: _Figure | None = None
    resources: Annotated[dict[_Text, _Resource], Field(max_length=MOST_ROWS)] | None = None
    disciplines: list[_Change] | None = None
    fault: _Fault | None = None


def checked(status: Any) -> dict[str, Any]:
    """Return a status as it is, if it can be shown, and printed as JSON.

    Raises:
        ValueError: It is none of a runtime; the text names the place.
    """
    try:
        _Status.model_validate(status)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error
    json.dumps(status, allow_nan=False)
    return dict(status)
