"""What a plan changes of what runs: only that is stopped and started."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from muri.policies.types import NodeShare, Plan, Sharer
from muri.simulator.model import SimulationError
from muri.simulator.state import LiveJob, Seat, Unit
from muri.simulator.world import World


class _Start(NamedTuple):
    members: tuple[int, ...]
    seat: Seat


def carry_out(plan: Plan, world: World, *, stops_jobs: bool) -> None:
    """Stop, regroup and start what a plan says; what it keeps is left alone and costs nothing.

    Args:
        plan: The plan.
        world: What it was made for.
        stops_jobs: Whether the policy ever stops a job. Under one that doesn't, a job whose GPUs get a second
            job goes on undisturbed; else everybody in a new group starts anew.

    Raises:
        SimulationError: The plan cannot be carried out.
    """
    starts, kept = [], set()
    for wanted in _wanted(plan, world):
        unit = _present(wanted, world)
        if unit is None:
            starts.append(wanted)
        else:
            kept.add(unit.number)
    stopped = [unit for number, unit in world.units.items() if number not in kept and world.is_open(unit)]
    disturbed = [live for unit in stopped for live in unit.members]
    before = {live.job.job_id: unit.seat for unit in stopped for live in unit.members}
    for unit in stopped:
        world.stop(unit)
    for start in starts:
        staying = () if stops_jobs else [job_id for job_id in start.members if _stays(job_id, before, start.seat)]
        world.start(_members(start, plan, world), start.seat, frozenset(staying))
    _check_hosts(plan, world)
    for live in disturbed:
        if live.unit is None:
            world.requeue(live)


def _wanted(plan: Plan, world: World) -> Iterator[_Start]:
    def seat(
        members: tuple[int, ...], gpus: tuple[NodeShare, ...], mode: Literal["interleave", "plain"] = "interleave"
    ) -> Seat:
        return Seat(gpus, hosts.wanted(members, gpus, plan.host_shares), mode=mode)

    hosts = world.nodes.hosts
    for group in plan.groups:
        yield _Start(group.members, seat(group.members, group.gpus, group.mode))
    if (plan.groups or any(solo.gpus for solo in plan.solo)) if world.packs else plan.sharers:
        raise SimulationError(
            f"policy {plan.policy} has supports_packing = {world.packs} but plans otherwise: jobs that share GPUs "
            "one by one are sharers, those of other policies are in groups or alone"
        )
    for sharer in plan.sharers:
        yield _Start((sharer.job_id,), _seat_of(sharer, plan, world))
    for solo in plan.solo:
        if not solo.gpus:
            raise SimulationError(
                f"policy {plan.policy} leaves job {solo.job_id} to Slurm's own queue, which a simulation doesn't have; "
                "simulate a policy that places every job that it starts"
            )
        yield _Start((solo.job_id,), seat((solo.job_id,), solo.gpus))


def _seat_of(sharer: Sharer, plan: Plan, world: World) -> Seat:
    """GPUs by node and index, so that the same ones are equal."""
    count, job = sum(share.gpu_count for share in sharer.gpus), world.jobs.get(sharer.job_id)
    if job is not None and (count < 1 or (count != job.job.gpu_count and not world.elastic)):
        raise SimulationError(
            f"policy {plan.policy} gives {count} GPUs to job {sharer.job_id}, which asked for {job.job.gpu_count}; "
            "only an elastic policy may give another number, and no fewer than 1"
        )
    if plan.host_shares:
        raise SimulationError(
            f"policy {plan.policy} gives out CPUs and memory, but jobs that share GPUs one by one can't have shares of "
            "their own: how they slow each other down is measured or estimated with all of both"
        )
    if sharer.accumulate_steps < 1:
        raise SimulationError(f"policy {plan.policy} computes the batch of job {sharer.job_id} in no step")
    gpus = [NodeShare(share.node, share.gpu_count, tuple(sorted(share.gpu_ids))) for share in sharer.gpus]
    return Seat(tuple(sorted(gpus, key=lambda share: share.node)), accumulate_steps=sharer.accumulate_steps)


def _stays(job_id: int, before: Mapping[int, Seat], seat: Seat) -> bool:
    """Whether a job that ran keeps all that it had, whoever else comes."""
    had = before.get(job_id)
    return (
        had is not None
        and had.gpus == seat.gpus
        and had.accumulate_steps == seat.accumulate_steps
        and had.host_shares.get(job_id) == seat.host_shares.get(job_id)
    )


def _check_hosts(plan: Plan, world: World) -> None:
    overdrawn = world.nodes.overdrawn()
    if overdrawn is not None:
        node, what = overdrawn
        raise SimulationError(
            f"policy {plan.policy} gives out more {what} of node {node} than it has; jobs without a share of their own "
            "hold as much of it as of its GPUs"
        )


def _present(wanted: _Start, world: World) -> Unit | None:
    """The unit of just these jobs with just these GPUs, CPUs and memory, if it runs."""
    live = world.jobs.get(wanted.members[0])
    if live is None or live.unit is None or live.unit.seat != wanted.seat:
        return None
    same = {member.job.job_id for member in live.unit.members} == set(wanted.members)
    return live.unit if same else None


def _members(start: _Start, plan: Plan, world: World) -> list[LiveJob]:
    refusal = world.nodes.refusal(start.seat.gpus)
    if refusal is not None:
        raise SimulationError(
            f"policy {plan.policy} gives {refusal} to job {start.members[0]}; "
            "a plan must not give out GPUs twice, nor on nodes that are not in its request"
        )
    members = []
    for job_id in start.members:
        live = world.jobs.get(job_id)
        if live is None or live.unit is not None or (live.as_waiting is None and live.start_s is None):
            raise SimulationError(
                f"policy {plan.policy} starts job {job_id}, which doesn't wait; a plan must decide once on every job "
                "of its request, and on no other"
            )
        members.append(live)
    return members
