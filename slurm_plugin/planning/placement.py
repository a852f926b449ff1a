"""Where a job may run: partition, constraint, exclusions, required nodes and reservations. Pure.

Policies know partitions only. What restricts a job further becomes a partition of its own for planning, such as
"gpu (--constraint=v100)", to which just those nodes belong that the job may get.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muri.slurm_plugin.records.cluster import Job, Node, Reservation, Snapshot
from muri.slurm_plugin.records.gate import without_gate
from muri.slurm_plugin.records.host_lists import HostListError, names_in

_FEATURE = re.compile(r"[A-Za-z0-9_.:=-]+")


def domain_of(job: Job) -> str:
    """Return what jobs of a user must have in common beside their partition, for one job of Muri's to hold their GPUs.

    Args:
        job: As its user submitted it.
    """
    parts = {
        "account": job.account,
        "QOS": job.qos,
        "reservation": job.reservation,
        "licences": without_gate(job.licenses),
        "constraint": job.features,
        "excluded nodes": job.excluded_nodes,
        "GPUs": job.gpu_request,
    }
    return ", ".join(f"{name} {value!r}" for name, value in parts.items() if value)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one job may run.

    Attributes:
        name: Of the partition for planning.
        nodes: Names of the nodes, those that are down included.
        left_to_slurm: Why Slurm cannot start the job there now, whoever plans it; "" when it can.
    """

    name: str
    nodes: frozenset[str]
    left_to_slurm: str = ""


class Places:
    """Finds where jobs may run; equal requests are looked at once.

    Args:
        snapshot: The nodes and reservations.
    """

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
        blocking = self._blocking(job.reservation, job.time_limit_s if time_limit_s is None else time_limit_s)
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
        """Return why Slurm would not let a job run on some nodes until a time, "" when it would.

        Args:
            end_s: The time.
            nodes: The nodes, folded host list.
            reservation: The job's own.
        """
        try:
            names = names_in(nodes)
            found = [each for each in self._before(end_s, reservation) if names & names_in(each.nodes)]
        except HostListError as error:
            return f"Muri cannot tell which nodes are reserved: {error}"
        return f"it would not end before reservation {', '.join(each.name for each in found)}" if found else ""

    def _blocking(self, reservation: str, time_limit_s: int) -> tuple[Reservation, ...]:
        """The reservations of others that begin before a job would end that starts now."""
        return self._before(ends_at_s(self._snapshot.taken_s, time_limit_s), reservation)

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
    """Return when a job ends at the latest, in seconds since the epoch; a time limit of 0 is none."""
    return start_s + time_limit_s if time_limit_s else float("inf")


def _why_none(
    job: Job, fitting: frozenset[str], nodes: frozenset[str], blocked: set[str], blocking: tuple[Reservation, ...]
) -> str:
    if not fitting:
        return "no node of its partition is what it asks for"
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
    """Whether a node has what a constraint asks for.

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
