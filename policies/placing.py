"""Which unit gets which GPUs: running ones stay, then the largest choose first."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from muri.policies import reasons
from muri.policies.placement import FreeGpus, Shares
from muri.policies.units import Unit


class Placement(NamedTuple):
    """A unit and the GPUs that it gets."""

    unit: Unit
    gpus: Shares

    @property
    def kept(self) -> bool:
        """Whether the unit runs there already."""
        return bool(self.unit.stays_on)


def place(units: Sequence[Unit], free: FreeGpus) -> list[Placement]:
    """Give GPUs to units: priority decides who gets any, GPU count who chooses first.

    What runs keeps its GPUs. Placing the large ones of the others first leaves the fewest fragments. Where that
    order happens to seat fewer, the order of priority is kept; and a unit that finds no place makes less
    urgent running ones leave theirs, if that helps.

    Args:
        units: Units, in any order.
        free: Free GPUs, those of the running units among them; what is placed is taken from them.

    Returns:
        Those that got GPUs, in the order in which they did.
    """
    kept = [Placement(unit, unit.stays_on) for unit in sorted(units, key=_rank) if unit.stays_on]
    for placement in kept:
        free.take_exactly(placement.gpus)
    new = [unit for unit in units if not unit.stays_on]
    admitted, refused = _admit(new, free)
    placed = _take_all(admitted, free)
    return _make_room([*kept, *placed], refused, free) if refused else [*kept, *placed]


def _admit(units: Sequence[Unit], free: FreeGpus) -> tuple[list[Unit], list[Unit]]:
    """The units that can be placed together, in an order that does it, and those that can't, by rank."""
    by_size = sorted(units, key=lambda unit: (-unit.gpu_count, unit.rank))
    if len(_take_all(by_size, free.copy())) == len(units):
        return by_size, []
    by_rank = sorted(units, key=_rank)
    seated = {placement.unit.rank for placement in _take_all(by_rank, free.copy())}
    admitted = [unit for unit in by_size if unit.rank in seated]
    if len(_take_all(admitted, free.copy())) < len(admitted):
        admitted = [unit for unit in by_rank if unit.rank in seated]
    return admitted, [unit for unit in by_rank if unit.rank not in seated]


def _take_all(units: Iterable[Unit], free: FreeGpus) -> list[Placement]:
    placements = []
    for unit in units:
        gpus = free.take(unit.partition, unit.gpu_count, unit.gpu_mem_gib)
        if gpus is not None:
            placements.append(Placement(unit, gpus))
    return placements


def _make_room(placed: Iterable[Placement], refused: Iterable[Unit], free: FreeGpus) -> list[Placement]:
    """Place refused units on GPUs that less urgent running ones give up, which are placed anew if they can be.

    Every step takes one unit from its place for good, so this ends.
    """
    settled = {placement.unit.rank: placement for placement in placed}
    queue = [(unit.rank, unit) for unit in refused]
    heapify(queue)
    hopeless: set[tuple[str, int, float]] = set()
    while queue:
        rank, unit = heappop(queue)
        place = (unit.partition, unit.gpu_count, unit.gpu_mem_gib)
        gpus = None if place in hopeless else free.take(*place)
        if gpus is None and place not in hopeless:
            leaving = _who_leaves(unit, settled.values(), free)
            for placement in leaving:
                del settled[placement.unit.rank]
                free.give_back(placement.gpus)
                note = reasons.made_room(unit.gpu_count, placement.gpus[0].node)
                evicted = replace(placement.unit, stays_on=(), notes=(*placement.unit.notes, note))
                heappush(queue, (evicted.rank, evicted))
            gpus = free.take(*place) if leaving else None
            hopeless = set() if leaving else {*hopeless, place}
        if gpus is not None:
            settled[rank] = Placement(unit, gpus)
    return list(settled.values())


def _who_leaves(unit: Unit, settled: Iterable[Placement], free: FreeGpus) -> list[Placement]:
    """The least urgent running units of the node on which leaving costs the least; none if that doesn't help."""
    on_node: dict[str, list[Placement]] = {}
    for placement in settled:
        if placement.kept and placement.unit.rank > unit.rank and len(placement.gpus) == 1:
            on_node.setdefault(placement.gpus[0].node, []).append(placement)
    best: tuple[float, str, list[Placement]] | None = None
    for node, placements in sorted(on_node.items()):
        leaving = _enough_of(placements, unit, free.on_node(node))
        if leaving and free.suits(node, unit.partition, unit.gpu_mem_gib):
            cost = sum(_restart_gpu_s(placement) for placement in leaving)
            best = min(best or (cost, node, leaving), (cost, node, leaving), key=lambda found: found[:2])
    return best[2] if best else []


def _enough_of(placements: Iterable[Placement], unit: Unit, free_gpus: int) -> list[Placement]:
    leaving: list[Placement] = []
    for placement in sorted(placements, key=lambda item: -item.unit.rank):
        if free_gpus >= unit.gpu_count:
            break
        leaving.append(placement)
        free_gpus += placement.gpus[0].gpu_count
    return leaving if free_gpus >= unit.gpu_count else []


def _restart_gpu_s(placement: Placement) -> float:
    return max(member.job.restart_s for member in placement.unit.members) * placement.unit.gpu_count


def _rank(unit: Unit) -> int:
    return unit.rank
