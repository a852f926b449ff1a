"""Where a job may run: partition, constraint, exclusions, required nodes and reservations. Pure.

Policies know partitions only. What restricts a job further becomes a partition of its own for planning, such as
"gpu (--constraint=v100)", to which just those nodes belong that the job may get.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from muri.clock import MIB_PER_GIB
from muri.policies.types import FreeNode
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.node_loads import Layers, NodeLoad, need_of
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Reservation, Snapshot
from muri.slurm_plugin.records.nodes import HostListError, names_in
from muri.slurm_plugin.records.roles import Role, View

_PROMISED = {Role.PILOT, Role.DRY_RUN, Role.RELEASED}

_FEATURE = re.compile(r"[A-Za-z0-9_.:=-]+")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one job may run."""

    name: str  # Of the partition for planning
    nodes: frozenset[str]  # Names of the nodes, those that are down included
    left_to_slurm: str = ""  # Why Slurm cannot start the job there now, "" when it can


class Places:
    """Finds where jobs may run; equal requests are looked at once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._known: dict[tuple[str | int, ...], Place] = {}
        self._set_aside = [each for each in snapshot.reservations if each.nodes and each.end_s > snapshot.taken_s]

    @property
    def are_set_aside(self) -> bool:
        """Whether reservations, active or to come, have any nodes."""
        return bool(self._set_aside)

    def of(self, job: Job, time_limit_s: int | None = None) -> Place:
        """Return where a job may run; `time_limit_s` goes before its own, 0 for none."""
        limit_s = job.time_limit_s if time_limit_s is None else time_limit_s
        # Reservations of others that begin before the job would end if it started now.
        blocking = self._before(ends_at_s(self._snapshot.taken_s, limit_s), job.reservation)
        request: tuple[str | int, ...] = (
            job.partition, job.node_count, job.required_nodes, job.excluded_nodes, job.features, job.reservation,
            *(each.name for each in blocking),
        )  # fmt: skip
        place = self._known.get(request)
        if place is None:
            place = self._known[request] = self._find(job, blocking)
        return place

    def names(self, jobs: Iterable[Job]) -> dict[str, tuple[str, ...]]:
        """Return the partitions for planning that each node belongs to: its own, and those of these jobs."""
        found: dict[str, set[str]] = {node.name: set(node.partitions) for node in self._snapshot.nodes}
        for place in {id(place): place for place in map(self.of, jobs)}.values():
            for name in place.nodes:
                found[name].add(place.name)
        return {name: tuple(sorted(partitions)) for name, partitions in found.items()}

    def why_not_until(self, end_s: float, nodes: str, reservation: str) -> str:
        """Return why Slurm would not let a job run on some nodes until a time, "" when it would."""
        try:
            names = names_in(nodes)
            found = [each for each in self._before(end_s, reservation) if names & names_in(each.nodes)]
        except HostListError as error:
            return f"Muri cannot tell which nodes are reserved: {error}"
        return f"it would not end before reservation {', '.join(each.name for each in found)}" if found else ""

    def _before(self, end_s: float, own: str) -> tuple[Reservation, ...]:
        if not self._set_aside:
            return ()
        return tuple(each for each in self._set_aside if each.name != own and each.start_s < end_s)

    def _find(self, job: Job, blocking: tuple[Reservation, ...]) -> Place:
        everywhere = [node for node in self._snapshot.nodes if job.partition in node.partitions]
        try:
            fitting = frozenset(node.name for node in everywhere if _fits(node, job))
            nodes = self._reserved_for(job, fitting)
            blocked = {name for each in blocking for name in names_in(each.nodes)}
        except (HostListError, _NotUnderstoodError) as error:
            return Place(job.partition, frozenset(), f"Muri cannot tell which nodes it may get: {error}")
        why = _why_none(job, fitting, nodes, blocked, blocking)
        nodes -= blocked
        if len(nodes) == len(everywhere):
            return Place(job.partition, nodes, why)
        named = [*_options(job), *(f"before reservation {each.name}" for each in blocking)]
        return Place(f"{job.partition} ({', '.join(named)})", nodes, why)

    def _reserved_for(self, job: Job, nodes: frozenset[str]) -> frozenset[str]:
        if not job.reservation:
            return nodes
        own = next((each for each in self._snapshot.reservations if each.name == job.reservation), None)
        if own is None or own.start_s > self._snapshot.taken_s:
            return frozenset()
        return nodes & names_in(own.nodes) if own.nodes else nodes


class _NotUnderstoodError(Exception):
    """A constraint is in a form that Muri does not know."""


def ends_at_s(start_s: float, time_limit_s: int) -> float:
    """Return when a job ends at the latest, in seconds since the epoch; 0 means no time limit."""
    return start_s + time_limit_s if time_limit_s else float("inf")


def _why_none(
    job: Job, fitting: frozenset[str], nodes: frozenset[str], blocked: set[str], blocking: tuple[Reservation, ...]
) -> str:
    if not fitting:
        return "no node of its partition matches its request"
    if not nodes:
        return f"its reservation {job.reservation} is not active"
    if len(nodes) < job.node_count:
        return f"it asks for {job.node_count} nodes and may get {len(nodes)}"
    if len(nodes - blocked) < job.node_count:
        return f"it would not end before reservation {', '.join(each.name for each in blocking)}"
    return ""


def _options(job: Job) -> Iterator[str]:
    named = {
        "--constraint": job.features,
        "--nodelist": job.required_nodes,
        "--exclude": job.excluded_nodes,
        "--reservation": job.reservation,
    }
    return (f"{option}={value}" for option, value in named.items() if value)


def _fits(node: Node, job: Job) -> bool:
    required = names_in(job.required_nodes)
    if required and job.node_count <= len(required) and node.name not in required:
        return False
    if job.excluded_nodes and node.name in names_in(job.excluded_nodes):
        return False
    return not job.features or _has_features(frozenset(node.features), job.features)


def _has_features(features: frozenset[str], constraint: str) -> bool:
    """Whether a node meets a constraint.

    Raises:
        _NotUnderstoodError: The constraint has counts or brackets, which are about several nodes.
    """
    for part in constraint.replace(",", "&").split("&"):
        names = part.split("|")
        if not all(_FEATURE.fullmatch(name) for name in names) or ("|" in part and "&" in constraint):
            raise _NotUnderstoodError(f"--constraint={constraint}")
        if not features.intersection(names):
            return False
    return True


class _Eligible:
    """The nodes of a place where jobs start by themselves; what is set aside for these is taken from what is free."""

    def __init__(self, nodes: Sequence[Node], free: Mapping[str, NodeLoad]) -> None:
        self._free = free
        self._cpus, self._gpus = sum(node.cpu_count for node in nodes), sum(node.gpu_count for node in nodes)
        # By the GPUs that each had left when it was last looked at: they only get fewer.
        self._most_first = [(-free[node.name].gpus, node.name) for node in nodes]
        heapify(self._most_first)

    def take(self, job: Job, *, shares: bool) -> None:
        """Set a waiting job's resources aside where Slurm will probably start it: where most GPUs are free.

        Nothing for a job that these nodes could never hold: Slurm may show "Priority" long before it looks at that.
        """
        if job.cpu_count > self._cpus or job.gpu_count > self._gpus:
            return
        need, wanted = need_of(job, max(1, job.node_count)), job.gpu_count
        while wanted and (free := self._with_most()) is not None:
            taken = min(wanted, free.gpus)
            wanted -= taken
            free.gpus -= taken
            free.take((need,), shares=shares)

    def _with_most(self) -> NodeLoad | None:
        """The node with the most free GPUs, the first by name; None when there are none."""
        order = self._most_first
        while order and order[0][0] != -self._free[order[0][1]].gpus:
            heapreplace(order, (-self._free[order[0][1]].gpus, order[0][1]))
        return self._free[order[0][1]] if order and order[0][0] < 0 else None


def node_loads(view: View, config: Config, places: Places) -> dict[str, NodeLoad]:
    """Return what is idle on nodes with GPUs, less what is promised to Muri's jobs that start by themselves, by name.

    Members that wait for their pilot job's start are promised their requests.
    """
    nodes = [node for node in view.snapshot.nodes if node.usable and node.gpu_count and is_served(node, config)]
    loads = {node.name: NodeLoad.of(node) for node in nodes}
    layers = Layers(view.snapshot.limits)
    layers.count_running(view.jobs.values(), loads)
    eligible: dict[Place, _Eligible] = {}
    for job in view.jobs.values():
        if job.role in _PROMISED and job.starts_by_itself:
            place = places.of(job)
            if place.left_to_slurm:
                continue
            if place not in eligible:
                eligible[place] = _Eligible([node for node in nodes if node.name in place.nodes], loads)
            eligible[place].take(job, shares=layers.shares(job))
    for member in view.having(Role.MEMBER):
        pilot = view.active.get(member.membership.pilot) if member.membership else None
        if pilot is not None and member.state is JobState.PENDING:
            need = need_of(member, max(1, pilot.node_count))
            for name in names_in(pilot.nodes or pilot.required_nodes) & loads.keys():
                loads[name].take((need,), shares=layers.shares(member))
    return loads


def free_nodes(
    loads: Mapping[str, NodeLoad], view: View, config: Config, places: Places, jobs: Sequence[Job]
) -> tuple[FreeNode, ...]:
    """Return what can be given out, by `node_loads`; the nodes name the partitions for planning of `jobs`."""
    names = places.names(jobs)
    nodes = (node for node in view.snapshot.nodes if node.name in loads)
    return tuple(_free_node(node, names[node.name], loads[node.name], config) for node in nodes)


def is_served(node: Node, config: Config) -> bool:
    """Whether a node belongs to a partition that Muri serves."""
    served = config.partitions
    return not served or any(partition in served for partition in node.partitions)


def _free_node(node: Node, partitions: tuple[str, ...], free: NodeLoad, config: Config) -> FreeNode:
    return FreeNode(
        node.name,
        partitions,
        max(free.gpus, 0),
        gpu_mem_gib=config.gpu_mem_gib.get(node.gpu_type, 0.0),
        gpu_count=node.gpu_count,
        cpu_count=float(node.cpu_count),
        mem_gib=node.mem_mib / MIB_PER_GIB,
        free_cpus=float(max(free.cpus, 0)),
        free_mem_gib=max(free.mem_mib, 0) / MIB_PER_GIB,
        islands=_free_islands(node, free.gpus),
        topology=node.gpu_islands,
        in_order=True,
    )


def _free_islands(node: Node, free_gpus: int) -> tuple[tuple[int, ...], ...]:
    """The free GPUs of a node by island; () where these are not known, or Slurm will give some of them to others."""
    islands = [tuple(gpu for gpu in island if gpu not in node.gpus_in_use) for island in node.gpu_islands]
    known = len(node.gpus_in_use) == node.gpus_allocated and sum(map(len, islands)) == free_gpus
    return tuple(island for island in islands if island) if known else ()
