"""The CPUs and memory that jobs hold on nodes, and whether others find room beside them, as Slurm counts. Pure.

Slurm (select/cons_tres) gives out each MiB of a node's memory once. An ordinary job has its CPUs to itself. In a
partition with OverSubscribe=YES:N, jobs that agree to share lie in at most N layers, each of which has all CPUs of the
node; a job lies in one layer. A node on which an ordinary job runs takes no job that shares. The other way round an
ordinary job starts beside jobs that share, and closes the node to further ones: Muri starts none there, unless one
has closed it already.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.limits import SiteLimits
from muri.slurm_plugin.records.nodes import HostListError, names_in

_HOLDING = frozenset({JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING})


class Need(NamedTuple):
    """A job's CPUs and memory on one node."""

    cpus: int
    mem_mib: int = 0


def need_of(job: Job, node_count: int) -> Need:
    """Return a job's CPUs and memory on each of its nodes."""
    return Need(-(-job.given_cpus // node_count), job.mem_per_node_mib)


def free_in_layers(cpu_count: int, layers: int, jobs: Iterable[int]) -> tuple[int, ...] | None:
    """Lay jobs into layers of CPUs, in the order of their start; None where one of them finds no room.

    Args:
        cpu_count: CPUs of the node.
        layers: How many jobs may share a CPU.
        jobs: The CPUs of each job.

    Returns:
        The CPUs that are free in each layer, fewest first. Each job goes into the fullest layer with room for it.
    """
    free = [cpu_count] * layers
    for cpus in jobs:
        fullest = next((index for index, left in enumerate(free) if left >= cpus), None)
        if fullest is None:
            return None
        free[fullest] -= cpus
        free.sort()
    return tuple(free)


@dataclass(slots=True)
class NodeLoad:
    """The free resources of one node, and how its CPUs are shared."""

    name: str
    gpus: int  # Free, as the next two
    cpus: int
    mem_mib: int
    cpu_count: int  # CPUs of the node
    gpu_count: int = 0  # Its GPUs
    core_cpus: int = 1  # CPUs that Slurm gives out together
    ordinary: bool = False  # An ordinary job runs there, or is let go to it
    # CPUs of each job that shares, the first to start first; empty where an ordinary job has closed the node to others
    sharing: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, node: Node) -> "NodeLoad":
        """Return a node without what is known of its jobs."""
        return cls(
            node.name,
            node.gpu_count - node.gpus_allocated,
            node.cpu_count - node.cpus_allocated,
            node.mem_mib - node.mem_allocated_mib,
            node.cpu_count,
            node.gpu_count,
            max(1, node.threads_per_core),
        )

    @property
    def likeness(self) -> tuple[int, ...]:
        """All that decides about the room on a node, for any job."""
        return (self.cpus, self.mem_mib, self.cpu_count, self.core_cpus, self.ordinary, *self.sharing)

    def copy(self) -> "NodeLoad":
        """Return an independent copy."""
        return replace(self, sharing=list(self.sharing))

    def why_not(self, needs: Sequence[Need], layers: int, *, counts_mem: bool) -> str:
        """Return the lack that keeps jobs from starting in this order, "" where nothing is.

        `layers` is how many jobs may share a CPU, for jobs that do; 1 for ordinary ones.
        """
        mem_mib = sum(need.mem_mib for need in needs)
        if counts_mem and mem_mib > self.mem_mib:
            return f"has {max(0, self.mem_mib)} MiB of memory left, {mem_mib} are needed"
        cpus = [self._whole_cores(need.cpus) for need in needs]
        if layers < 2:
            if self.sharing:
                return "runs jobs that share CPUs, which ordinary jobs must not close to others"
            short = sum(cpus) > self.cpus
            return f"has {max(0, self.cpus)} CPUs left, {sum(cpus)} are needed" if short else ""
        if self.ordinary:
            return "runs an ordinary job, beside which Slurm starts none that shares CPUs"
        fits = free_in_layers(self.cpu_count, layers, [*self.sharing, *cpus]) is not None
        return "" if fits else f"has no layer of CPUs left for all ({layers} jobs may share a CPU)"

    def take(self, needs: Iterable[Need], *, shares: bool) -> None:
        """Count jobs that start. What shares waits where an ordinary job runs; its CPUs are kept for it."""
        for need in needs:
            self.mem_mib -= need.mem_mib
            if shares and not self.ordinary:
                self.sharing.append(self._whole_cores(need.cpus))
            else:
                self.cpus -= self._whole_cores(need.cpus)
                self.ordinary = True

    def _whole_cores(self, cpus: int) -> int:
        return -(-cpus // self.core_cpus) * self.core_cpus


def lack_of_room(loads: Iterable[NodeLoad], needs: Sequence[Need], layers: int, *, counts_mem: bool) -> str:
    """Return the first node without room for jobs that start on each of them, and its lack; "" with room on all."""
    found = ((load.name, load.why_not(needs, layers, counts_mem=counts_mem)) for load in loads)
    return next((f"{name} {why}" for name, why in found if why), "")


class Layers:
    """How many jobs may share a CPU, by partition."""

    def __init__(self, limits: SiteLimits) -> None:
        self._most: Mapping[str, int] = {
            each.name: each.oversubscribe for each in limits.partitions if each.oversubscribe > 1
        }

    def of(self, partition: str) -> int:
        """Return how many jobs of a partition may share a CPU, 1 for none."""
        return self._most.get(partition, 1)

    def shares(self, job: Job) -> bool:
        """Whether a job shares its CPUs with others of its kind."""
        return job.oversubscribe and self.of(job.partition) > 1

    def count_running(self, jobs: Iterable[Job], loads: Mapping[str, NodeLoad]) -> None:
        """Note the jobs that share CPUs, and the ordinary ones, on each node; nothing where no partition shares any."""
        if not self._most:
            return
        running = [job for job in jobs if job.nodes and job.cpu_count and job.state in _HOLDING]
        for job in sorted(running, key=lambda job: (job.start_s, job.job_id)):
            try:
                names = names_in(job.nodes)
            except HostListError:
                continue
            cpus, shares = need_of(job, len(names)).cpus, self.shares(job)
            for name in names & loads.keys():
                if shares:
                    loads[name].sharing.append(cpus)
                else:
                    loads[name].ordinary = True
        for load in loads.values():
            if load.ordinary:
                load.sharing.clear()


class GroupSizes:
    """How many jobs of a kind find room together, each with its own CPUs and memory, on the nodes as they are now."""

    def __init__(self, loads: Mapping[str, NodeLoad], limits: SiteLimits) -> None:
        self._loads, self._limits, self._layers = loads, limits, Layers(limits)
        self._known: dict[tuple[object, ...], tuple[int, str]] = {}

    def largest(self, job: Job, pilot: Need, names: frozenset[str], most: int) -> tuple[int, str]:
        """Return how large a group of jobs like this one could start on one of these nodes, and why no larger."""
        need, gpus = need_of(job, max(1, job.node_count)), max(1, job.gpus_per_node)
        kind = names, job.partition, job.oversubscribe, need, pilot, gpus, most
        if kind not in self._known:
            layers = self._layers.of(job.partition)
            kinds = (layers,) if job.oversubscribe or layers < 2 else (layers, 1)
            counts_mem = self._limits.partition(job.partition).counts_mem
            found, seen = (0, ""), set[tuple[int, ...]]()
            for load in (self._loads[name] for name in sorted(names & self._loads.keys())):
                if load.gpus < gpus or load.likeness in seen:
                    continue
                seen.add(load.likeness)
                found = max(found, _largest_on(load, [pilot, *[need] * most], kinds, counts_mem=counts_mem), key=_size)
                if found[0] == most:
                    break
            # Where no GPU is free, no group starts now.
            self._known[kind] = found if found[0] else (most, "")
        return self._known[kind]


def _size(found: tuple[int, str]) -> int:
    return found[0]


def _largest_on(load: NodeLoad, needs: Sequence[Need], kinds: Sequence[int], *, counts_mem: bool) -> tuple[int, str]:
    """The largest group on a node; `needs` are those of the pilot and of all members, `kinds` the layers to try."""
    for size in range(2, len(needs)):
        found = [load.why_not(needs[: size + 1], layers, counts_mem=counts_mem) for layers in kinds]
        if all(found):
            return size - 1, f"a group of {size} finds no room: {load.name} {found[-1]}"
    return len(needs) - 1, ""
