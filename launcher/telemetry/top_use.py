"""The lower table of `muri top`: what each member, the node and its GPUs use."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeGuard

from rich.console import RenderableType
from rich.table import Table

from muri.launcher.telemetry.status_form import MOST_ROWS
from muri.terminal import cell

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
