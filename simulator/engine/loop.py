"""The event loop: time jumps from event to event, and where one may change a plan, the policy makes a new one."""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from muri.errors import MuriError
from muri.policies.traits import InterferenceTable
from muri.policies.types import NodeShare, Plan, PlanRequest, Policy, Sharer
from muri.profiler.records import ProfileKey
from muri.simulator.engine import checks
from muri.simulator.engine.jobs import LiveJob, Seat, Unit
from muri.simulator.engine.world import Event, Kind, World
from muri.simulator.model import SimulationError, TraceJob

EVENTS_HORIZON_S: Final = 360.0
"""Time in which a regrouping has to pay off where plans follow events instead of a clock: the paper's interval."""

_IDLE_PLANS: Final = 10_000
"""Plans in a row without any progress, after which the policy is taken to stop all jobs forever."""

_ROUNDING_S: Final = 1e-3

_MOST_FRAMES: Final = 3
_MOST_TEXT: Final = 500
"""Limits of the text about an error that a policy raised."""

_REPORTS: Final = 200
"""Most reports of progress."""


class Engine:
    """Runs one simulation."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        *,
        shares: bool,
        stops_jobs: bool,
        interference: InterferenceTable | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.decision_s: list[float] = []
        self._world = world
        self._policy = policy
        self._stops_jobs = stops_jobs
        self._interference = interference
        self._progress = progress
        self._settings = world.settings
        self._profiling_s = world.settings.profiling_s if shares else 0.0
        self._unknown: dict[ProfileKey, list[int]] = {}
        self._known: set[ProfileKey] = set()
        self._keys: list[ProfileKey] = []
        self._present = 0
        self._tick = self._next_tick = -1
        self._changed = False
        self._service_s, self._idle_plans = 0.0, 0
        self._checked = world.settings.check or checks.wanted()

    def run(self, jobs: Sequence[TraceJob]) -> None:
        """Simulate until every job has ended.

        Raises:
            SimulationError: The policy lets a job wait forever, or makes a plan that cannot be carried out.
        """
        self._announce(jobs)
        world, total = self._world, len(jobs)
        told = 0
        while len(world.records) < total:
            now_s = self._next_time_s()
            world.pass_time(now_s)
            while (event := world.events.pop_at(now_s)) is not None:
                self._happen(event)
            if self._plan_is_due():
                self._plan()
            if self._checked:
                checks.check_world(world)
            if self._progress is not None and len(world.records) * _REPORTS >= (told + 1) * total:
                told = len(world.records) * _REPORTS // total
                self._progress(len(world.records) / total)
        if self._checked:
            checks.check_end(world)

    def _announce(self, jobs: Sequence[TraceJob]) -> None:
        events = self._world.events
        for job in jobs:
            events.announce(job.submit_s, Kind.ARRIVAL, job.job_id)
        for outage in self._settings.outages:
            first, last = (Kind.DRAIN_BEGINS, Kind.DRAIN_ENDS) if outage.drain else (Kind.NODE_FAILS, Kind.NODE_RETURNS)
            events.announce(outage.start_s, first, outage.node)
            if math.isfinite(outage.end_s):
                events.announce(outage.end_s, last, outage.node)

    def _next_time_s(self) -> float:
        event_s, tick_s = self._world.events.next_time_s(), self._next_tick_s()
        times = [time_s for time_s in (event_s, tick_s) if time_s is not None]
        if not times or (not self._world.units and not self._world.events.from_outside and not self._changed):
            raise self._stuck()
        return min(times)

    def _next_tick_s(self) -> float | None:
        """Time of the next plan by the clock, while there are jobs."""
        interval_s = self._settings.interval_s
        if interval_s <= 0 or not self._present:
            return None
        tick = max(self._tick + 1, math.floor(self._world.now_s / interval_s))
        while tick * interval_s < self._world.now_s:
            tick += 1
        self._next_tick = tick
        return tick * interval_s

    def _stuck(self) -> SimulationError:
        waiting = [live.job for live in self._world.jobs.values() if live.as_waiting is not None]
        first = f": job {waiting[0].job_id} on {waiting[0].gpu_count} GPUs, for one" if waiting else ""
        gpus = self._world.nodes.available_gpus
        return SimulationError(
            f"policy {self._policy.name} starts none of the {len(waiting)} jobs that are left{first}. Nothing runs and "
            f"nothing will change any more: {gpus} GPUs are on nodes that take jobs. Let outages end, or take another "
            "policy"
        )

    def _happen(self, event: Event) -> None:
        world, kind = self._world, event.kind
        self._changed |= kind is not Kind.RESUME
        match kind:
            case Kind.ARRIVAL:
                self._arrive(event.subject)
            case Kind.PROFILED:
                self._profiled(self._keys[event.subject])
            case Kind.RESUME:
                world.resume(world.jobs[event.subject])
            case Kind.OUT_OF_MEMORY:
                world.run_out_of_memory(world.jobs[event.subject])
            case Kind.COMPLETION:
                self._present -= 1
                world.finish(world.jobs[event.subject])
            case Kind.NODE_FAILS | Kind.NODE_RETURNS:
                world.nodes.fail(event.subject, 1 if kind is Kind.NODE_FAILS else -1)
                if kind is Kind.NODE_FAILS:
                    world.fail(event.subject)
            case Kind.DRAIN_BEGINS | Kind.DRAIN_ENDS:
                world.nodes.drain(event.subject, 1 if kind is Kind.DRAIN_BEGINS else -1)

    def _arrive(self, job_id: int) -> None:
        """A job arrives; if its model is unknown, it first waits for a dry run.

        The dry run holds no GPUs of the cluster, and later jobs of the same model wait for the same one.
        """
        world = self._world
        live = world.jobs[job_id]
        self._present += 1
        world.arrive(live)
        key = live.job.key
        if self._profiling_s <= 0 or key in self._known:
            world.enqueue(live)
            return
        if key not in self._unknown:
            self._unknown[key] = []
            self._keys.append(key)
            world.events.announce(world.now_s + self._profiling_s, Kind.PROFILED, len(self._keys) - 1)
        self._unknown[key].append(job_id)

    def _profiled(self, key: ProfileKey) -> None:
        self._known.add(key)
        for job_id in self._unknown.pop(key):
            self._world.enqueue(self._world.jobs[job_id])

    def _plan_is_due(self) -> bool:
        """Whether it is time for a plan, and the plan could change anything.

        If no job waits and none shares, each has all that it asked for, unless policies give CPUs, memory or more GPUs
        to those that gain most. A policy that never stops jobs has nothing to decide until a job arrives or GPUs are
        given back.
        """
        world, interval_s = self._world, self._settings.interval_s
        if interval_s > 0:
            if self._next_tick_s() != world.now_s:
                return False
            self._tick = self._next_tick
        elif not self._changed:
            return False
        if not (len(world.waiting) or world.shared_units or world.allocates or world.elastic):
            return self._done()
        if not self._stops_jobs and not self._changed:
            return False
        return bool(world.nodes.available_count) or self._done()

    def _done(self) -> bool:
        self._changed = False
        return False

    def _plan(self) -> None:
        world = self._world
        frame = PlanRequest(
            jobs=(),
            nodes=world.nodes.as_free(),
            now_s=world.now_s,
            same_user=not self._settings.any_user,
            running=world.running(),
            interval_s=self._settings.interval_s or EVENTS_HORIZON_S,
            larger_than_a_node="whole-nodes",
            interference=self._interference,
            trusted=not self._checked,
            explained=False,
        )
        self._notice_thrashing()
        request = world.waiting.reduce(frame, world.nodes.available_gpus)
        carry_out(self._decide(request), world, stops_jobs=self._stops_jobs)
        self._changed = False

    def _notice_thrashing(self) -> None:
        """Refuse to go on with a policy that stops jobs faster than they restart."""
        service_s = self._world.meter.service_s
        # An absolute margin: speeds that were added and taken away leave a rounding error.
        self._idle_plans = 0 if service_s > self._service_s + _ROUNDING_S else self._idle_plans + 1
        self._service_s = max(service_s, self._service_s)
        if self._idle_plans > _IDLE_PLANS:
            raise SimulationError(
                f"policy {self._policy.name} stops jobs before they have restarted: no job made progress during "
                f"{_IDLE_PLANS} plans. Take a longer interval, a shorter restart, or a policy option that stops less"
            )

    def _decide(self, request: PlanRequest) -> Plan:
        begin_s = time.perf_counter()
        try:
            plan = self._policy.plan(request)
        except MuriError:
            raise
        except Exception as error:  # a site's own policy may raise anything
            raise SimulationError(_failure(self._policy.name, error)) from error
        if not isinstance(plan, Plan):
            raise SimulationError(f"policy {self._policy.name} returned {type(plan).__name__}, not a Plan")
        self.decision_s.append(time.perf_counter() - begin_s)
        return plan


def _failure(policy: str, error: Exception) -> str:
    """The error for a policy's author, with its innermost places."""
    frames = traceback.extract_tb(error.__traceback__)[:0:-1][:_MOST_FRAMES]
    places = (f"\n  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames)
    text = "".join(traceback.format_exception_only(error)).strip()
    return f"policy {policy} failed: {text[:_MOST_TEXT]}{''.join(places)}"


def carry_out(plan: Plan, world: World, *, stops_jobs: bool) -> None:
    """Stop, regroup and start as a plan says; units that it keeps go on and cost nothing.

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
        joins = start.joining if stops_jobs else ()
        undisturbed = bool(joins) or not stops_jobs
        goes_on = [job_id for job_id in start.members if undisturbed and job_id not in joins]
        staying = [job_id for job_id in goes_on if _stays(job_id, before, start.seat)]
        world.start(_members(start, plan, world), start.seat, frozenset(staying))
    _check_hosts(plan, world)
    for live in disturbed:
        if live.unit is None:
            world.requeue(live)


class _Start(NamedTuple):
    members: tuple[int, ...]
    seat: Seat
    joining: tuple[int, ...] = ()


def _wanted(plan: Plan, world: World) -> Iterator[_Start]:
    def seat(
        members: tuple[int, ...], gpus: tuple[NodeShare, ...], mode: Literal["interleave", "plain"] = "interleave"
    ) -> Seat:
        return Seat(gpus, hosts.wanted(members, gpus, plan.cpu_mem_shares), mode=mode)

    hosts = world.nodes.hosts
    for group in plan.groups:
        yield _Start(group.members, seat(group.members, group.gpus, group.mode), group.joining)
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
    """The seat of a sharer, its GPUs sorted so that equal seats compare equal."""
    count, job = sum(share.gpu_count for share in sharer.gpus), world.jobs.get(sharer.job_id)
    if job is not None and (count < 1 or (count != job.job.gpu_count and not world.elastic)):
        raise SimulationError(
            f"policy {plan.policy} gives {count} GPUs to job {sharer.job_id}, which asked for {job.job.gpu_count}; "
            "only an elastic policy may give another number, and no fewer than 1"
        )
    if plan.cpu_mem_shares:
        raise SimulationError(
            f"policy {plan.policy} gives out CPUs and memory, but jobs that share GPUs one by one can't have shares of "
            "their own: how they slow each other down is measured or estimated with all of both"
        )
    if sharer.accumulate_steps < 1:
        raise SimulationError(f"policy {plan.policy} computes the batch of job {sharer.job_id} in no step")
    gpus = [NodeShare(share.node, share.gpu_count, tuple(sorted(share.gpu_ids))) for share in sharer.gpus]
    return Seat(tuple(sorted(gpus, key=lambda share: share.node)), accumulate_steps=sharer.accumulate_steps)


def _stays(job_id: int, before: Mapping[int, Seat], seat: Seat) -> bool:
    """Whether a running job keeps all that it had."""
    had = before.get(job_id)
    return (
        had is not None
        and had.gpus == seat.gpus
        and had.accumulate_steps == seat.accumulate_steps
        and had.cpu_mem_shares.get(job_id) == seat.cpu_mem_shares.get(job_id)
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
    """The running unit of exactly these jobs, GPUs, CPUs and memory; None: there is none."""
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
