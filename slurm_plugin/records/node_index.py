"""What a cycle looks up about nodes for each job, found once for all jobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from muri.slurm_plugin.records.cluster import Node


@dataclass(frozen=True)
class NodeIndex:
    """The nodes of a snapshot by name and by partition.

    Attributes:
        nodes: All nodes, by name.
    """

    nodes: tuple[Node, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Each node by its name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def by_partition(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes of each partition, by name."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for partition in node.partitions:
                found.setdefault(partition, []).append(node)
        return {partition: tuple(nodes) for partition, nodes in found.items()}

    def in_partition(self, partition: str) -> tuple[Node, ...]:
        """Return the nodes of a partition, none for one that is not known."""
        return self.by_partition.get(partition, ())

    @cached_property
    def gpu_types(self) -> Mapping[str, str]:
        """The GPU type of each partition that has GPUs, the first in alphabetical order where it has several."""
        types = {partition: {node.gpu_type for node in nodes if node.gpu_count} for partition, nodes in self._items}
        return {partition: min(found) for partition, found in types.items() if found}

    @cached_property
    def most_cpus(self) -> Mapping[str, int]:
        """The most CPUs that a node with GPUs has, by partition."""
        cpus = {partition: [node.cpu_count for node in nodes if node.gpu_count] for partition, nodes in self._items}
        return {partition: max(found) for partition, found in cpus.items() if found}

    @property
    def _items(self) -> tuple[tuple[str, tuple[Node, ...]], ...]:
        return tuple(self.by_partition.items())
