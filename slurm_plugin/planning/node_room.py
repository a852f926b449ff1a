"""CPUs and memory that nodes have free in one cycle, and how much of them a job that others may join may hold. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from muri.policies.types import FreeNode, NodeShare
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import StartGroup
from muri.slurm_plugin.planning.slurm_requests import MEMBER_MEM_MIB
from muri.slurm_plugin.records.cluster import Job, Node
from muri.slurm_plugin.records.nodes import names_in
from muri.units import MIB_PER_GIB

_LEAST_OF_OWN_CPUS: Final = 0.75
"""A job's batch script takes a CPU beside its pilot job; where the node has none left, the pilot does with one less, if
that is no more than a quarter of what the job asked for."""


@dataclass(slots=True)
class _Left:
    cpus: int
    mem_mib: int

    def why_short(self, cpus: int, mem_mib: int) -> str:
        """Say what is too little for a group, "" where nothing is."""
        for unit, needed, left in (("CPUs", cpus, self.cpus), ("MiB of memory", mem_mib, self.mem_mib)):
            if needed > left:
                return f"has {max(0, left)} {unit} left, and its pilot job and its members' scripts need {needed}"
        return ""


@dataclass(frozen=True, slots=True)
class PilotShare:
    """What the pilot of one job gets.

    Attributes:
        cpu_count: CPUs.
        mem_mib: Memory; 0 where the job has not asked for any.
    """

    cpu_count: int
    mem_mib: int


def node_room(free: Iterable[FreeNode], config: Config, nodes: Sequence[Node]) -> "NodeRoom":
    """Return the room on nodes of which a plan knows what is free."""
    grouping = config.grouping
    return NodeRoom(free, nodes, config.tuning.joinable_share, grouping.max_group_size)


class NodeRoom:
    """What is free on each node; what starts in this cycle is taken from it.

    Args:
        free: What the plan counts as free.
        nodes: The cluster's nodes.
        share: How much of a node a job that others may join may hold, as a multiple of its GPUs' part.
        scripts: How many batch scripts there may be beside a pilot.
    """

    def __init__(self, free: Iterable[FreeNode], nodes: Iterable[Node], share: float, scripts: int) -> None:
        self._left = {node.name: _Left(int(node.free_cpus), round(node.free_mem_gib * MIB_PER_GIB)) for node in free}
        self._nodes = {node.name: node for node in nodes if node.name in self._left}
        self._share = share
        self._scripts = scripts

    def take_group(self, group: StartGroup, *, counts_mem: bool) -> str:
        """Take what a group that starts has on its nodes.

        Args:
            group: The group.
            counts_mem: Whether Slurm gives out memory there.

        Returns:
            Why its pilot job and its members' batch scripts find no room side by side, "" where they do.
        """
        scripts = sum(member.cpu_count for member in group.members) // group.node_count
        scripts_mib = MEMBER_MEM_MIB * len(group.members) if group.mem_per_node_mib else 0
        cpus, mem_mib = group.cpu_count * group.gpus_per_node + scripts, group.mem_per_node_mib + scripts_mib
        names = sorted(names_in(group.node) & self._left.keys())
        short = ((name, self._left[name].why_short(cpus, mem_mib if counts_mem else 0)) for name in names)
        why = next((f"{name} {what}" for name, what in short if what), "")
        if why:  # one of its jobs may start alone instead
            asked = [member.original for member in group.members]
            cpus = max(-(-each.cpu_count // group.node_count) for each in asked)
            mem_mib = max(each.mem_per_node_mib for each in asked)
        for name in names:
            self._take(name, cpus, mem_mib)
        return why

    def take_alone(self, job: Job, gpus: Sequence[NodeShare]) -> None:
        """Take what a job alone has on its nodes."""
        for share in gpus:
            self._take(share.node, -(-job.given_cpus // len(gpus)), job.mem_per_node_mib)

    def take_joinable(self, job: Job, name: str) -> PilotShare | str:
        """Give a job that is counted as one alone a pilot with room for others, as far as that costs nobody anything.

        The pilot asks for no more than as many jobs like this one as may share its GPUs. Pilot and batch script
        together hold no more than the GPUs' part of the node, or the job's own CPUs where these are more, and no more
        than is free: other GPUs keep the CPUs and memory that belong to them.

        Args:
            job: The job, on GPUs of one node.
            name: The node.

        Returns:
            What its pilot gets, or why it can have none.
        """
        node, left = self._nodes[name], self._left[name]
        part = self._part(node, job.gpu_count)
        cpus = self._pilot_cpus(
            job, node, min(left.cpus + job.given_cpus, max(job.given_cpus, int(part * node.cpu_count)))
        )
        if not cpus:
            return f"{name} has no CPU left for a batch script beside a pilot job"
        mem_mib = self._pilot_mem_mib(job, min(left.mem_mib + job.mem_per_node_mib, int(part * node.mem_mib)))
        if mem_mib is None:
            return f"{name} has no host memory left for anybody else beside these GPUs"
        script_mib = min(job.mem_per_node_mib, MEMBER_MEM_MIB)
        script_cpus = _script_cpus(job, node)
        self._take(name, cpus + script_cpus - job.given_cpus, mem_mib + script_mib - job.mem_per_node_mib)
        return PilotShare(cpus, mem_mib)

    def widen(self, group: StartGroup) -> StartGroup:
        """Return a group that is counted, with memory for those that join it later.

        All that it has on a node is no more than its GPUs' part of that, no more than is free, and for each further
        member no more than those that it has ask for.
        """
        names = names_in(group.node)
        if not group.mem_per_node_mib or not names <= self._nodes.keys() or len(group.members) >= self._scripts:
            return group
        scripts_mib = self._scripts * MEMBER_MEM_MIB
        own_mib = group.mem_per_node_mib
        nodes = [self._nodes[name] for name in names]
        part_mib = min(int(self._part(node, group.gpus_per_node) * node.mem_mib) for node in nodes) - scripts_mib
        for_others_mib = own_mib * (self._scripts - len(group.members)) // len(group.members)
        more_mib = max(0, min(part_mib - own_mib, for_others_mib, *(self._left[name].mem_mib for name in names)))
        for name in names:
            self._take(name, 0, more_mib)
        return replace(group, mem_per_node_mib=own_mib + more_mib)

    def _part(self, node: Node, gpu_count: int) -> float:
        """The part of a node that belongs to so many of its GPUs."""
        return self._share * gpu_count / max(1, node.gpu_count)

    def _pilot_cpus(self, job: Job, node: Node, most: int) -> int:
        """CPUs of a pilot, 0 where there are too few; each of its ranks, one for each GPU, gets as many."""
        script = _script_cpus(job, node)
        own = job.given_cpus
        wanted = min(max(own, most - self._scripts * script), self._scripts * own)
        cpus = min(wanted, most - script)
        cpus -= cpus % job.gpu_count
        return cpus if cpus >= max(1, _LEAST_OF_OWN_CPUS * own) else 0

    def _pilot_mem_mib(self, job: Job, most_mib: int) -> int | None:
        """Memory of a pilot, None where there is too little."""
        own_mib = job.mem_per_node_mib
        if not own_mib:
            return 0
        if own_mib + min(own_mib, MEMBER_MEM_MIB) > most_mib:
            return None
        return min(max(own_mib, most_mib - self._scripts * MEMBER_MEM_MIB), self._scripts * own_mib)

    def _take(self, name: str, cpus: int, mem_mib: int) -> None:
        left = self._left.get(name)
        if left is not None:
            left.cpus -= cpus
            left.mem_mib -= mem_mib


def _script_cpus(job: Job, node: Node) -> int:
    """CPUs of a job's own script beside its pilot: a task for each GPU; Slurm gives out whole cores."""
    return job.gpu_count * max(1, node.threads_per_core)
