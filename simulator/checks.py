"""What must hold whatever the policy: no job is lost or run twice, and GPU-seconds add up."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Final

from muri.errors import MuriError
from muri.policies.options import MAX_GROUP_SIZE
from muri.simulator.model import JobRecord, TraceJob
from muri.simulator.packed_checks import packed_fault
from muri.simulator.packed_world import PackedWorld
from muri.simulator.world import World

SWITCH: Final = "MURI_SIMULATOR_CHECKS"
"""Environment variable that has every step of every simulation checked; the tests set it to 1."""

_ROUNDING: Final = 1e-6


class ConservationError(MuriError):
    """A simulation broke a law of nature: the fault is the simulator's or the policy's, never the user's."""


def wanted() -> bool:
    """Whether every step is to be checked, not only the end."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def check_world(world: World) -> None:
    """Check what holds between any two events.

    Raises:
        ConservationError: Says what is wrong, and when.
    """
    if isinstance(world, PackedWorld):
        fault = packed_fault(world)
        if fault is not None:
            raise _broken(world, fault)
    else:
        _check_gpus(world)
        _check_hosts(world)
    _check_members(world)


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
        gpus, shares = unit.seat.gpus, unit.seat.host_shares
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


def _broken(world: World, what: str) -> ConservationError:
    return ConservationError(f"at {world.now_s} s: {what}; this is a fault of the policy or of the simulator")
