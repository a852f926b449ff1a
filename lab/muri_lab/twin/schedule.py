"""Which waiting jobs can start on which nodes: Slurm's main and backfill schedulers, as far as they matter here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from muri.slurm_plugin.records.cluster import Job, JobState, Node, Reservation
from muri.slurm_plugin.records.limits import PartitionLimits
from muri_lab.twin.records import Held, Need

_MOST_SHADOWS: Final = 8  # Blocked jobs for which the backfill scheduler keeps nodes free, at most
_ENDED_WELL: Final = {JobState.COMPLETED}


@dataclass(slots=True)
class Free:
    """The free part of a node, as select/cons_tres counts it: GPUs and memory are given out once, CPUs in layers.

    The jobs of one layer have different CPUs. A job that shares starts where all that run do, on idle CPUs, or else in
    a layer where enough are left; any other job takes idle CPUs.
    """

    gpus: int
    mem_mib: int
    cpu_count: int
    held: list[Held] = field(default_factory=list)  # Of the jobs that run there

    @classmethod
    def of(cls, node: Node) -> "Free":
        """All of an idle node."""
        return cls(node.gpu_count, node.mem_mib, node.cpu_count)

    def copy(self) -> "Free":
        """The same, to be changed by itself."""
        return Free(self.gpus, self.mem_mib, self.cpu_count, list(self.held))

    @property
    def cpus(self) -> int:
        """CPUs that no job has."""
        return self.cpu_count - self._busy.bit_count()

    @property
    def _busy(self) -> int:
        busy = 0
        for each in self.held:
            busy |= each.cores
        return busy

    def holds(self, *needs: Need) -> bool:
        """Whether so much is left, for all of these jobs."""
        if len(needs) == 1:
            return self._cores_for(needs[0]) is not None
        trial = self.copy()
        return all(trial.take(need) is not None for need in needs)

    def take(self, need: Need) -> Held | None:
        """Give it to a job, and return the job's share; None where it is not there."""
        cores = self._cores_for(need)
        if cores is None:
            return None
        held = Held(need, _lowest(cores, need.cpus))
        self.put(held)
        return held

    def put(self, held: Held) -> None:
        """Take note of a job's share."""
        self.held.append(held)
        self.gpus, self.mem_mib = self.gpus - held.need.gpus, self.mem_mib - held.need.mem_mib

    def give(self, held: Held) -> None:
        """Take back a job's share."""
        self.held.remove(held)
        self.gpus, self.mem_mib = self.gpus + held.need.gpus, self.mem_mib + held.need.mem_mib

    def _cores_for(self, need: Need) -> int | None:
        """The CPUs of which a job may get some; None where it cannot start."""
        if self.gpus < need.gpus or self.mem_mib < need.mem_mib:
            return None
        every = (1 << self.cpu_count) - 1
        if need.layers > 1 and any(each.need.layers == 1 for each in self.held):
            return None
        idle = every & ~self._busy
        if idle.bit_count() >= need.cpus:
            return idle
        if need.layers == 1:
            return None
        layers = self._layers()
        free = (every & ~layer for layer in [*layers, *[0] * (need.layers - len(layers))][: need.layers])
        return next((cores for cores in free if cores.bit_count() >= need.cpus), None)

    def _layers(self) -> list[int]:
        """The CPUs of each layer: the largest jobs come first, each goes where its CPUs are free."""
        layers: list[int] = []
        for cores in sorted((each.cores for each in self.held), key=lambda cores: (-cores.bit_count(), cores)):
            place = next((number for number, layer in enumerate(layers) if not layer & cores), len(layers))
            layers[place : place + 1] = [cores | (layers[place] if place < len(layers) else 0)]
        return layers


def _lowest(cores: int, count: int) -> int:
    """The first of some CPUs."""
    chosen = 0
    for _ in range(count):
        first = cores & -cores
        chosen, cores = chosen | first, cores ^ first
    return chosen


def need_of(job: Job, rules: PartitionLimits) -> Need:
    """Return a job's need on each of its nodes, in a partition with these rules."""
    count = max(1, job.node_count)
    layers = rules.oversubscribe if job.oversubscribe else 1
    return Need(-(-job.gpu_count // count), max(1, -(-job.cpu_count // count)), job.mem_per_node_mib, layers)


def why_unready(job: Job, jobs: Mapping[int, Job], now_s: float) -> str:
    """Why a job may not start yet, whatever is free; "" when it may."""
    if job.begin_s > now_s:
        return "BeginTime"
    for condition in filter(None, job.dependency.replace("?", ",").split(",")):
        kind, _, number = condition.partition(":")
        other = jobs.get(int(number)) if number.isdigit() else _task(number, jobs)
        if other is None:
            continue  # forgotten: it has ended
        if kind == "after" and other.state is JobState.PENDING:
            return "Dependency"
        if kind in {"afterany", "afterok", "afternotok"} and other.state.is_active:
            return "Dependency"
        if kind == "afterok" and other.state not in _ENDED_WELL:
            return "DependencyNeverSatisfied"
    return ""


def _task(name: str, jobs: Mapping[int, Job]) -> Job | None:
    """The record of an array's task, such as "12_3"."""
    return next((job for job in jobs.values() if job.array_job_id and job.name_in_slurm == name), None)


class Cluster(Protocol):
    """A scheduler's view of a cluster."""

    nodes: dict[str, Node]
    free: dict[str, Free]
    reservations: tuple[Reservation, ...]

    @property
    def now_s(self) -> float:
        """The time."""
        ...

    def usable_by(self, job: Job) -> Iterator[Node]:
        """Nodes that a job may get, busy ones included."""
        ...

    def need_of(self, job: Job) -> Need:
        """A job's need on each of its nodes."""
        ...

    def held_on(self, name: str) -> Iterator[tuple[float, Held]]:
        """Until when running jobs hold what of a node, as far as their time limits tell."""
        ...


def best_fit(order: Iterable[str], free_cpus: Mapping[str, int], count: int) -> tuple[str, ...]:
    """Choose nodes as select/cons_tres does where all weights are equal.

    Of the runs of neighboring nodes it takes the one that suffices with the fewest free CPUs, or else the one with the
    most and goes on with the next. For one node it takes the fullest of the run; for several, the first.
    """
    runs: list[list[str]] = [[]]
    for name in order:
        if name in free_cpus:
            runs[-1].append(name)
        elif runs[-1]:
            runs.append([])
    chosen: list[str] = []
    while (left := count - len(chosen)) > 0:
        cpus = {number: sum(free_cpus[name] for name in run) for number, run in enumerate(runs) if run}
        enough = [number for number in cpus if len(runs[number]) >= left]
        best = min(enough, key=lambda n: cpus[n]) if enough else max(cpus, key=lambda n: cpus[n])
        run, runs[best] = runs[best], []
        chosen += [min(run, key=lambda name: free_cpus[name])] if left == 1 else run[:left]
    return tuple(chosen)


class Backlog:
    """One look at the queue, in order of priority: blocked jobs keep their place.

    The main scheduler starts nothing behind a job of the same partition that waits for resources. The backfill
    scheduler does where that job, whose nodes and start it foresees by the time limits, starts no later for it.
    """

    def __init__(self, cluster: Cluster, *, backfill: bool) -> None:
        self._cluster = cluster
        self._backfill = backfill
        self._blocked: set[str] = set()
        self._shadows: dict[str, list[tuple[float, Need]]] = {}
        self._shadow_count = 0

    def nodes_for(self, job: Job) -> tuple[tuple[str, ...], str]:
        """Return the nodes on which a job starts now; () and why it waits where it does not."""
        blocked = job.partition in self._blocked
        if blocked and not self._backfill:
            return (), "Priority"
        count, need = max(1, job.node_count), self._cluster.need_of(job)
        usable = list(self._cluster.usable_by(job))
        if len([node for node in usable if Free.of(node).holds(need)]) < count:
            return (), self._why_never(job, need)
        end_s = self._cluster.now_s + job.time_limit_s if job.time_limit_s else float("inf")
        free_cpus = {
            node.name: free.cpus
            for node in usable
            if (free := self._cluster.free[node.name]).holds(need) and self._spares(node.name, need, end_s)
        }
        if len(free_cpus) >= count:
            return best_fit(self._cluster.nodes, free_cpus, count), ""
        self._blocked.add(job.partition)
        if self._backfill and self._shadow_count < _MOST_SHADOWS:
            self._keep_free(job, [node.name for node in usable])
        return (), "Priority" if blocked else "Resources"

    def _spares(self, name: str, need: Need, end_s: float) -> bool:
        """Whether a job that runs until `end_s` leaves what was foreseen for others of a node."""
        for at_s, foreseen in self._shadows.get(name, ()):
            if end_s <= at_s:
                continue
            left = Free.of(self._cluster.nodes[name])
            for until_s, held in sorted(self._cluster.held_on(name)):
                if until_s > at_s:
                    left.put(held)
            if not left.holds(need, foreseen):
                return False
        return True

    def _why_never(self, job: Job, need: Need) -> str:
        """Why a job's nodes do not suffice: they are closed for now, or its request fits nowhere."""
        nodes = [node for node in self._cluster.nodes.values() if job.partition in node.partitions]
        if job.required_nodes or any(not node.usable for node in nodes) or self._cluster.reservations:
            return "ReqNodeNotAvail"
        fits = sum(Free.of(node).holds(need) for node in nodes) >= max(1, job.node_count)
        return "Resources" if fits else "BadConstraints"

    def _keep_free(self, job: Job, names: Sequence[str]) -> None:
        """Foresee where and when a blocked job starts."""
        self._shadow_count += 1
        need, count = self._cluster.need_of(job), max(1, job.node_count)
        when = sorted((self._free_at(name, need), name) for name in names)[:count]
        for at_s, name in when:
            self._shadows.setdefault(name, []).append((at_s, need))

    def _free_at(self, name: str, need: Need) -> float:
        """When a node has so much free, as far as time limits tell."""
        free = self._cluster.free[name].copy()
        if free.holds(need):
            return self._cluster.now_s
        for end_s, held in sorted(self._cluster.held_on(name)):
            free.give(held)
            if free.holds(need):
                return end_s
        return float("inf")
