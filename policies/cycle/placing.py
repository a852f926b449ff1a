"""Which unit, one job or several that share, gets which GPUs: running ones stay, then the largest choose first.

A first place is kept for jobs of every size, so that no size is locked out by jobs that are never stopped.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from muri.policies.cycle import reasons
from muri.policies.cycle.free_gpus import FreeGpus, Shares
from muri.policies.cycle.queue import Bucket, Contender, Members
from muri.policies.types import FreeNode, Reason, Running

_ATTEMPTS: Final = 64  # Repackings in one plan before the rest stays refused: a limit on the time of a plan


MemoryOf = Callable[[Running], float]  # GPU memory of each GPU that a running unit holds; infinite when unknown


@dataclass(frozen=True, slots=True)
class Unit:
    """One job, or several that will share GPUs.

    Attributes:
        members: The jobs by rank.
        gpu_mem_gib: GPU memory that placement must find for a group; for a job alone Slurm sees to it.
        runs: The running unit that continues in it, as it is or with new members; None for a new unit.
        notes: Additional reasons.
    """

    members: Members
    gpu_mem_gib: float = 0.0
    runs: Running | None = None
    notes: tuple[Reason, ...] = ()

    @property
    def stays_on(self) -> Shares:
        """The GPUs of the running unit; empty for a new unit."""
        return () if self.runs is None else self.runs.gpus

    @property
    def joining(self) -> Members:
        """The members that join the running unit."""
        if self.runs is None or len(self.runs.members) == len(self.members):
            return ()
        return tuple(member for member in self.members if member.unit is not self.runs)

    @property
    def rank(self) -> int:
        """Place in the queue: that of the most urgent member."""
        return self.members[0].rank

    @property
    def gpu_count(self) -> int:
        """GPUs that it holds."""
        return self.members[0].bucket.gpu_count

    @property
    def needs(self) -> tuple[str, int, float, int]:
        """Partition, GPUs, GPU memory and nodes, as `FreeGpus.take` takes them."""
        bucket = self.members[0].bucket
        return bucket.partition, bucket.gpu_count, self.gpu_mem_gib, bucket.node_count


def running_unit(members: Members, memory_gib: float = 0.0, memory_of: MemoryOf | None = None) -> Running | None:
    """The running unit that continues where these jobs share GPUs: exactly these, or some that others join.

    Of several it is the one whose restart would cost most. Without `memory_of` no job joins running units.
    """
    if len(members) == 1:
        unit = members[0].unit
        return unit if unit is not None and len(unit.members) == 1 else None
    running = {id(member.unit): member.unit for member in members if member.unit is not None}
    present = Counter(id(member.unit) for member in members)
    whole = [unit for key, unit in running.items() if present[key] == len(unit.members)]
    fitting = [unit for unit in whole if _takes(unit, members, memory_gib, memory_of)]
    return max(
        fitting, key=lambda unit: (sum(job.restart_s for job in unit.members), -unit.members[0].job_id), default=None
    )


def _takes(unit: Running, members: Members, memory_gib: float, memory_of: MemoryOf | None) -> bool:
    """Whether a running unit can take in the jobs that are not its own."""
    if len(unit.members) == len(members):
        return True
    if memory_of is None or not unit.joinable or unit.mode == "plain" or memory_gib > memory_of(unit):
        return False
    joining = [member.job for member in members if member.unit is not unit]
    open_to_all = not any(job.job_id in unit.closed_to for job in joining)
    return open_to_all and sum(job.mem_gib for job in joining) <= unit.spare_mem_gib


def unit_of(members: Members, gpu_mem_gib: float = 0.0, memory_of: MemoryOf | None = None) -> Unit:
    """A unit of these jobs, which continues a running unit where it can."""
    return Unit(members, gpu_mem_gib, running_unit(members, gpu_mem_gib, memory_of))


class Placement(NamedTuple):
    """A unit and the GPUs that it gets."""

    unit: Unit
    gpus: Shares

    @property
    def stays(self) -> bool:
        """Whether the unit, or the part of it that others join, runs there already."""
        return self.unit.runs is not None

    @property
    def kept(self) -> bool:
        """Whether exactly this unit runs there already."""
        return self.stays and not self.unit.joining


def place(units: Sequence[Unit], free: FreeGpus) -> list[Placement]:
    """Give GPUs to units: priority decides which units get any, GPU count which choose first.

    Running units keep their GPUs. Placing the large new ones first leaves the fewest fragments. Where that order
    happens to seat fewer, the order of priority is kept; and a unit that finds no place makes less urgent running ones
    leave theirs, if that helps. `free` is reduced by the placed units, which are returned in the order of placement.
    """
    kept = [
        Placement(unit, unit.stays_on) for unit in sorted(units, key=lambda unit: unit.rank) if unit.runs is not None
    ]
    for placement in kept:
        free.take_exactly(placement.gpus)
    new = [unit for unit in units if unit.runs is None]
    admitted, refused = _admit(new, free)
    placed = _take_all(admitted, free)
    return _make_room([*kept, *placed], refused, free) if refused else [*kept, *placed]


def _admit(units: Sequence[Unit], free: FreeGpus) -> tuple[list[Unit], list[Unit]]:
    """The units that can be placed together, in an order that does it, and those that can't, by rank.

    In order of priority each takes its GPUs, or joins if the large ones choosing first makes room for it.
    """
    by_size = _by_size(units)
    if len(_take_all(by_size, free.copy())) == len(units):
        return by_size, []
    order: list[Unit] = []
    refused: list[Unit] = []
    trial = free.copy()
    hopeless: set[tuple[str, int, float, int]] = set()
    for unit in sorted(units, key=lambda unit: unit.rank):
        if unit.needs in hopeless:
            refused.append(unit)
        elif trial.take(*unit.needs) is not None:
            order.append(unit)
        elif len(hopeless) < _ATTEMPTS and (packed := _packed([*order, unit], free)) is not None:
            order, trial = _by_size([*order, unit]), packed
        else:
            hopeless.add(unit.needs)
            refused.append(unit)
    by_size = _by_size(order)
    return (by_size if len(_take_all(by_size, free.copy())) == len(order) else order), refused


def _packed(units: Sequence[Unit], free: FreeGpus) -> FreeGpus | None:
    """The free GPUs after the large ones choose first; None where they don't all find a place."""
    left = free.copy()
    return left if len(_take_all(_by_size(units), left)) == len(units) else None


def _by_size(units: Iterable[Unit]) -> list[Unit]:
    """By descending need: of GPUs, then of memory."""
    return sorted(units, key=lambda unit: (-unit.gpu_count, -unit.gpu_mem_gib, unit.rank))


def _take_all(units: Iterable[Unit], free: FreeGpus) -> list[Placement]:
    return [Placement(unit, gpus) for unit in units if (gpus := free.take(*unit.needs)) is not None]


def _make_room(placed: Iterable[Placement], refused: Iterable[Unit], free: FreeGpus) -> list[Placement]:
    """Place refused units on GPUs of less urgent ones, which are placed elsewhere if they can be.

    Repeated until no further unit can be placed, so that the next cycle on the same cluster finds nothing to change.
    """
    settled = {placement.unit.rank: placement for placement in placed}
    waiting = {unit.rank: unit for unit in refused}
    for _ in range(_ATTEMPTS):
        if not _help_one(waiting, settled, free):
            break
    return list(settled.values())


def _help_one(waiting: dict[int, Unit], settled: dict[int, Placement], free: FreeGpus) -> bool:
    """Place the most urgent unit that can be placed; whether there was one."""
    hopeless: list[tuple[str, int, float, int]] = []
    last = max(settled, default=-1)
    for rank in sorted(waiting):
        unit = waiting[rank]
        partition, gpu_count, memory, nodes = unit.needs
        if any(
            (partition, nodes) == (where, apart) and gpu_count >= count and memory >= least
            for where, count, least, apart in hopeless
        ):
            continue
        gpus = free.take(*unit.needs)
        if gpus is None and rank < last:
            leaving = _who_leaves(unit, settled.values(), free)
            for placement in leaving:
                del settled[placement.unit.rank]
                free.give_back(placement.gpus)
                waiting[placement.unit.rank] = _moved_for(unit, placement)
            gpus = free.take(*unit.needs) if leaving else None
        if gpus is not None:
            settled[rank] = Placement(unit, gpus)
            del waiting[rank]
            return True
        hopeless.append(unit.needs)
    return False


def _moved_for(unit: Unit, placement: Placement) -> Unit:
    """A unit that has to look for other GPUs, with the reason if it runs."""
    leaving = placement.unit
    if not placement.stays:
        return leaving
    note = reasons.made_room(unit.gpu_count, placement.gpus[0].node)
    return replace(leaving, runs=None, notes=(*leaving.notes, note))


def _who_leaves(unit: Unit, settled: Iterable[Placement], free: FreeGpus) -> list[Placement]:
    """The least urgent units of the node on which leaving costs the least; none if that doesn't help."""
    partition, gpu_count, memory, nodes = unit.needs
    if nodes > 1:
        return []
    on_node: dict[str, list[Placement]] = {}
    for placement in settled:
        if placement.unit.rank > unit.rank and len(placement.gpus) == 1:
            on_node.setdefault(placement.gpus[0].node, []).append(placement)
    best: tuple[float, str, list[Placement]] | None = None
    for node, placements in sorted(on_node.items()):
        leaving = _enough_of(placements, gpu_count - free.on_node(node))
        if leaving and free.suits(node, partition, memory):
            cost = sum(_restart_gpu_s(placement) for placement in leaving)
            best = min(best or (cost, node, leaving), (cost, node, leaving), key=lambda found: found[:2])
    return best[2] if best else []


def _enough_of(placements: Iterable[Placement], missing: int) -> list[Placement]:
    """The least urgent of one node's units that hold the missing GPUs; none if all of them do not."""
    leaving: list[Placement] = []
    for placement in sorted(placements, key=lambda item: -item.unit.rank):
        if missing <= 0:
            break
        leaving.append(placement)
        missing -= placement.gpus[0].gpu_count
    return leaving if missing <= 0 else []


def _restart_gpu_s(placement: Placement) -> float:
    if not placement.stays:
        return 0.0
    return max(member.job.restart_s for member in placement.unit.members) * placement.unit.gpu_count


def first_places(
    eligible: Sequence[Contender],
    open_units: Iterable[Members],
    running: Iterable[Members],
    nodes: Sequence[FreeNode],
    free: FreeGpus,
    left_s: Callable[[Members], float],
) -> tuple[list[Contender], dict[str, Contender]]:
    """Find a place for the most urgent job of each size of which no running unit takes new members.

    Small jobs come and go, and each takes the GPUs of another, so a job that needs a whole node would wait until none
    of them is left. One unit of a size is enough: others of that size can join or follow it.

    Returns:
        Jobs for which GPUs are free, and the nodes that take no other jobs until the jobs they are kept for fit.
    """
    first: dict[tuple[str, int, int], Contender] = {}
    served = {members[0].bucket.size for members in open_units}
    for contender in eligible:
        if contender.unit is not None:
            served.add(contender.bucket.size)
        else:
            first.setdefault(contender.bucket.size, contender)
    wanted = [contender for size, contender in first.items() if size not in served]
    starts: list[Contender] = []
    kept: dict[str, Contender] = {}
    ends = _ends(running, left_s)
    # Where something as large runs, GPUs for the job become free all at once; only small units keep it out.
    largest = {name: max(count for _, count in found) for name, found in ends.items()}
    trial = free.copy()
    # The large ones first: they fit in the fewest places.
    for contender in sorted(wanted, key=lambda item: (-item.bucket.gpu_count, item.rank)):
        bucket = contender.bucket
        if trial.take(bucket.partition, bucket.gpu_count, node_count=bucket.node_count) is not None:
            starts.append(contender)
        elif bucket.node_count == 1:
            shut = {*kept, *(name for name, count in largest.items() if count >= bucket.gpu_count)}
            node = _soonest(bucket, [node for node in nodes if node.name not in shut], trial, ends)
            if node is not None:
                kept[node] = contender
                trial.take_on(node, trial.on_node(node))
    return starts, kept


def _ends(running: Iterable[Members], left_s: Callable[[Members], float]) -> dict[str, list[tuple[float, int]]]:
    """For each node, when which number of its GPUs is given back, the soonest first."""
    ends: dict[str, list[tuple[float, int]]] = {}
    for members in running:
        unit = members[0].unit
        assert unit is not None
        for share in unit.gpus:
            ends.setdefault(share.node, []).append((left_s(members), share.gpu_count))
    return {node: sorted(found) for node, found in ends.items()}


def _soonest(
    bucket: Bucket, nodes: Iterable[FreeNode], free: FreeGpus, ends: Mapping[str, Sequence[tuple[float, int]]]
) -> str | None:
    """The node that has enough free GPUs soonest; where that is unknown, the one that lacks the fewest."""
    found: list[tuple[float, int, str]] = []
    for node in (node for node in nodes if bucket.partition in node.partitions):
        gpus, after_s = free.on_node(node.name), 0.0
        missing = bucket.gpu_count - gpus
        for left_s, count in ends.get(node.name, ()):
            if gpus >= bucket.gpu_count:
                break
            gpus, after_s = gpus + count, left_s
        if gpus >= bucket.gpu_count:
            found.append((after_s, missing, node.name))
    return min(found)[2] if found else None
