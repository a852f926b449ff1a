"""Free GPUs, CPUs and host memory of each node while one plan is made; counts only, single GPUs are named later."""

from collections.abc import Iterable

from muri.policies.allocation.demand import SLACK, fair_share
from muri.policies.cycle.placement import FreeGpus, Shares
from muri.policies.traits import Demand
from muri.policies.types import FreeNode, HostShare, PlanJob, Running

Host = tuple[HostShare, ...]
"""CPUs and memory that a job holds of each of its nodes."""


class Servers:
    """What can still be given out.

    Args:
        nodes: The nodes, which are not changed.
        gpus: Their free GPUs; it is counted down.

    Attributes:
        nodes: The nodes by name.
        gpus: Free GPUs.
        kind: Nodes of one size have the same number.
    """

    def __init__(self, nodes: Iterable[FreeNode], gpus: FreeGpus) -> None:
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.gpus = gpus
        sizes: dict[tuple[float, ...], int] = {}
        self.kind = {
            name: sizes.setdefault((node.gpu_count, node.cpu_count, node.mem_gib), len(sizes))
            for name, node in self.nodes.items()
        }
        self._of_partition: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            for partition in node.partitions:
                self._of_partition.setdefault(partition, []).append(name)
        self._free = {name: Demand(node.free_cpus, node.free_mem_gib) for name, node in self.nodes.items()}

    def copy(self) -> "Servers":
        """An independent copy, to try something out."""
        twin = Servers.__new__(Servers)
        twin.nodes, twin.kind, twin._of_partition = self.nodes, self.kind, self._of_partition
        twin.gpus, twin._free = self.gpus.copy(), dict(self._free)
        return twin

    def free(self, name: str) -> Demand:
        """CPUs and memory that a node has left."""
        return self._free[name]

    def with_gpus(self, job: PlanJob, gpus: int) -> list[str]:
        """Nodes of the job's partition with so many free GPUs, by name."""
        on_node = self.gpus.on_node
        return [name for name in self._of_partition.get(job.partition, ()) if on_node(name) >= gpus]

    def has_host(self, name: str, amount: Demand) -> bool:
        """Whether a node has these CPUs and this memory left; what is unknown of a node limits nothing."""
        node, free = self.nodes[name], self._free[name]
        # Written out, for this is asked of every node for every job.
        if node.cpu_count and amount.cpus > free.cpus + SLACK * (1.0 + amount.cpus):
            return False
        return not node.mem_gib or amount.mem_gib <= free.mem_gib + SLACK * (1.0 + amount.mem_gib)

    def tightness(self, name: str) -> tuple[float, ...]:
        """What a node has left; best fit takes the least."""
        return (self.gpus.on_node(name), *self._free[name])

    def take_host(self, shares: Iterable[HostShare]) -> None:
        """Give out CPUs and memory."""
        for share in shares:
            self._move(share, -1.0)

    def give_back_host(self, shares: Iterable[HostShare]) -> None:
        """Get CPUs and memory back."""
        for share in shares:
            self._move(share, 1.0)

    def _move(self, share: HostShare, sign: float) -> None:
        free = self._free[share.node]
        self._free[share.node] = Demand(free.cpus + sign * share.cpus, free.mem_gib + sign * share.mem_gib)

    def host_of(self, gpus: Shares, per_gpu: Demand | None = None) -> Host:
        """CPUs and memory for GPUs: so much for each, or the proportional share of each node."""
        return tuple([self._share(share.node, share.gpu_count, per_gpu) for share in gpus])

    def fits(self, gpus: Shares, host: Host) -> bool:
        """Whether GPUs, of each node once, and CPUs and memory are all there."""
        enough = all(self.gpus.on_node(share.node) >= share.gpu_count for share in gpus)
        return enough and all(self.has_host(share.node, Demand(share.cpus, share.mem_gib)) for share in host)

    def held(self, unit: Running) -> Host:
        """CPUs and memory of a running unit, its members' together; of a node not told, the proportional one."""
        told = [share for job in unit.members for share in unit.host_shares.get(job.job_id, ())]
        if len(unit.members) > 1 and told:
            return tuple(told)
        on_node = {share.node: share for share in told}
        return tuple([on_node.get(share.node) or self._share(share.node, share.gpu_count, None) for share in unit.gpus])

    def _share(self, name: str, gpus: int, per_gpu: Demand | None) -> HostShare:
        node = self.nodes[name]
        each = fair_share(node) if per_gpu is None else per_gpu
        cpus = each.cpus * gpus if node.cpu_count else 0.0
        return HostShare(name, cpus, each.mem_gib * gpus if node.mem_gib else 0.0)


def per_gpu(share: HostShare, gpus: int) -> Demand:
    """A share by GPU."""
    return Demand(share.cpus / gpus, share.mem_gib / gpus)
