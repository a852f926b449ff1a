"""What nodes can give out now: GPUs, CPUs and memory, less what jobs that still wait were promised. Pure."""

from dataclasses import dataclass

from ClusterShell.NodeSet import NodeSet

from muri.policies.types import FreeNode
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.model import Job, JobState, Node
from muri.slurm_plugin.view import Role, View

_PROMISED = {Role.HOST, Role.DRY_RUN, Role.RELEASED}
_MIB_PER_GIB = 1024.0


@dataclass(slots=True)
class _Free:
    """What a node has left."""

    gpus: int
    cpus: int
    mem_mib: int

    @classmethod
    def of(cls, node: Node) -> "_Free":
        return cls(
            node.gpu_count - node.gpus_allocated,
            node.cpu_count - node.cpus_allocated,
            node.mem_mib - node.mem_allocated_mib,
        )


def free_nodes(view: View, config: Config) -> tuple[FreeNode, ...]:
    """Return what can be given out: what is idle, less what is promised to Muri's jobs that still wait."""
    nodes = [
        node
        for node in view.snapshot.nodes
        if node.usable
        and node.gpu_count
        and (not config.partitions or any(part in config.partitions for part in node.partitions))
    ]
    free = {node.name: _Free.of(node) for node in nodes}
    for job in view.snapshot.jobs:
        if job.state is JobState.PENDING and not job.held and view.roles[job.job_id] in _PROMISED:
            _take(free, job, {node.name for node in nodes if job.partition in node.partitions})
    return tuple(_free_node(node, free[node.name], config) for node in nodes)


def _free_node(node: Node, free: _Free, config: Config) -> FreeNode:
    return FreeNode(
        node.name,
        node.partitions,
        max(free.gpus, 0),
        gpu_mem_gib=config.gpu_mem_gib.get(node.gpu_type, 0.0),
        gpu_count=node.gpu_count,
        cpu_count=float(node.cpu_count),
        mem_gib=node.mem_mib / _MIB_PER_GIB,
        free_cpus=float(max(free.cpus, 0)),
        free_mem_gib=max(free.mem_mib, 0) / _MIB_PER_GIB,
    )


def _take(free: dict[str, _Free], job: Job, eligible: set[str]) -> None:
    """Set a waiting job's resources aside where Slurm will probably start it."""
    required = sorted(set(NodeSet(job.required_nodes)) & free.keys()) if job.required_nodes else []
    names = required or sorted(eligible, key=lambda name: (-free[name].gpus, name))
    node_count = max(1, job.node_count)
    cpus, mem_mib, wanted = -(-job.cpu_count // node_count), job.mem_per_node_mib, job.gpu_count
    for name in names:
        taken = min(wanted, max(free[name].gpus, 0))
        if taken:
            free[name].gpus -= taken
            free[name].cpus -= cpus
            free[name].mem_mib -= mem_mib
        wanted -= taken
