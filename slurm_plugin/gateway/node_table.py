"""Reads nodes as Slurm prints them, one a line; the commands and libslurm print them alike in all releases."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.records.cluster import Node

log = logging.getLogger(__name__)

_NAMES: Final = (
    "NodeName", "State", "CPUAlloc", "CPUEfctv", "CPUTot", "Gres", "GresUsed", "Partitions", "RealMemory",
    "MemSpecLimit", "AllocMem", "ThreadsPerCore", "AvailableFeatures",
)  # fmt: skip
_FIELD: Final = re.compile(rf"(?:^|\s)({'|'.join(_NAMES)})=(\S*)")


def nodes_of_table(table: str, partitions: Mapping[str, tuple[str, ...]] | None = None) -> tuple[Node, ...]:
    """Parse the node table, one line per node; a line that cannot be read is left out.

    Args:
        table: The text.
        partitions: Names of each node's partitions, for a text that does not tell them.
    """
    lines = (line for line in table.split("\n") if line.startswith("NodeName="))
    return tuple(sorted(_readable(lines, partitions or {}), key=lambda node: node.name))


def _readable(lines: Iterator[str], partitions: Mapping[str, tuple[str, ...]]) -> Iterator[Node]:
    for line in lines:
        try:
            yield _node(line, partitions)
        except (LookupError, ValueError) as error:
            log.warning("a node is left out, for its record cannot be read: %r; in %.200r", error, line)


def _node(line: str, partitions: Mapping[str, tuple[str, ...]]) -> Node:
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        fields.setdefault(name, value)  # free text such as Reason= comes last and can't replace a field
    cpus_allocated = int(fields["CPUAlloc"])
    state = text_fields.node_words(fields["State"])
    cpu_count = int(fields.get("CPUEfctv", fields["CPUTot"]))
    if 0 < cpus_allocated < cpu_count:
        # Slurm leaves it to its clients to say so of a node with some CPUs free.
        state = ["MIXED" if word == "ALLOCATED" else word for word in state]
    configured = text_fields.gres_counts(fields.get("Gres", ""))
    name = fields["NodeName"]
    return Node(
        name=name,
        usable=text_fields.node_usable(state),
        state="+".join(state),
        partitions=partitions.get(name) or tuple(sorted(_listed(fields.get("Partitions", "")))),
        cpu_count=cpu_count,
        cpus_allocated=cpus_allocated,
        gpu_count=text_fields.gpu_total(configured),
        gpus_allocated=text_fields.gpu_total(text_fields.gres_counts(fields.get("GresUsed", ""))),
        gpu_type=text_fields.gpu_type(configured),
        mem_mib=text_fields.node_mem_mib(int(fields.get("RealMemory", 0)), int(fields.get("MemSpecLimit", 0))),
        mem_allocated_mib=int(fields.get("AllocMem", 0)),
        threads_per_core=max(1, int(fields.get("ThreadsPerCore", 1))),
        features=tuple(_listed(fields.get("AvailableFeatures", ""))),
        gpus_in_use=text_fields.indices_in(fields.get("GresUsed", "")),
    )


def _listed(text: str) -> list[str]:
    return [part for part in text.replace("(null)", "").split(",") if part]
