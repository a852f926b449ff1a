"""The nodes of a simulated cluster: their outages, and the GPUs, CPUs and host memory in use."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from muri.policies.traits import Demand
from muri.policies.types import CpuMemShare, CpuMemShares, FreeNode, NodeShare
from muri.simulator.engine.jobs import PARTITION, PROPORTIONAL
from muri.simulator.model import Cluster, SimulationError

_ROUNDING: Final = 1e-6


class Nodes:
    """All nodes of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hosts = Hosts(cluster)
        width = len(str(max(0, cluster.node_count - 1)))
        # Planning takes nodes by name, so names sort as numbers do.
        self.names = tuple(f"n{index:0{width}}" for index in range(cluster.node_count))
        self._index = {name: index for index, name in enumerate(self.names)}
        self.free = [cluster.gpus_per_node] * cluster.node_count
        self._failed = [0] * cluster.node_count
        self._drained = [0] * cluster.node_count
        self._seen = {count: self._as_free(count) for count in range(cluster.gpus_per_node + 1)}
        self.available_count = cluster.node_count

    def _as_free(self, count: int) -> tuple[FreeNode, ...]:
        cluster, free = self.cluster, self.hosts.free("", count)
        return tuple(
            FreeNode(
                name,
                (PARTITION,),
                count,
                cluster.gpu_mem_gib,
                cluster.gpus_per_node,
                cpu_count=cluster.cpus_per_node,
                mem_gib=cluster.mem_gib_per_node,
                free_cpus=free.cpus,
                free_mem_gib=free.mem_gib,
            )
            for name in self.names
        )

    @property
    def available_gpus(self) -> int:
        """GPUs, free or not, of the nodes on which jobs may start."""
        return self.available_count * self.cluster.gpus_per_node

    def indices(self, gpus: Iterable[NodeShare]) -> tuple[int, ...]:
        """Indices of the nodes of these GPUs."""
        return tuple(self._index[share.node] for share in gpus)

    def refusal(self, gpus: Iterable[NodeShare]) -> str | None:
        """Why these GPUs cannot be given out; None: they can."""
        for share in gpus:
            index = self._index.get(share.node)
            if index is None or not self.is_available(index) or self.free[index] < share.gpu_count:
                return f"more GPUs of node {share.node} than are free"
        return None

    def hold(self, gpus: Iterable[NodeShare]) -> None:
        """Give GPUs to a unit."""
        for share in gpus:
            self.free[self._index[share.node]] -= share.gpu_count

    def release(self, gpus: Iterable[NodeShare]) -> None:
        """Take GPUs back."""
        for share in gpus:
            self.free[self._index[share.node]] += share.gpu_count

    def is_available(self, index: int) -> bool:
        """Whether jobs may start there."""
        return not self._failed[index] and not self._drained[index]

    def fail(self, index: int, change: int) -> None:
        """A failure begins (1) or ends (−1); several may overlap."""
        self._failed[index] += change
        self._recount()

    def drain(self, index: int, change: int) -> None:
        """A drain begins (1) or ends (−1)."""
        self._drained[index] += change
        self._recount()

    def _recount(self) -> None:
        self.available_count = sum(map(self.is_available, range(len(self.names))))

    def as_free(self) -> tuple[FreeNode, ...]:
        """What policies see: the nodes on which jobs may start."""
        if self.hosts.deviating():
            return tuple([self._with_shares(index) for index in range(len(self.names)) if self.is_available(index)])
        if self.available_count == len(self.names):
            return tuple([self._seen[count][index] for index, count in enumerate(self.free)])
        return tuple(
            [self._seen[self.free[index]][index] for index in range(len(self.names)) if self.is_available(index)]
        )

    def _with_shares(self, index: int) -> FreeNode:
        node = self._seen[self.free[index]][index]
        if node.name not in self.hosts.deviating():
            return node
        cpus, mem_gib = self.hosts.free(node.name, self.free[index])
        return replace(node, free_cpus=max(0.0, cpus), free_mem_gib=max(0.0, mem_gib))

    def overdrawn(self) -> tuple[str, str] | None:
        """A node that has given out more than it has, and the name of that resource; None: there is none."""
        for name in self.hosts.deviating():
            if what := self.hosts.overdrawn(name, self.free[self._index[name]]):
                return name, what
        return None


class Hosts:
    """CPUs and memory given out beyond the GPU-proportional shares, by node."""

    def __init__(self, cluster: Cluster) -> None:
        self.limited = cluster.cpus_per_node > 0 or cluster.mem_gib_per_node > 0
        self.fair = Demand(_each(cluster.cpus_per_node, cluster), _each(cluster.mem_gib_per_node, cluster))
        """The GPU-proportional share of one GPU; infinite where unlimited."""
        self._beyond: dict[str, tuple[float, float]] = {}
        self._holders: dict[str, int] = {}

    def deviating(self) -> Mapping[str, tuple[float, float]]:
        """CPUs and GiB that units hold of nodes beyond their proportional shares, negative if less, by node."""
        return self._beyond

    def wanted(self, members: Sequence[int], gpus: Sequence[NodeShare], shares: CpuMemShares) -> CpuMemShares:
        """The shares that a plan gives the members of a unit; empty where that is the proportional share.

        Raises:
            SimulationError: Only some members have shares, or one is of another node or impossible.
        """
        if not (shares and self.limited):
            return PROPORTIONAL
        found = {job_id: shares[job_id] for job_id in members if job_id in shares}
        if not found:
            return PROPORTIONAL
        if len(found) < len(members):
            missing = next(job_id for job_id in members if job_id not in found)
            raise SimulationError(f"a plan gives CPUs and memory to some members of a group but not to job {missing}")
        for job_id, of_job in found.items():
            _check_shares(job_id, of_job, gpus)
        return PROPORTIONAL if len(found) == 1 and self._is_fair(gpus, found) else found

    def held(self, gpus: Sequence[NodeShare], shares: CpuMemShares) -> dict[str, Demand]:
        """CPUs and memory that a unit with shares of its own holds, by node."""
        total = {share.node: [0.0, 0.0] for share in gpus}
        for of_job in shares.values():
            for share in of_job:
                total[share.node][0] += share.cpus
                total[share.node][1] += share.mem_gib
        unlimited = [amount == math.inf for amount in self.fair]
        return {
            node: Demand(*(math.inf if free else amount for free, amount in zip(unlimited, amounts, strict=True)))
            for node, amounts in total.items()
        }

    def per_gpu(self, gpus: Sequence[NodeShare], shares: CpuMemShares) -> Demand | None:
        """CPUs and memory of each GPU of a unit, on the node with the least; None: the proportional share."""
        if not shares:
            return None
        held = self.held(gpus, shares)
        cpus = min(held[share.node].cpus / share.gpu_count for share in gpus)
        return Demand(cpus, min(held[share.node].mem_gib / share.gpu_count for share in gpus))

    def change(self, gpus: Sequence[NodeShare], shares: CpuMemShares, sign: int) -> None:
        """A unit with shares of its own starts to hold them (1) or gives them back (−1)."""
        if not shares:
            return
        held = self.held(gpus, shares)
        for share in gpus:
            node = share.node
            self._holders[node] = self._holders.get(node, 0) + sign
            if not self._holders[node]:  # nothing is left but rounding errors
                del self._holders[node], self._beyond[node]
                continue
            before = self._beyond.get(node, (0.0, 0.0))
            more = (
                _beyond(held[node].cpus, self.fair.cpus * share.gpu_count),
                _beyond(held[node].mem_gib, self.fair.mem_gib * share.gpu_count),
            )
            self._beyond[node] = (before[0] + sign * more[0], before[1] + sign * more[1])

    def free(self, node: str, free_gpus: int) -> Demand:
        """Free CPUs and memory of a node; 0 where unlimited."""
        cpus, mem_gib = self._beyond.get(node, (0.0, 0.0))
        return Demand(_left(self.fair.cpus, free_gpus, cpus), _left(self.fair.mem_gib, free_gpus, mem_gib))

    def overdrawn(self, node: str, free_gpus: int) -> str:
        """Name of the resource that a node has given out too much of; empty: none."""
        left = self.free(node, free_gpus)
        for name, amount, each in zip(("CPUs", "memory"), left, self.fair, strict=True):
            if each < math.inf and amount < -_ROUNDING * max(1.0, each):
                return name
        return ""

    def _is_fair(self, gpus: Sequence[NodeShare], shares: CpuMemShares) -> bool:
        held = self.held(gpus, shares)
        return all(
            math.isclose(amount, each * share.gpu_count, rel_tol=_ROUNDING) or amount == each == math.inf
            for share in gpus
            for amount, each in zip(held[share.node], self.fair, strict=True)
        )


def _each(amount: float, cluster: Cluster) -> float:
    return amount / cluster.gpus_per_node if amount > 0 else math.inf


def _beyond(held: float, fair: float) -> float:
    return 0.0 if fair == math.inf else held - fair


def _left(fair: float, free_gpus: int, beyond: float) -> float:
    return 0.0 if fair == math.inf else fair * free_gpus - beyond


def _check_shares(job_id: int, shares: tuple[CpuMemShare, ...], gpus: Sequence[NodeShare]) -> None:
    nodes, wanted = [share.node for share in shares], [share.node for share in gpus]
    if sorted(nodes) != sorted(wanted):
        raise SimulationError(
            f"a plan gives job {job_id} GPUs of {', '.join(wanted)} but CPUs and memory of {', '.join(nodes) or 'none'}"
        )
    for share in shares:
        if not (0 <= share.cpus < math.inf and 0 <= share.mem_gib < math.inf):
            raise SimulationError(
                f"a plan gives job {job_id} {share.cpus} CPUs and {share.mem_gib} GiB of {share.node}; "
                "both must be finite and ≥ 0"
            )
