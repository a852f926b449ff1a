"""The command line of a group's runtime, read into one record."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from muri.errors import UsageError
from muri.group_spec import GroupSpec, read_group
from muri.launcher.ranks.link import Place
from muri.run_dir import default_run_dir

KEY_VARIABLE: Final = "MURI_GROUP_KEY"

_PATH: Final = click.Path(path_type=Path, resolve_path=True)
_OPTIONS: Final = (
    click.option("--group", required=True, help="The group, as the JSON of muri.group_spec.GroupSpec."),
    click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the sockets, mode 0700."),
    click.option(
        "--device-mem-gib", type=click.FloatRange(min=0, min_open=True), help="Memory of the GPU, if not its own."
    ),
    click.option("--status-file", type=_PATH, help="JSON status, written every second."),
    click.option("--trace", type=_PATH, help="Trace for Perfetto (Chrome trace events); JSON lines if *.jsonl."),
    click.option("--preload", default="torch", show_default=True, help="Modules to import ahead, comma-separated."),
    click.option("--rank", type=int, help="This runtime's rank; else $SLURM_PROCID."),
    click.option("--world-size", type=int, help="Runtimes of the group, one per GPU.  [default: 1]"),
    click.option("--order-host", help="Where rank 0 listens; else the node on which srun was called."),
    click.option("--order-port", type=click.IntRange(1, 65535), help="Rank 0's port; the key is $MURI_GROUP_KEY."),
    click.option("--grace-s", default=10.0, show_default=True, help="Seconds that scripts get to end at SIGTERM."),
)


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What one runtime is to do; see `runtime_options` for the meaning of the fields."""

    group: GroupSpec
    run_dir: Path
    status_file: Path | None
    trace: Path | None
    preload: list[str]
    grace_s: float
    place: Place | None = None
    device_mem_gib: float | None = None


def runtime_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the runtime's options to a command; `read_options` takes their values."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_options(values: dict[str, Any], environment: Mapping[str, str]) -> RuntimeOptions:
    """The options that a command line gives.

    Args:
        values: What click made of the options.
        environment: Holds the group's key, and Slurm's variables.

    Raises:
        UsageError: A value is malformed, missing or of no member.
    """
    group = read_group(values.pop("group"))
    place = _take_place(values, environment)
    run_dir = (values.pop("run_dir") or default_run_dir(environment)).absolute()
    preload = [name for name in values.pop("preload").split(",") if name]
    return RuntimeOptions(group=group, run_dir=run_dir, preload=preload, place=place, **values)


def parse_place(
    rank: int | None, world_size: int | None, host: str | None, port: int | None, environment: Mapping[str, str]
) -> Place | None:
    """Where this runtime stands in its group; None for the only one of a group on one GPU.

    Args:
        rank: --rank, or None for $SLURM_PROCID.
        world_size: --world-size, or None for 1.
        host: --order-host, or None for the node that srun was called on.
        port: --order-port.
        environment: Holds the group's key, and Slurm's variables.

    Raises:
        UsageError: Something is missing or out of range.
    """
    if world_size in (None, 1):
        return None
    rank = int(environment.get("SLURM_PROCID", "-1")) if rank is None else rank
    if world_size is None or world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"--rank {rank} must be 0 to {(world_size or 1) - 1}, the ranks of --world-size {world_size}")
    host = host or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host or port is None:
        raise UsageError("--world-size above 1 needs --order-port, and --order-host where srun does not tell the node")
    key = environment.get(KEY_VARIABLE, "")
    if len(key) < 32:
        raise UsageError(f"--world-size above 1 needs a secret of at least 32 characters in ${KEY_VARIABLE}")
    return Place(rank, world_size, host, port, key.encode())


def _take_place(values: dict[str, Any], environment: Mapping[str, str]) -> Place | None:
    """Take the options of a group of several ranks out of a command's values; None for a group of one rank."""
    rank, size, host, port = (values.pop(name) for name in ("rank", "world_size", "order_host", "order_port"))
    place = parse_place(rank, size, host, port, environment)
    os.environ.pop(KEY_VARIABLE, None)  # members' scripts have no use for it
    if place is not None and place.rank > 0:  # ranks may share a directory; rank 0's files are the group's
        for name in ("status_file", "trace"):
            if values[name] is not None:
                values[name] = values[name].with_name(f"r{place.rank}-{values[name].name}")
    return place
