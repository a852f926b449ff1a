"""What a status file may hold where `muri top` reads it: it belongs to a user, and root shows those of all users.

The lower table is made here, too: what each member, the node and its GPUs use.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import RenderableType
from rich.table import Table

from muri.terminal import cell

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
    pilot_job: _Whole | _Text | None = None
    host_job: _Whole | _Text | None = None  # the same, of a runtime of 0.2
    node: _Text | None = None
    total_speed: _Figure | None = None
    resources: Annotated[dict[_Text, _Resource], Field(max_length=MOST_ROWS)] | None = None
    disciplines: list[_Change] | None = None
    fault: _Fault | None = None


def checked(status: Any) -> dict[str, Any]:
    """Return a status as it is, if it can be shown, and printed as JSON.

    Raises:
        ValueError: It is not one of a runtime; the text names the place.
    """
    try:
        _Status.model_validate(status)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error
    json.dumps(status, allow_nan=False)
    return dict(status)


_COLUMNS: Final = ("CPU", "MEM GIB", "DISK MIB/S", "NET MIB/S", "GPU", "GPU GIB")
_UNKNOWN: Final = "-"
_MOST: Final = 1e12


def use_table(status: Mapping[str, Any]) -> list[RenderableType]:
    """Return the table as a list of one; of none where a pilot job has not told, or another program wrote the file."""
    use = status.get("use")
    node = use.get("node") if isinstance(use, Mapping) else None
    if not isinstance(use, Mapping) or not isinstance(node, Mapping):
        return []
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=False)
    table.add_column("USE", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    jobs = use.get("jobs")
    for name in status["members"]:
        job = jobs.get(name) if isinstance(jobs, Mapping) else None
        table.add_row(*_job_row(name, job if isinstance(job, Mapping) else {}))
    for row in _node_rows(node):
        table.add_row(*row)
    return [table]


def _job_row(name: str, job: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    """Nobody counts the network by process."""
    return (
        cell(name),
        _number(job.get("cpu_cores")),
        _number(job.get("mem_gib")),
        _number(job.get("disk_mib_per_s")),
        _UNKNOWN,
        _share(job.get("gpu_utilisation")),
        _number(job.get("gpu_mem_gib")),
    )


def _node_rows(node: Mapping[str, Any]) -> Iterator[tuple[RenderableType, ...]]:
    """The node's row, with its GPU if there is one; several have a row each."""
    found = node.get("gpus")
    gpus = (
        [(name, gpu) for name, gpu in found.items() if isinstance(gpu, Mapping)] if isinstance(found, Mapping) else []
    )[:MOST_ROWS]
    cores, count = _number(node.get("cpu_cores")), node.get("cpu_count")
    first = gpus[0][1] if len(gpus) == 1 else {}
    yield (
        "node",
        f"{cores}/{count}" if isinstance(count, int) and count else cores,
        _number(node.get("mem_gib")),
        _number(node.get("disk_mib_per_s")),
        _number(node.get("network_mib_per_s")),
        _share(first.get("utilisation")),
        _number(first.get("mem_gib")),
    )
    for name, gpu in gpus if len(gpus) > 1 else ():
        blank = ("",) * 4
        yield cell(f"gpu {name}"), *blank, _share(gpu.get("utilisation")), _number(gpu.get("mem_gib"))


def _number(value: object) -> str:
    if not _is_figure(value):
        return _UNKNOWN
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _share(value: object) -> str:
    return f"{value:.0%}" if _is_figure(value) else _UNKNOWN


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
