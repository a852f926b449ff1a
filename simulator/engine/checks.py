"""What no simulation can start from, and what holds whatever the policy: every job ends once, GPU-seconds add up."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Final

from muri.errors import MuriError
from muri.policies.options import MAX_GROUP_SIZE
from muri.simulator.engine.jobs import Unit
from muri.simulator.engine.packing import PackedWorld
from muri.simulator.engine.world import World
from muri.simulator.model import Cluster, JobRecord, Settings, SimulationError, Trace, TraceJob

SWITCH: Final = "MURI_SIMULATOR_CHECKS"
"""Environment variable that makes every step of every simulation checked; the tests set it to 1."""

_ROUNDING: Final = 1e-6
Place = tuple[str, int]


class ConservationError(MuriError):
    """A simulation broke an invariant: a fault of the simulator or the policy, never of the user."""


def wanted() -> bool:
    """Whether every step is to be checked, not only the end."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def check_noise(settings: Settings) -> None:
    """Refuse noise that would make stage times negative (SimulationError: says what is valid)."""
    if not 0 <= settings.profile_noise <= 1:
        raise SimulationError(f"profile_noise is {settings.profile_noise}; it must be 0 to 1")


def check_cluster(cluster: Cluster) -> None:
    """Refuse a cluster without GPUs, or with amounts that no node can have.

    Raises:
        SimulationError: Names the wrong amount.
    """
    if cluster.node_count < 1 or cluster.gpus_per_node < 1:
        raise SimulationError(
            f"the cluster has {cluster.node_count} nodes with {cluster.gpus_per_node} GPUs each; both must be ≥ 1"
        )
    for name in ("gpu_mem_gib", "cpus_per_node", "mem_gib_per_node"):
        amount = getattr(cluster, name)
        if not 0 <= amount < math.inf:
            raise SimulationError(f"{name} is {amount}; it must be a finite number ≥ 0 (0: unlimited)")


def check_sizes(trace: Trace, cluster: Cluster) -> None:
    """Refuse a trace without jobs, or with one that is larger than the cluster.

    Raises:
        SimulationError: Names the trace or the job.
    """
    if not trace.jobs:
        raise SimulationError(f"trace {trace.name} has no jobs; there is nothing to simulate")
    for job in trace.jobs:
        if not 1 <= job.gpu_count <= cluster.gpu_count:
            raise SimulationError(
                f"job {job.job_id} needs {job.gpu_count} GPUs, but the cluster has {cluster.gpu_count}; "
                "simulate more nodes, or leave the job out"
            )


def check_records(jobs: Sequence[TraceJob], records: Sequence[JobRecord]) -> None:
    """Check that every job of the trace ended exactly once, after it arrived and started.

    Raises:
        ConservationError: Names the first job that didn't.
    """
    ends = Counter(record.job.job_id for record in records)
    for job in jobs:
        if ends[job.job_id] != 1:
            raise ConservationError(f"job {job.job_id} ended {ends[job.job_id]} times; every job must end once")
    if len(records) != len(jobs):
        raise ConservationError(f"{len(records)} jobs ended, but the trace has {len(jobs)}")
    for record in records:
        times = (record.job.submit_s, record.start_s, record.end_s)
        if not (times[0] <= times[1] <= times[2] and math.isfinite(times[2])):
            raise ConservationError(
                f"job {record.job.job_id} is submitted at {times[0]} s, starts at {times[1]} s and ends at {times[2]} s"
            )


def check_world(world: World) -> None:
    """Check what holds between any two events (ConservationError: says what is wrong, and when)."""
    if isinstance(world, PackedWorld):
        fault = _packed_fault(world)
        if fault is not None:
            raise _broken(world, fault)
    else:
        _check_gpus(world)
        _check_hosts(world)
    _check_members(world)


def check_end(world: World) -> None:
    """Check that the GPU-seconds held are those that jobs had, and that service was given in full.

    Raises:
        ConservationError: Says what is wrong.
    """
    held = world.meter.gpu_s
    had = math.fsum(live.gpu_share_s for live in world.jobs.values())
    if not math.isclose(held, had, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        raise _broken(world, f"GPUs were held for {held} GPU-seconds but jobs had {had}")
    if world.units or len(world.waiting):
        raise _broken(world, f"{len(world.units)} units run and {len(world.waiting)} jobs wait after the end")
    for live in world.jobs.values():
        if live.run_s * max(1.0, live.fastest) < live.service_s * (1 - _ROUNDING) - _ROUNDING:
            raise _broken(world, f"job {live.job.job_id} ran {live.run_s} s but needs {live.service_s} s alone")


def _check_gpus(world: World) -> None:
    held: Counter[int] = Counter()
    for unit in world.units.values():
        for node, share in zip(unit.nodes, unit.seat.gpus, strict=True):
            held[node] += share.gpu_count
        if not world.elastic and any(live.job.gpu_count != unit.gpu_count for live in unit.members):
            raise _broken(world, f"a unit of {unit.gpu_count} GPUs has members that asked for other numbers")
    for node, free in enumerate(world.nodes.free):
        if free < 0 or held[node] + free != world.cluster.gpus_per_node:
            raise _broken(world, f"node {node} has {held[node]} GPUs held and {free} free")
    if sum(held.values()) != world.meter.gpus_held:
        raise _broken(world, f"{sum(held.values())} GPUs are held but {world.meter.gpus_held} counted")


def _check_hosts(world: World) -> None:
    """CPUs and memory counted anew from what every unit holds."""
    hosts, cluster = world.nodes.hosts, world.cluster
    held: dict[str, list[float]] = {}
    for unit in world.units.values():
        gpus, shares = unit.seat.gpus, unit.seat.cpu_mem_shares
        own = hosts.held(gpus, shares) if shares else {}
        for share in gpus:
            amounts = own.get(share.node) or [each * share.gpu_count for each in hosts.fair]
            held[share.node] = [sum(pair) for pair in zip(held.get(share.node, (0.0, 0.0)), amounts, strict=True)]
    has = (cluster.cpus_per_node or math.inf, cluster.mem_gib_per_node or math.inf)
    for node, amounts in held.items():
        if any(amount > limit * (1 + _ROUNDING) for amount, limit in zip(amounts, has, strict=True)):
            raise _broken(world, f"{amounts[0]} CPUs and {amounts[1]} GiB are held of node {node}, which has {has}")


def _check_members(world: World) -> None:
    seen: Counter[int] = Counter()
    for unit in world.units.values():
        if not 1 <= len(unit.members) <= MAX_GROUP_SIZE:
            raise _broken(world, f"{len(unit.members)} jobs share GPUs")
        for live in unit.members:
            seen[live.job.job_id] += 1
            if live.unit is not unit or live.as_waiting is not None:
                raise _broken(world, f"job {live.job.job_id} runs and is elsewhere too")
            if live.job.submit_s > world.now_s:
                raise _broken(world, f"job {live.job.job_id} runs before it arrives")
            if live.done_at(world.now_s) > live.service_s * (1 + _ROUNDING):
                raise _broken(world, f"job {live.job.job_id} has had more service than it needs")
    twice = [job_id for job_id, count in seen.items() if count > 1]
    if twice:
        raise _broken(world, f"job {twice[0]} runs twice")


def _packed_fault(world: PackedWorld) -> str | None:
    """Return the broken invariant between two events, None without one.

    Each GPU's jobs must fit its memory, except for one that is about to fail; free, held and shared GPUs must add up.
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


def _broken(world: World, what: str) -> ConservationError:
    return ConservationError(f"at {world.now_s} s: {what}; this is a fault of the policy or of the simulator")
