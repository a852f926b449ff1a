"""Jobs that share GPUs one by one, without turns: the jobs on each GPU, and how they slow each other down."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Final

from muri.policies.siblings.horus_cost import RAISED_BY
from muri.policies.traits import model_of, relative_goodput
from muri.policies.types import FreeNode, NodeShare
from muri.profiler.records import RESOURCES
from muri.profiler.slowdown import published_slowdown
from muri.simulator.engine.jobs import LiveJob, Seat, Unit, WaitingJobs
from muri.simulator.engine.nodes import Nodes
from muri.simulator.engine.pace import Pairs, Speeds
from muri.simulator.engine.world import Event, Kind, World
from muri.simulator.model import Cluster, GroupSpan, Settings, SimulationError, TraceJob

_ROUNDING: Final = 1e-9
_GPU: Final = RESOURCES.index("gpu")


class PackedNodes(Nodes):
    """All nodes of the cluster, and the units on each GPU."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._on = [[list[Unit]() for _ in range(cluster.gpus_per_node)] for _ in self.names]
        self._topology = (tuple(range(cluster.gpus_per_node)),)
        self._node = lru_cache(maxsize=65_536)(self._make_node)

    def tenants(self) -> Iterator[list[Unit]]:
        """The units on each GPU in the order of their start, by node and index."""
        for on_node in self._on:
            yield from on_node

    def on(self, unit: Unit) -> Iterator[list[Unit]]:
        """The units on each of a unit's GPUs."""
        for index, gpu_id in self.places(unit):
            yield self._on[index][gpu_id]

    def places(self, unit: Unit) -> Iterator[tuple[int, int]]:
        """Node and index of each of a unit's GPUs."""
        for index, share in zip(unit.nodes, unit.seat.gpus, strict=True):
            for gpu_id in share.gpu_ids:
                yield index, gpu_id

    def put(self, unit: Unit) -> int:
        """Put a unit on its GPUs; returns on how many of them it is the first."""
        return self._change(unit, 1)

    def take(self, unit: Unit) -> int:
        """Take a unit off its GPUs; returns how many of them are free then."""
        return self._change(unit, -1)

    def _change(self, unit: Unit, sign: int) -> int:
        changed = 0
        for index, gpu_id in self.places(unit):
            there = self._on[index][gpu_id]
            if sign > 0:
                there.append(unit)
            else:
                there.remove(unit)
            if len(there) == (sign > 0):
                self.free[index] -= sign
                changed += 1
        return changed

    def refusal(self, gpus: Iterable[NodeShare]) -> str | None:
        """Why these GPUs cannot be given out, shared or not; None: they can."""
        for share in gpus:
            index = self._index.get(share.node)
            if index is None or not self.is_available(index):
                return f"GPUs of node {share.node}, where no job may start"
            named = set(share.gpu_ids)
            if not len(named) == len(share.gpu_ids) == share.gpu_count or not named <= set(self._topology[0]):
                return f"{share.gpu_count} GPUs of node {share.node} and calls them {share.gpu_ids}"
        return None

    def as_free(self) -> tuple[FreeNode, ...]:
        """What policies see: the nodes on which jobs may start, with their idle GPUs."""
        return tuple(
            [
                self._node(index, tuple([gpu_id for gpu_id, there in enumerate(self._on[index]) if not there]))
                for index in range(len(self.names))
                if self.is_available(index)
            ]
        )

    def _make_node(self, index: int, free: tuple[int, ...]) -> FreeNode:
        return replace(self._seen[len(free)][index], islands=(free,) if free else (), topology=self._topology)


Crowding = Callable[[TraceJob, Iterable[TraceJob]], float]
"""True speed of a job beside others on a GPU, 1 = as fast as alone there."""


def crowding_of(settings: Settings, pairs: Pairs) -> Crowding:
    """What slows jobs on one GPU down in a simulation: the product of their pair speeds, or Horus's function."""
    if settings.slowdown == "utilization":
        return _speed_by_utilization
    return lambda job, others: pairs.speed(job.key.model, (other.key.model for other in others))


def _speed_by_utilization(job: TraceJob, others: Iterable[TraceJob]) -> float:
    """By Horus's fitted function of the utilization that all jobs on the GPU add up to."""
    total = sum(other.gpu_share for other in (job, *others))
    return 1.0 / published_slowdown(job.key.gpu_type)(100.0 * total)


def speed_of(unit: Unit, on_gpus: Iterable[list[Unit]], crowding: Crowding) -> float:
    """Speed of the job of a unit, 1 = alone with its own number of GPUs and its undivided batch.

    The slowest of its GPUs counts.
    """
    job, steps = unit.members[0].job, unit.seat.accumulate_steps
    alone = elastic_speed(job, unit.gpu_count)
    if steps > 1 and job.batch is not None:
        alone *= job.batch.speed(steps)
    shared = {tuple(there) for there in on_gpus if len(there) > 1}
    beside = [[other.members[0].job for other in there if other is not unit] for there in shared]
    return alone * min((crowding(job, others) for others in beside), default=1.0)


def elastic_speed(job: TraceJob, gpu_count: int) -> float:
    """Speed on this many GPUs, 1 = on as many as the job asked for.

    Throughput times statistical efficiency: computing scales with the GPUs, synchronizing follows the ring all-reduce.

    Source: Pollux (Qiao et al., OSDI 2021), section 3, simplified as `muri.policies.traits` says.
    """
    if gpu_count == job.gpu_count:
        return 1.0
    model = model_of(job.batch, job.profile)
    assert model is not None, "a job of a trace has a profile"
    return relative_goodput(model, job.gpu_count, gpu_count)


class PackedWorld(World):
    """The state of the cluster at one moment; each unit is one job, and units overlap on GPUs."""

    packs: ClassVar[bool] = True

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        nodes: PackedNodes,
        settings: Settings,
        speeds: Speeds,
        waiting: WaitingJobs,
        *,
        crowding: Crowding,
        elastic: bool,
    ) -> None:
        super().__init__(jobs, nodes, settings, speeds, waiting)
        self.packed_nodes = nodes
        self.elastic = elastic
        self._crowding = crowding
        self._since_s: dict[tuple[int, int], float] = {}
        self._beyond: dict[tuple[int, int], float] = {}

    def start(self, members: Sequence[LiveJob], seat: Seat, undisturbed: frozenset[int]) -> None:
        """A job starts on GPUs that others may be on; see `World.start`."""
        super().start(members, seat, undisturbed)
        (live,) = members
        unit = live.unit
        assert unit is not None
        if self._lacks_memory(unit):
            # It allocates its memory in its first iteration.
            unit.doomed = True
            begins_s = live.resumes_s if live.resuming else self.now_s
            fails_s = begins_s + live.job.profile.iteration_s
            self.events.announce(fails_s, Kind.OUT_OF_MEMORY, live.job.job_id, unit.number)

    def run_out_of_memory(self, live: LiveJob) -> None:
        """A job fails if memory is still short; it returns to the queue and asks for more next time.

        Raises:
            SimulationError: It needs more memory than a whole GPU has.
        """
        unit = live.unit
        assert unit is not None
        unit.doomed = self._lacks_memory(unit)
        if not unit.doomed:
            return
        steps, capacity_gib = unit.seat.accumulate_steps, self.cluster.gpu_mem_gib
        if live.job.mem_gib_in(steps) > capacity_gib * (1 + _ROUNDING):
            raise SimulationError(
                f"job {live.job.job_id} needs {live.job.mem_gib_in(steps):.1f} GiB on each GPU where its batch is "
                f"computed in {steps} steps, but a GPU has {capacity_gib}; simulate larger GPUs, or leave the job out"
            )
        self.stop(unit, keeps_progress=False)
        asked_gib = live.gpu_mem_request_gib or live.planned.gpu_mem_gib
        live.gpu_mem_request_gib = min(capacity_gib, max(live.job.mem_gib_in(steps), RAISED_BY * asked_gib))
        live.out_of_memory += 1
        self.requeue(live)

    def _is_outdated(self, event: Event) -> bool:
        if event.kind is Kind.OUT_OF_MEMORY:
            unit = self.jobs[event.subject].unit
            return unit is None or unit.number != event.version
        return super()._is_outdated(event)

    def _lacks_memory(self, unit: Unit) -> bool:
        """Whether the units that were on one of its GPUs before it leave too little memory."""
        capacity_gib = self.cluster.gpu_mem_gib
        return bool(capacity_gib) and any(
            sum(other.mem_gib for other in there if other.number <= unit.number) > capacity_gib * (1 + _ROUNDING)
            for there in self.packed_nodes.on(unit)
        )

    def _end_span(self, unit: Unit) -> None:
        """Spans belong to GPUs and end when a job comes or leaves: see `_end_spans`."""

    def _end_spans(self, unit: Unit) -> None:
        """Record how long the GPUs that a unit joins or leaves have had their present jobs."""
        if self.spans is None:
            return
        stays: Counter[tuple[float, tuple[int, ...], int]] = Counter()
        for place, there in zip(self.packed_nodes.places(unit), self.packed_nodes.on(unit), strict=True):
            since_s, self._since_s[place] = self._since_s.get(place, 0.0), self.now_s
            if there and since_s < self.now_s:
                stays[since_s, tuple(other.members[0].job.job_id for other in there), place[0]] += 1
        for (since_s, members, node), gpu_count in stays.items():
            self.spans.append(GroupSpan(since_s, self.now_s, members, node, gpu_count))

    def _occupy(self, unit: Unit) -> None:
        self._end_spans(unit)
        self.meter.gpus_held += self.packed_nodes.put(unit)
        self._recount(unit)
        self._rearrange(unit)

    def _free(self, unit: Unit) -> None:
        self._end_spans(unit)
        del self.units[unit.number]
        self.shared_units -= unit.company
        self.meter.gpus_held -= self.packed_nodes.take(unit)
        self._rearrange(unit)

    def _rearrange(self, unit: Unit) -> None:
        """Update the speeds of the jobs on GPUs that a unit has joined or left."""
        neighbors = {other.number: other for there in self.packed_nodes.on(unit) for other in there}
        neighbors.pop(unit.number, None)
        for other in neighbors.values():
            other.members[0].settle(self.now_s)
            self._recount(other)
            self._set_pace(other)

    def _recount(self, unit: Unit) -> None:
        sharing = [len(there) for there in self.packed_nodes.on(unit)]
        unit.own_gpus = sum(1.0 / count for count in sharing)
        self.shared_units -= unit.company
        unit.company = max(sharing) > 1
        self.shared_units += unit.company

    def _set_speed(self, live: LiveJob, speed: float) -> None:
        """Change a speed; a GPU is never busier than 100 %, whatever its jobs' stage times add up to."""
        super()._set_speed(live, speed)
        assert live.unit is not None
        for place, there in zip(self.packed_nodes.places(live.unit), self.packed_nodes.on(live.unit), strict=True):
            beyond = max(0.0, sum(map(self._used_of_each, there)) - 1.0)
            self.meter.count_less(_GPU, beyond - self._beyond.get(place, 0.0))
            self._beyond[place] = beyond

    def _used_of_each(self, unit: Unit) -> float:
        (live,) = unit.members
        return live.speed * self._speeds.used[live.shape][_GPU] * live.job.gpu_count / unit.gpu_count

    def _set_pace(self, unit: Unit) -> None:
        (live,) = unit.members
        speed = speed_of(unit, self.packed_nodes.on(unit), self._crowding)
        if speed == live.pace == live.speed:
            return
        live.pace = speed
        if not live.resuming:
            self._set_speed(live, speed)
