"""Whether what muri.yaml names is there: partitions, QOS and types of GPUs in Slurm, a Python on this machine."""

import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from muri.errors import MuriError
from muri.installed import is_packaged
from muri.nearest import nearest
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_gateway
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.cluster import Snapshot


class Named(NamedTuple):
    """What became of looking for names.

    Attributes:
        wrong: Sentences about names that are not there, each with those that are.
        unchecked: Why others could not be looked for.
    """

    wrong: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


def look_for_names(config: Config) -> Named:
    """Look in Slurm, where it answers, for what the configuration names."""
    python = tuple(wrong_python(config))
    if not (config.partitions or config.profiling.partition or config.grouping.pilot_qos or config.gpu_mem_gib):
        return Named(python)
    try:
        snapshot = open_gateway(config.gateway).snapshot()
    except MuriError as error:
        return Named(python, (f"whether Slurm has the partitions, QOS and types of GPUs named there: {error}",))
    found = names_in(config, snapshot, SlurmCommands())
    return found._replace(wrong=(*python, *found.wrong))


def wrong_python(config: Config) -> Iterator[str]:
    """Say that there is no such Python; documented installations have it on the controller's machine, too."""
    with suppress(PermissionError):  # then this user cannot tell
        if not Path(config.node_python).is_file():
            usual = "/usr/lib/muri/python" if is_packaged() else sys.executable
            yield (
                f"node_python: {config.node_python} is no program on this machine; name the Python with Muri that each "
                f"compute node has, here it would be {usual}"
            )


def names_in(config: Config, snapshot: Snapshot, commands: SlurmCommands) -> Named:
    """Look for the names in what Slurm has told.

    Args:
        config: The configuration.
        snapshot: Slurm's nodes and partitions.
        commands: To ask slurmdbd for QOS.
    """
    of_nodes = {name for node in snapshot.nodes for name in node.partitions}
    partitions = of_nodes | {each.name for each in snapshot.limits.partitions}
    types = {node.gpu_type for node in snapshot.nodes if node.gpu_count}
    wrong = [
        *_missing("partitions", "partition", config.partitions, partitions),
        *_missing("profiling.partition", "partition", (config.profiling.partition,), {"", *partitions}),
        *_missing("gpu_mem_gib", "type of GPUs", config.gpu_mem_gib, types),
    ]
    if not config.grouping.pilot_qos:
        return Named(tuple(wrong))
    try:
        text = commands.run("read the QOS", ["sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name"])
    except MuriError as error:
        return Named(tuple(wrong), (f"grouping.pilot_qos: {error}",))
    return Named((*wrong, *_missing("grouping.pilot_qos", "QOS", [config.grouping.pilot_qos], {*text.split()})))


def _missing(key: str, kind: str, wanted: Collection[str], there: Collection[str]) -> Iterator[str]:
    for name in wanted:
        if name not in there:
            near = nearest(name, there)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"{key}: Slurm has no {kind} {name}; {hint}it has {', '.join(sorted(filter(None, there))) or 'none'}"
