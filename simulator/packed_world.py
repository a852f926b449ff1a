"""A simulated cluster in which jobs share GPUs one by one: who joins or leaves changes the pace of the neighbours."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Final

from muri.policies.horus.cost import RAISED_BY
from muri.profiler.records import RESOURCES
from muri.simulator.crowding import Crowding, speed_of
from muri.simulator.events import Event, Kind
from muri.simulator.model import GroupSpan, Settings, SimulationError, TraceJob
from muri.simulator.pace import Speeds
from muri.simulator.packed_nodes import PackedNodes
from muri.simulator.state import LiveJob, Seat, Unit
from muri.simulator.waiting import WaitingJobs
from muri.simulator.world import World

_ROUNDING: Final = 1e-9
_GPU: Final = RESOURCES.index("gpu")


class PackedWorld(World):
    """Everything that is true at one moment; every unit is one job, and units overlap on GPUs.

    Args:
        jobs: The jobs of the trace.
        nodes: The nodes of the cluster, all free.
        settings: How to simulate.
        speeds: What is known of the jobs' profiles; nobody takes turns.
        waiting: An empty queue.
        crowding: How fast jobs on one GPU get on.
        elastic: Whether a job may hold another number of GPUs than it asked for.
    """

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
            # It allocates what it needs in its first iteration.
            unit.doomed = True
            begins_s = live.resumes_s if live.resuming else self.now_s
            fails_s = begins_s + live.job.profile.iteration_s
            self.events.announce(fails_s, Kind.OUT_OF_MEMORY, live.job.job_id, unit.number)

    def run_out_of_memory(self, live: LiveJob) -> None:
        """A job fails if there still isn't enough memory for it; it is thrown back, and asks for more next time.

        Raises:
            SimulationError: It had its GPUs to itself.
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
        """Whether those who were on one of its GPUs before it leave it too little memory."""
        capacity_gib = self.cluster.gpu_mem_gib
        return bool(capacity_gib) and any(
            sum(other.mem_gib for other in there if other.number <= unit.number) > capacity_gib * (1 + _ROUNDING)
            for there in self.packed_nodes.on(unit)
        )

    def _end_span(self, unit: Unit) -> None:
        """Spans are those of GPUs, which end when somebody comes or leaves: see `_end_spans`."""

    def _end_spans(self, unit: Unit) -> None:
        """Note how long the GPUs that a unit comes to or leaves have had the jobs that they have."""
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
        """Those on the GPUs that a unit has come to or left go on at another pace."""
        neighbours = {other.number: other for there in self.packed_nodes.on(unit) for other in there}
        neighbours.pop(unit.number, None)
        for other in neighbours.values():
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
        """Change a speed; a GPU is busy at most all the time, however much its jobs use it by their stage times."""
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
