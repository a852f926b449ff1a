"""The command line of a group's runtime, read into one record."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from muri.errors import UsageError
from muri.group_spec import GroupSpec, read_group
from muri.launcher.arbitration.switching import Node
from muri.launcher.ranks.link import Place
from muri.launcher.sessions.process_start import ChildStarter, Starter, StepStarter
from muri.launcher.sessions.setup import has_gpu
from muri.run_dir import default_run_dir

KEY_VARIABLE: Final = "MURI_GROUP_KEY"
PORT_VARIABLE: Final = "MURI_GROUP_PORT"
"""Rank 0's port; all users of a node can read its processes' command lines."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What one runtime is to do; see `_parser` for the meaning of the fields."""

    group: GroupSpec
    run_dir: Path
    status_file: Path | None
    trace: Path | None
    preload: list[str]
    grace_s: float
    starter: Starter
    node: Node
    place: Place | None = None
    device_mem_gib: float | None = None


class _Parser(argparse.ArgumentParser):
    """Raises Muri's own error."""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            UsageError: Always.
        """
        raise UsageError(message)


def _path(text: str) -> Path:
    return Path(text).resolve()


def _gib(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be greater than 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m muri.launcher.runtime.main",
        description="Serve the members of one group in one process, until SIGTERM.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--group", required=True, help="The group, as the JSON of muri.group_spec.GroupSpec.")
    add("--run-dir", type=Path, help="Directory of the sockets, mode 0700.")
    add("--device-mem-gib", type=_gib, help="Memory of the GPU, if not its own.")
    add("--status-file", type=_path, help="JSON status, written every second.")
    add("--trace", type=_path, help="Trace for Perfetto (Chrome trace events); JSON lines if *.jsonl.")
    add("--preload", default="torch", help="Modules to import ahead, comma-separated (default: %(default)s).")
    add("--rank", type=int, help="This runtime's rank; else $SLURM_PROCID.")
    add("--world-size", type=int, help="Runtimes of the group, one per GPU (default: 1).")
    add("--order-host", help="Where rank 0 listens, at $MURI_GROUP_PORT; else the node on which srun was called.")
    add("--steps", action="store_true", help="Start processes of members as steps of the Slurm job around this one.")
    add("--grace-s", type=float, default=10.0, help="Seconds that scripts get to end at SIGTERM (%(default)s).")
    return parser


def read_options(words: Sequence[str], environment: Mapping[str, str]) -> RuntimeOptions:
    """The options that a command line gives.

    Args:
        words: The command line, without the program.
        environment: Holds the group's key, and Slurm's variables.

    Raises:
        UsageError: A value is malformed, missing or of no member.
    """
    values = vars(_parser().parse_args(words))
    group = read_group(values.pop("group"))
    place = _take_place(values, environment)
    run_dir = (values.pop("run_dir") or default_run_dir(environment)).absolute()
    preload = [name for name in values.pop("preload").split(",") if name]
    steps = values.pop("steps")
    starter = StepStarter.from_environment(environment, group.gpus_per_node) if steps else ChildStarter()
    node = Node(cpus_of(environment), has_gpu())
    return RuntimeOptions(
        group=group, run_dir=run_dir, preload=preload, starter=starter, node=node, place=place, **values
    )


def cpus_of(environment: Mapping[str, str]) -> int:
    """Cores for the members of this runtime: what Slurm gave, as far as the kernel lets it run there.

    Args:
        environment: Holds Slurm's variables. Where Slurm does not confine jobs, only these tell.
    """
    allowed = len(os.sched_getaffinity(0))
    given = environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE") or ""
    return max(1, min(allowed, int(given))) if given.isdecimal() else allowed


def parse_place(
    rank: int | None, world_size: int | None, host: str | None, environment: Mapping[str, str]
) -> Place | None:
    """Where this runtime stands in its group; None for the only one of a group on one GPU.

    Args:
        rank: --rank, or None for $SLURM_PROCID.
        world_size: --world-size, or None for 1.
        host: --order-host, or None for the node that srun was called on.
        environment: Holds the group's key and rank 0's port, and Slurm's variables.

    Raises:
        UsageError: Something is missing or out of range.
    """
    if world_size in (None, 1):
        return None
    rank = int(environment.get("SLURM_PROCID", "-1")) if rank is None else rank
    if world_size is None or world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"--rank {rank} must be 0 to {(world_size or 1) - 1}, the ranks of --world-size {world_size}")
    host = host or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        raise UsageError("--world-size above 1 needs --order-host where srun does not tell the node")
    port = environment.get(PORT_VARIABLE, "")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"--world-size above 1 needs rank 0's port in ${PORT_VARIABLE}, not {port!r}")
    key = environment.get(KEY_VARIABLE, "")
    if len(key) < 32:
        raise UsageError(f"--world-size above 1 needs a secret of at least 32 characters in ${KEY_VARIABLE}")
    return Place(rank, world_size, host, int(port), key.encode())


def _take_place(values: dict[str, Any], environment: Mapping[str, str]) -> Place | None:
    """Take the options of a group of several ranks out of a command line's; None for a group of one rank."""
    rank, size, host = (values.pop(name) for name in ("rank", "world_size", "order_host"))
    place = parse_place(rank, size, host, environment)
    for name in (KEY_VARIABLE, PORT_VARIABLE):  # members' scripts have no use for them
        os.environ.pop(name, None)
    if place is not None and place.rank > 0:  # ranks may share a directory; rank 0's files are the group's
        for name in ("status_file", "trace"):
            if values[name] is not None:
                values[name] = values[name].with_name(f"r{place.rank}-{values[name].name}")
    return place
