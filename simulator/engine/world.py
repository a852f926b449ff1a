"""The simulated cluster: how jobs wait, run and end, the queue of coming events, and samples of what happens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final, NamedTuple

from muri.policies.types import PlanJob, Running
from muri.profiler.records import RESOURCES
from muri.simulator.engine.jobs import LiveJob, Seat, Unit, WaitingJobs, planned_profiles
from muri.simulator.engine.nodes import Nodes
from muri.simulator.engine.pace import Speeds
from muri.simulator.model import GroupSpan, JobRecord, Sample, Settings, TraceJob

_MANY: Final = 10_000
"""Outdated events that may pile up before they are swept out."""


MAX_SAMPLES: Final = 2_000
"""Most samples of a result; beyond it, neighbors are merged into time-weighted means."""

LEAST_REMAINING_S: Final = 1.0
"""Least remaining time in the blocking index: without it, a job stopped just before its end would dominate the mean."""


class Kind(IntEnum):
    """What happens."""

    ARRIVAL = 0  # A job is submitted; the subject is its id
    PROFILED = 1  # The dry run of a model ends; the subject is the number of its key
    RESUME = 2  # A job has loaded its checkpoint and progresses from now on
    COMPLETION = 3  # A job ends
    NODE_FAILS = 4  # A node fails and its jobs stop; the subject is the node's index
    NODE_RETURNS = 5  # The node is back
    DRAIN_BEGINS = 6  # A node takes no new jobs
    DRAIN_ENDS = 7  # The node takes jobs again
    # A job allocates more GPU memory than the others on its GPUs leave; the version is the number of its unit
    OUT_OF_MEMORY = 8


OF_RUNNING_JOBS: Final = (Kind.RESUME, Kind.COMPLETION, Kind.OUT_OF_MEMORY)
"""Events of a running job; a change of its speed or unit makes them outdated."""


class Event(NamedTuple):
    """Something that happens at a time."""

    time_s: float
    sequence: int  # Order of announcement, which decides between events at one time
    kind: Kind
    subject: int  # A job's id, a node's index or a model's number
    # Version of the job's speed at the time of announcement; the event is outdated once the job's is newer
    version: int = 0


class EventQueue:
    """The events to come. The queue skips outdated ones, and sweeps them out when there are many."""

    def __init__(self, is_outdated: Callable[[Event], bool]) -> None:
        self._heap: list[Event] = []
        self._is_outdated = is_outdated
        self._sequence = 0
        self._sweep_at = _MANY
        self.from_outside = 0
        """Number of events left that do not come from running jobs."""

    def announce(self, time_s: float, kind: Kind, subject: int, version: int = 0) -> None:
        """Schedule an event."""
        heappush(self._heap, Event(time_s, self._sequence, kind, subject, version))
        self._sequence += 1
        self.from_outside += kind not in OF_RUNNING_JOBS
        if len(self._heap) > self._sweep_at:
            self._sweep()

    def next_time_s(self) -> float | None:
        """Time of the next event; None: there is none."""
        heap = self._heap
        while heap and self._is_outdated(heap[0]):
            heappop(heap)
        return heap[0].time_s if heap else None

    def pop_at(self, time_s: float) -> Event | None:
        """The next event of this instant; None: there is no more."""
        if self.next_time_s() != time_s:
            return None
        event = heappop(self._heap)
        self.from_outside -= event.kind not in OF_RUNNING_JOBS
        return event

    def _sweep(self) -> None:
        self._heap = [event for event in self._heap if not self._is_outdated(event)]
        heapify(self._heap)
        self._sweep_at = max(_MANY, 2 * len(self._heap))


class Samples:
    """Samples in order of time, thinned on the way so that long traces need no more memory."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add one more."""
        self._samples.append(sample)
        if len(self._samples) >= 2 * MAX_SAMPLES:
            self._samples = _thinned(self._samples)

    def thinned(self) -> tuple[Sample, ...]:
        """The samples so far, at most `MAX_SAMPLES`."""
        samples = self._samples
        while len(samples) > MAX_SAMPLES:
            samples = _thinned(samples)
        return tuple(samples)


class Meter:
    """Adds up the present state, and turns it into samples as time passes."""

    def __init__(self, gpu_count: int, used: Sequence[Sequence[float]], most: float = math.inf) -> None:
        self._gpu_count = gpu_count
        self._used = used
        self._most = most
        self._samples = Samples()
        self._busy = [0.0] * len(RESOURCES)
        self._pending = 0
        self._per_s = 0.0  # Σ 1 / remaining, and Σ since / remaining: the index at any time is linear in both
        self._offset = 0.0
        self._speeds = 0.0
        self.gpus_held = 0
        self.gpu_s = 0.0
        self.service_s = 0.0
        """Seconds of service of all jobs together, including those lost in failures."""

    def pass_time(self, start_s: float, end_s: float) -> None:
        """Add a sample for a time in which nothing changes."""
        length_s = end_s - start_s
        if length_s <= 0:
            return
        self.gpu_s += length_s * self.gpus_held
        self.service_s += length_s * self._speeds
        middle_s = start_s + length_s / 2
        blocking = max(0.0, middle_s * self._per_s - self._offset) / self._pending if self._pending else 0.0
        utilization = tuple([min(self._most, max(0.0, busy / self._gpu_count)) for busy in self._busy])
        assert len(utilization) == 4
        self._samples.add(Sample(start_s, length_s, self._pending, blocking, self.gpus_held, utilization))

    def wait(self, since_s: float, remaining_s: float) -> None:
        """A job begins to wait."""
        weight = 1.0 / max(LEAST_REMAINING_S, remaining_s)
        self._pending += 1
        self._per_s += weight
        self._offset += weight * since_s

    def leave(self, since_s: float, remaining_s: float) -> None:
        """The same job ends its wait."""
        weight = 1.0 / max(LEAST_REMAINING_S, remaining_s)
        self._pending -= 1
        self._per_s -= weight
        self._offset -= weight * since_s
        if not self._pending:  # what rounding left over
            self._per_s = self._offset = 0.0

    def speed_up(self, shape: int, gpu_count: int, change: float) -> None:
        """A job's speed changes, and with it the resources that it keeps busy."""
        self._speeds = max(0.0, self._speeds + change)
        for resource, share in enumerate(self._used[shape]):
            self._busy[resource] += change * share * gpu_count

    def count_less(self, resource: int, amount: float) -> None:
        """A resource is less busy than the jobs' speeds say, by this many GPUs' worth."""
        self._busy[resource] -= amount

    def samples(self) -> tuple[Sample, ...]:
        """The samples so far, thinned."""
        return self._samples.thinned()


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Half as many samples: neighbors become one with time-weighted means."""
    merged = [_merged(first, second) for first, second in zip(samples[::2], samples[1::2], strict=False)]
    return [*merged, samples[-1]] if len(samples) % 2 else merged


def _merged(first: Sample, second: Sample) -> Sample:
    length_s = second.start_s + second.length_s - first.start_s
    one, two = first.length_s / length_s, second.length_s / length_s
    busy = [a * one + b * two for a, b in zip(first.utilization, second.utilization, strict=True)]
    return Sample(
        start_s=first.start_s,
        length_s=length_s,
        pending=first.pending * one + second.pending * two,
        blocking_index=first.blocking_index * one + second.blocking_index * two,
        gpus_held=first.gpus_held * one + second.gpus_held * two,
        utilization=(busy[0], busy[1], busy[2], busy[3]),
    )


class World:
    """The state of the cluster at one moment."""

    packs: ClassVar[bool] = False  # Whether jobs share GPUs one by one, instead of in groups
    elastic = False  # Whether jobs may hold another number of GPUs than they asked for

    def __init__(
        self, jobs: Sequence[TraceJob], nodes: Nodes, settings: Settings, speeds: Speeds, waiting: WaitingJobs
    ) -> None:
        planned = planned_profiles(jobs, settings.profile_noise, settings.seed)
        self.jobs = {
            job.job_id: LiveJob(
                job,
                speeds.of_job[job.job_id],
                planned[job.job_id],
                replace(job, profile=planned[job.job_id]).gpu_share,
                speeds.sensitivities[job.job_id],
                settings.restart_s if job.restart_s is None else job.restart_s,
                job.service_s,
            )
            for job in jobs
        }
        self.now_s = 0.0
        self.settings = settings
        self.cluster = nodes.cluster
        self.nodes = nodes
        self.waiting = waiting
        self.units: dict[int, Unit] = {}
        self.shared_units = 0
        self.allocates = False
        """Whether any plan has given CPUs and memory other than in proportion to GPUs."""
        self.meter = Meter(nodes.cluster.gpu_count, speeds.used, 1.0 if self.packs else math.inf)
        self.events = EventQueue(self._is_outdated)
        self.records: list[JobRecord] = []
        self.spans: list[GroupSpan] | None = None
        self._speeds = speeds
        self._started = 0

    def run_out_of_memory(self, live: LiveJob) -> None:
        """Fail: plans for groups always fit the GPU memory."""
        raise AssertionError(f"job {live.job.job_id} of a group ran out of memory")

    def _is_outdated(self, event: Event) -> bool:
        return event.kind in OF_RUNNING_JOBS and self.jobs[event.subject].version != event.version

    def pass_time(self, until_s: float) -> None:
        """Advance to a time before which nothing happens."""
        self.meter.pass_time(self.now_s, until_s)
        self.now_s = until_s

    def arrive(self, live: LiveJob) -> None:
        """A job arrives; it enters the queue once its model is known."""
        live.since_s = self.now_s
        self.meter.wait(_waits_since(live), live.service_s - live.done_s)

    def enqueue(self, live: LiveJob) -> None:
        """A job enters the queue."""
        live.as_waiting = self._as_planned(live)
        self.waiting.add(live)

    def running(self) -> tuple[Running, ...]:
        """The units that a plan decides on: those on nodes where jobs may start."""
        known, checkpoints = self.settings.durations_known, self.settings.checkpoints
        return tuple(
            [
                unit.as_running(self.now_s, durations_known=known, checkpoints=checkpoints)
                for unit in self.units.values()
                if self.is_open(unit)
            ]
        )

    def is_open(self, unit: Unit) -> bool:
        """Whether all nodes of a unit take jobs; otherwise the unit runs to its end undisturbed."""
        return self.nodes.available_count == self.cluster.node_count or all(map(self.nodes.is_available, unit.nodes))

    def start(self, members: Sequence[LiveJob], seat: Seat, undisturbed: frozenset[int]) -> None:
        """Jobs start to share GPUs."""
        gpu_count = sum(share.gpu_count for share in seat.gpus)
        nodes = self.nodes.indices(seat.gpus)
        unit = Unit(self._started, list(members), seat, nodes, gpu_count, self.now_s)
        self._started += 1
        self._occupy(unit)
        self.units[unit.number] = unit
        self.shared_units += len(members) > 1
        for live in members:
            self._put(live, unit, restarts=live.start_s is not None and live.job.job_id not in undisturbed)
        self._set_pace(unit)

    def _put(self, live: LiveJob, unit: Unit, *, restarts: bool) -> None:
        if live.as_waiting is not None:
            self.waiting.remove(live)
            self.meter.leave(_waits_since(live), live.service_s - live.done_s)
            live.as_waiting = None
        live.unit, live.since_s = unit, self.now_s
        live.start_s = self.now_s if live.start_s is None else live.start_s
        if restarts:
            live.restarts += 1
            live.kept_s = live.done_s
            live.resuming = live.restart_s > 0
            live.resumes_s = self.now_s + live.restart_s
        if live.resuming:
            live.version += 1
            self.events.announce(live.resumes_s, Kind.RESUME, live.job.job_id, live.version)

    def resume(self, live: LiveJob) -> None:
        """A restart is over."""
        live.resuming = False
        self._set_speed(live, live.pace)

    def stop(self, unit: Unit, *, keeps_progress: bool = True) -> None:
        """Take the GPUs of a unit away; its members then run nowhere."""
        self._end_span(unit)
        for live in unit.members:
            live.settle(self.now_s)
            self._set_speed(live, 0.0)
            if not keeps_progress:
                live.done_s = live.kept_s
            live.unit = None
        self._free(unit)
        self.shared_units -= len(unit.members) > 1

    def requeue(self, live: LiveJob) -> None:
        """A job that was stopped waits again."""
        live.resuming = False
        live.waiting_since_s = self.now_s
        self.meter.wait(self.now_s, live.service_s - live.done_s)
        self.enqueue(live)

    def finish(self, live: LiveJob) -> None:
        """A job ends; its partners go on."""
        unit = live.unit
        assert unit is not None
        self._end_span(unit)
        for member in unit.members:
            member.settle(self.now_s)
        self._set_speed(live, 0.0)
        live.done_s, live.unit = live.service_s, None
        self.records.append(live.record(self.now_s))
        if len(unit.members) == 1:
            self._free(unit)
            return
        unit.members.remove(live)
        self._take_from(unit, live)
        if len(unit.members) == 1:
            self.shared_units -= 1
            unit.seat = unit.seat._replace(mode="interleave")  # no job is left to run beside
        unit.members = self._speeds.reorder(unit.members)
        self._set_pace(unit)

    def fail(self, node: int) -> None:
        """A node fails; its jobs return to the queue."""
        for unit in [unit for unit in self.units.values() if node in unit.nodes]:
            members = list(unit.members)
            self.stop(unit, keeps_progress=self.settings.checkpoints)
            for live in members:
                self.requeue(live)

    def _occupy(self, unit: Unit) -> None:
        self.nodes.hold(unit.seat.gpus)
        self.meter.gpus_held += unit.gpu_count
        self._give(unit)

    def _free(self, unit: Unit) -> None:
        del self.units[unit.number]
        self.nodes.release(unit.seat.gpus)
        self.nodes.hosts.change(unit.seat.gpus, unit.seat.cpu_mem_shares, -1)
        self.meter.gpus_held -= unit.gpu_count

    def _give(self, unit: Unit) -> None:
        """Give CPUs and memory, where a plan said how many."""
        seat = unit.seat
        if seat.cpu_mem_shares:
            self.allocates = True
            self.nodes.hosts.change(seat.gpus, seat.cpu_mem_shares, 1)
            unit.given = self.nodes.hosts.per_gpu(seat.gpus, seat.cpu_mem_shares)

    def _take_from(self, unit: Unit, live: LiveJob) -> None:
        """Take CPUs and memory from a member that has left."""
        seat = unit.seat
        if seat.cpu_mem_shares:
            self.nodes.hosts.change(seat.gpus, seat.cpu_mem_shares, -1)
            left = {job_id: share for job_id, share in seat.cpu_mem_shares.items() if job_id != live.job.job_id}
            unit.seat = seat._replace(cpu_mem_shares=left)
            self._give(unit)

    def _set_pace(self, unit: Unit) -> None:
        for live, speed in zip(unit.members, self._speeds.of(unit), strict=True):
            live.pace = speed
            if not live.resuming:
                self._set_speed(live, speed)

    def _set_speed(self, live: LiveJob, speed: float) -> None:
        """Change a speed, after counting what the job received at the old one."""
        live.settle(self.now_s)
        self.meter.speed_up(live.shape, live.job.gpu_count, speed - live.speed)
        live.speed = speed
        live.fastest = max(live.fastest, speed)
        live.version += 1
        if speed > 0:
            self.events.announce(live.ends_at(self.now_s), Kind.COMPLETION, live.job.job_id, live.version)

    def _as_planned(self, live: LiveJob) -> PlanJob:
        settings = self.settings
        return live.as_planned(self.now_s, durations_known=settings.durations_known, checkpoints=settings.checkpoints)

    def _end_span(self, unit: Unit) -> None:
        """Record how long exactly these jobs have shared."""
        if self.spans is not None and self.now_s > unit.since_s:
            ids = tuple(live.job.job_id for live in unit.members)
            self.spans.append(GroupSpan(unit.since_s, self.now_s, ids, unit.nodes[0], unit.gpu_count))
        unit.since_s = self.now_s


def _waits_since(live: LiveJob) -> float:
    return live.job.submit_s if live.waiting_since_s is None else live.waiting_since_s
