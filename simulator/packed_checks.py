"""What must hold where jobs share GPUs one by one, counted anew from what every job holds."""

from collections import Counter
from typing import Final

from muri.simulator.packed_world import PackedWorld
from muri.simulator.state import Unit

_ROUNDING: Final = 1e-6

Place = tuple[str, int]


def packed_fault(world: PackedWorld) -> str | None:
    """What is wrong between two events; None if nothing is.

    Each GPU's jobs must fit its memory, save one that is about to fail for want of it; and what is free, held and
    shared must add up.
    """
    tenants = _tenants(world)
    for (node, gpu_id), units in tenants.items():
        fault = _fault_of_gpu(world, units)
        if fault:
            return f"GPU {gpu_id} of node {node} {fault}"
    listed = {unit.number for there in world.packed_nodes.tenants() for unit in there}
    if listed != set(world.units):
        return f"units {sorted(listed ^ set(world.units))} are either on GPUs or run, not both"
    if world.meter.gpus_held != len(tenants):
        return f"{len(tenants)} GPUs are held but {world.meter.gpus_held} counted"
    return _fault_of_counts(world, tenants)


def _tenants(world: PackedWorld) -> dict[Place, list[Unit]]:
    found: dict[Place, list[Unit]] = {}
    for unit in world.units.values():
        for share in unit.seat.gpus:
            for gpu_id in share.gpu_ids:
                found.setdefault((share.node, gpu_id), []).append(unit)
    return found


def _fault_of_gpu(world: PackedWorld, units: list[Unit]) -> str:
    if len({unit.number for unit in units}) < len(units):
        return "is given to one job twice"
    needed_gib = sum(unit.mem_gib for unit in units if not unit.doomed)
    if 0 < world.cluster.gpu_mem_gib < needed_gib * (1 - _ROUNDING):
        return f"has {world.cluster.gpu_mem_gib} GiB but its jobs need {needed_gib}"
    return ""


def _fault_of_counts(world: PackedWorld, tenants: dict[Place, list[Unit]]) -> str | None:
    held = Counter(node for node, _ in tenants)
    for name, free in zip(world.nodes.names, world.nodes.free, strict=True):
        if held[name] + free != world.cluster.gpus_per_node:
            return f"node {name} has {held[name]} GPUs held and {free} free"
    for unit in world.units.values():
        places = [(share.node, gpu_id) for share in unit.seat.gpus for gpu_id in share.gpu_ids]
        own = sum(1 / len(tenants[place]) for place in places)
        company = any(len(tenants[place]) > 1 for place in places)
        if len(unit.members) != 1 or abs(own - (unit.own_gpus or 0)) > _ROUNDING or company != unit.company:
            return f"unit {unit.number} counts {unit.own_gpus} GPUs as its own, company {unit.company}, but has {own}"
        if not world.elastic and unit.members[0].job.gpu_count != len(places):
            return f"job {unit.members[0].job.job_id} holds {len(places)} GPUs"
    if world.shared_units != sum(unit.company for unit in world.units.values()):
        return f"{world.shared_units} units are counted as shared"
    return None
