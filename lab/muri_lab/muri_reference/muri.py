"""The policies that group jobs, under the public simulator's clock: Muri-S, Muri-L, their variants and muri-jct."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from muri.policies.lockstep import ALONE_OVERHEAD, MULTIPLIERS
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.speed import Floats, Indices
from muri.simulator.model import Cluster
from muri_lab.muri_reference.clock import Discipline
from muri_lab.muri_reference.groups import Columns, GroupFigures, Kinds, Pairing, columns_of, merged
from muri_lab.muri_reference.queues import ServiceQueues
from muri_lab.muri_reference.state import FreeNodes, Ledger

_REMEMBERED = 1 << 12  # Cached matchings of a bucket; most events leave most buckets as they were
_GAPS: Final = 100  # Number of the last intervals between events by which the cost of a group's overheads is judged
_LEAST_KEPT: Final = 1e-3
"""Least share of its time in which a group is assumed to progress, so that some group always runs."""

Group = tuple[int, ...]  # Rows of the jobs that share GPUs


@dataclass(frozen=True, slots=True)
class MuriOptions:
    """Settings that the paper varies."""

    durations_known: bool  # Whether the order is SRSF (Muri-S) or 2D-LAS (Muri-L)
    ordering: str = "best"  # "best" or "worst" permutation of a group's members
    blossom: bool = True  # Whether groups are matched; otherwise neighbors in the queue form them
    max_group_size: int = MAX_GROUP_SIZE  # Most members
    unpack_slow_groups: bool = False  # the public simulator's `autopack`, on in the runs of Figure 13
    service_queues: bool = False  # Tiresias's queues for jobs of unknown duration, as in Figure 13


class Unit(NamedTuple):
    """Jobs that share GPUs, or one alone."""

    jobs: Group  # Rows
    kinds: Kinds  # Their kinds, ascending


@dataclass(slots=True)
class _Room:
    """GPUs that all units need, and those that there are."""

    wanted: int
    gpus: int

    @property
    def short(self) -> bool:
        return self.wanted > self.gpus


class Muri(Discipline):
    """At each event, jobs for up to four times the cluster are grouped anew."""

    def __init__(self, ledger: Ledger, cluster: Cluster, options: MuriOptions) -> None:
        table = ledger.table
        super().__init__(ledger)
        self._cluster = cluster
        self._options = options
        self._kind: list[int] = table.kind.tolist()
        self._alone = [Unit((job,), (kind,)) for job, kind in enumerate(self._kind)]
        # Until its first run a job is rated by the duration that the trace lists.
        self._key = table.listed_s * table.gpus if options.durations_known else np.zeros(len(table))
        multipliers = MULTIPLIERS if options.blossom else (*MULTIPLIERS[:2], 1.3 / ALONE_OVERHEAD)
        self._figures = GroupFigures(table.shapes, options.ordering, multipliers, table.planned)
        planned = GroupFigures(table.planned, options.ordering, multipliers)
        if table.planned == table.shapes:
            self._figures = planned
        for gpus in np.unique(table.gpus):
            planned.compute_all(np.unique(table.kind[table.gpus == gpus]).tolist(), options.max_group_size)
        self._pairing = Pairing(planned, options.max_group_size)
        self._mates = lru_cache(maxsize=_REMEMBERED)(self._new_mates)
        self._queues = ServiceQueues(ledger) if options.service_queues and not options.durations_known else None

    def arrived(self, jobs: Sequence[int]) -> None:
        """New jobs join the first queue, where there are queues."""
        if self._queues is not None:
            self._queues.arrived(jobs)

    def ended(self, jobs: Sequence[int]) -> None:
        """Remove the jobs from their queues."""
        if self._queues is not None:
            self._queues.ended(jobs)

    def next_jump_s(self) -> float:
        """When the first running job falls to the next queue."""
        return math.inf if self._queues is None else self._queues.next_jump_s()

    def plan(self) -> None:
        """Select, group and place."""
        ledger, table = self._ledger, self._ledger.table
        self._sort()
        selected, leaders = select(ledger, self._cluster, self._options.max_group_size)
        room = _Room(sum(gpus * len(jobs) for gpus, jobs in selected.items()), self._cluster.gpu_count)
        matched = self._options.blossom
        groups = self._matched(selected, room) if matched else self._neighbors(selected, leaders, room)
        if self._options.unpack_slow_groups:
            groups = most_urgent(ledger, self._cluster, [part for unit in groups for part in self._parts(unit)])
        ledger.queue = np.sort(ledger.queue) if self._queues is not None else ledger.queue
        ledger.queue = ledger.queue[np.argsort(-table.gpus[ledger.queue], kind="stable")]
        start(ledger, place(ledger, self._cluster, groups), self._figures)
        if self._queues is not None:
            self._queues.running_first()

    def _sort(self) -> None:
        """Put the queue into the order of priority."""
        ledger, table = self._ledger, self._ledger.table
        if self._queues is not None:
            self._queues.demote()
            ledger.queue = np.array(self._queues.in_order(), dtype=np.intp)
            return
        on = ledger.on()
        service_s = ledger.left[on] * table.iteration_s[on] if self._options.durations_known else ledger.received_s[on]
        self._key[on] = service_s * table.gpus[on]
        ledger.queue = ledger.queue[np.argsort(self._key[ledger.queue], kind="stable")]

    def _matched(self, selected: Mapping[int, Sequence[int]], room: _Room) -> list[Unit]:
        """Rounds of matching, until all units fit; pairs are merged bucket by bucket, only while they don't."""
        buckets = {gpus: [self._alone[job] for job in jobs] for gpus, jobs in selected.items()}
        for _ in range(self._options.max_group_size):
            buckets = {gpus: self._round(units, gpus, room) if room.short else units for gpus, units in buckets.items()}
        return [unit for units in buckets.values() for unit in units]

    def _round(self, units: list[Unit], gpus: int, room: _Room) -> list[Unit]:
        mate = self._mates(tuple(unit.kinds for unit in units))
        after = []
        for place_, unit in enumerate(units):
            other = mate.get(place_, place_)
            if other == place_:
                after.append(unit)
            elif other < place_ and room.short:
                room.wanted -= gpus
                first = units[other]
                after.append(Unit(first.jobs + unit.jobs, merged(first.kinds, unit.kinds)))
            elif other < place_:
                after += [units[other], unit]
        return after

    def _new_mates(self, units: tuple[Kinds, ...]) -> dict[int, int]:
        """Return the partner of each unit, by place in the queue.

        The matching decides only on kinds. Every later step of the simulator's own search starts from the most urgent
        units again, so the lightest pairs, which it finds last, end up with them.
        """
        counts = Counter(kinds for kinds in units if len(kinds) < self._options.max_group_size)
        places: dict[Kinds, list[int]] = {kinds: [] for kinds in counts}
        for index in range(len(units) - 1, -1, -1):
            if units[index] in places:
                places[units[index]].append(index)
        mate = {}
        for one, other, count in self._pairing.match(tuple(sorted(counts.items()))):
            for _ in range(count):
                first, second = places[one].pop(), places[other].pop()
                mate[first], mate[second] = second, first
        return mate

    def _neighbors(self, selected: Mapping[int, Sequence[int]], leaders: Mapping[int, int], room: _Room) -> list[Unit]:
        """As many jobs of the queue in a row as a group takes, only while not all units fit."""
        size = self._options.max_group_size
        groups = []
        for gpus, jobs in selected.items():
            for start in range(0, leaders.get(gpus, 0) * size, size):
                group = [jobs[start]]
                for job in jobs[start + 1 : start + size]:
                    if room.short:
                        group.append(job)
                        room.wanted -= gpus
                    else:
                        groups.append(self._unit((job,)))
                groups.append(self._unit(tuple(group)))
        return groups

    def _parts(self, unit: Unit) -> list[Unit]:
        """The unit, or its jobs alone where T is more than the sum of their iterations."""
        if len(unit.jobs) == 1:
            return [unit]
        in_turn_s = self._ledger.table.iteration_s[list(unit.jobs)].sum()
        return [unit] if self._figures.period_s(unit.kinds) <= in_turn_s else [self._alone[job] for job in unit.jobs]

    def _unit(self, jobs: Group) -> Unit:
        return Unit(jobs, tuple(sorted(self._kind[job] for job in jobs)))


def select(ledger: Ledger, cluster: Cluster, size: int) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Let each job that finds GPUs, in order of the queue, bring along the next ones of its GPU count.

    Returns:
        By GPU count, in the order of the queue: the jobs selected, and how many reservations there are for them.
    """
    gpus = ledger.table.gpus[ledger.queue]
    places = {wanted: np.flatnonzero(gpus == wanted) for wanted in np.unique(gpus).tolist()}
    nodes = FreeNodes.of(cluster)
    leaders: dict[int, int] = {}
    # Where a job finds no GPUs, none behind it with the same GPU count does, so only the next leaders are looked at.
    candidates = [(int(own[0]), wanted) for wanted, own in places.items()]
    heapq.heapify(candidates)
    while candidates:
        _, wanted = heapq.heappop(candidates)
        if nodes.take(wanted) < 0:
            continue
        leaders[wanted] = count = leaders.get(wanted, 0) + 1
        if count * size < len(places[wanted]):
            heapq.heappush(candidates, (int(places[wanted][count * size]), wanted))
    # The simulator goes through the GPU counts in the order of their first jobs.
    by_first = sorted(leaders, key=lambda wanted: int(places[wanted][0]))
    selected = {wanted: ledger.queue[places[wanted][: leaders[wanted] * size]].tolist() for wanted in by_first}
    return selected, leaders


def most_urgent(ledger: Ledger, cluster: Cluster, units: Sequence[Unit]) -> list[Unit]:
    """The units that find GPUs when they are asked in the order of the queue, which is by priority."""
    return [unit for unit, _ in place(ledger, cluster, units)]


def place(ledger: Ledger, cluster: Cluster, units: Sequence[Unit]) -> list[tuple[Unit, int]]:
    """The groups that find GPUs, with their first node, in the order of the queue; the final one is by GPU count."""
    place_of = np.empty(len(ledger.table), dtype=np.intp)
    place_of[ledger.queue] = np.arange(len(ledger.queue))
    rank = place_of.tolist()
    nodes = FreeNodes.of(cluster)
    gpus = ledger.table.gpus.tolist()
    ordered = sorted(units, key=lambda unit: min([rank[job] for job in unit.jobs]))
    placed = [(unit, nodes.take(gpus[unit.jobs[0]])) for unit in ordered]
    return [(unit, node) for unit, node in placed if node >= 0]


def start(ledger: Ledger, placed: Sequence[tuple[Unit, int]], figures: GroupFigures) -> None:
    """Run the placed groups and no others, each member at one iteration per period."""
    table = ledger.table
    shared = [unit for unit, _ in placed if len(unit.jobs) > 1]
    members = [job for unit, _ in placed for job in unit.jobs]
    sharing = [job for unit in shared for job in unit.jobs]
    size = np.array([len(unit.jobs) for unit, _ in placed], dtype=np.intp)
    own_s = table.overhead_s[members]
    # An event costs every member the overheads of the whole group.
    ledger.overhead_s[members] = np.repeat(np.add.reduceat(own_s, np.cumsum(size) - size), size) if members else own_s
    ledger.period_s[members] = table.iteration_s[members]
    period_s = [figures.period_s(unit.kinds) for unit in shared]
    ledger.period_s[sharing] = np.repeat(period_s, [len(unit.jobs) for unit in shared]) if shared else []
    ledger.run_only(members, [node for unit, node in placed for _ in unit.jobs])
    ledger.gpus_held = int(table.gpus[[unit.jobs[0] for unit, _ in placed]].sum())
    ledger.share({job: unit.jobs for unit in shared for job in unit.jobs})


@dataclass(frozen=True, slots=True)
class Worth:
    """Worth of a job's progress: (service + offset) ** −power × GPUs ** −gpu_power.

    Powers of 1 are Smith's rule, powers of 0 throughput. The values were chosen on two traces with published results;
    to either side average completion times change slowly.
    """

    power: float  # How much the urgent count above the others
    gpu_power: float  # How much small jobs count above large ones
    offset_s: float  # Seconds of service below which jobs are about equally urgent


KNOWN: Final = Worth(0.5, 0.6, 1.0)  # By remaining service
UNKNOWN: Final = Worth(0.5, 0.65, 20_000.0)  # By service received


@dataclass(slots=True)
class _Bucket:
    """Waiting jobs of one GPU count while a plan is made."""

    gpus: int
    columns: Columns
    waiting: list[list[int]]
    worth: Floats
    gain: Floats
    best: tuple[float, int] = (0.0, -1)

    def choose(self) -> None:
        """Find the group that is worth most, of the most urgent jobs of each kind."""
        size = self.columns.size
        front = np.full(len(self.waiting) * size + 1, -np.inf)
        front[-1] = 0.0
        for kind, jobs in enumerate(self.waiting):
            first = jobs[-1 : -size - 1 : -1]
            front[kind * size : kind * size + len(first)] = self.worth[first]
        value = (self.gain * front[self.columns.candidate]).sum(axis=1)
        row = int(value.argmax())
        if value[row] <= 0:
            row = -1
        self.best = (float(value[row]) if row >= 0 else 0.0, row)

    def take(self) -> Group:
        """Take the jobs of that group."""
        group = tuple(self.waiting[kind].pop() for kind in self.columns.members[self.best[1]])
        self.choose()
        return group

    def value(self, group: Group, kinds: Sequence[int]) -> float:
        """Return a group's worth; members in the order of their kinds."""
        gain: list[float] = self.gain[self.columns.index[tuple(kinds)]].tolist()
        return sum(gain[place_] * float(self.worth[job]) for place_, job in enumerate(group))


class MuriJct(Discipline):
    """At each event, groups are opened in order of worth per GPU, then split while GPUs are left over.

    Groups are not kept from event to event, because under this model each event costs all jobs a restart anyway.
    """

    def __init__(self, ledger: Ledger, cluster: Cluster, *, durations_known: bool, max_group_size: int) -> None:
        table = ledger.table
        super().__init__(ledger)
        self._cluster = cluster
        self._durations_known = durations_known
        self._columns = {gpus: columns_of(table, gpus, max_group_size) for gpus in np.unique(table.gpus).tolist()}
        self._figures = GroupFigures(table.shapes, planned=table.planned)
        self._place_of_kind = np.array(
            [
                self._columns[gpus].kinds.index(kind)
                for gpus, kind in zip(table.gpus.tolist(), table.kind.tolist(), strict=True)
            ],
            dtype=np.intp,
        )
        self._gaps_s: deque[float] = deque(maxlen=_GAPS)
        self._planned_s = 0.0

    def plan(self) -> None:
        """Choose groups and place them."""
        ledger, table = self._ledger, self._ledger.table
        if ledger.now_s > self._planned_s:
            self._gaps_s.append(ledger.now_s - self._planned_s)
            self._planned_s = ledger.now_s
        queue = ledger.queue
        gpus = table.gpus[queue]
        enough = int(gpus.sum()) <= self._cluster.gpu_count
        groups: list[Group] = [(job,) for job in queue.tolist()] if enough else self._grouped(queue, gpus)
        ledger.queue = queue[np.argsort(-gpus, kind="stable")]
        units = [Unit(group, tuple(sorted(int(table.kind[job]) for job in group))) for group in groups]
        start(ledger, place(ledger, self._cluster, units), self._figures)

    def _grouped(self, queue: Indices, gpus: Indices) -> list[Group]:
        service_s = self._service_s(queue)
        rule = KNOWN if self._durations_known else UNKNOWN
        worth = np.zeros(len(self._ledger.table))
        worth[queue] = (service_s + rule.offset_s) ** -rule.power * gpus**-rule.gpu_power
        order = queue[np.lexsort((queue, service_s))][::-1]  # the most urgent last, to be popped
        buckets = {wanted: self._bucket(wanted, order, worth) for wanted in np.unique(gpus).tolist()}
        groups = self._opened(buckets)
        return self._split(groups, buckets)

    def _service_s(self, queue: Indices) -> Floats:
        """Seconds alone that jobs still need, or have been served where durations are unknown."""
        ledger, table = self._ledger, self._ledger.table
        iterations = ledger.left[queue] if self._durations_known else table.iterations[queue] - ledger.left[queue]
        return np.maximum(iterations * table.iteration_s[queue], 0.0)

    def _bucket(self, gpus: int, order: Indices, worth: Floats) -> _Bucket:
        columns = self._columns[gpus]
        waiting: list[list[int]] = [[] for _ in columns.kinds]
        mine = order[self._ledger.table.gpus[order] == gpus]
        for job, kind in zip(mine.tolist(), self._place_of_kind[mine].tolist(), strict=True):
            waiting[kind].append(job)
        bucket = _Bucket(gpus, columns, waiting, worth, columns.speed * self._kept_share(columns.overhead_s)[:, None])
        bucket.choose()
        return bucket

    def _kept_share(self, overhead_s: Floats) -> Floats:
        """Share of its time in which a group makes progress, if events go on coming as they did."""
        gaps_s = np.sort(np.array(self._gaps_s or [math.inf]))
        if math.isinf(gaps_s[0]):
            return np.ones(len(overhead_s))
        behind = np.searchsorted(gaps_s, overhead_s)
        rest_s = np.append(np.cumsum(gaps_s[::-1])[::-1], 0.0)[behind]
        kept = (rest_s - overhead_s * (len(gaps_s) - behind)) / gaps_s.sum()
        return np.asarray(np.maximum(kept, _LEAST_KEPT))

    def _opened(self, buckets: dict[int, _Bucket]) -> list[tuple[_Bucket, Group]]:
        """Open groups, the one that is worth most first (worth is by GPU-seconds already), while GPUs are free."""
        nodes = FreeNodes.of(self._cluster)
        open_ = dict(buckets)
        groups = []
        while open_ and not nodes.full:
            bucket = max(open_.values(), key=lambda bucket: (bucket.best[0], bucket.gpus))
            if bucket.best[1] < 0 or nodes.take(bucket.gpus) < 0:
                del open_[bucket.gpus]
                continue
            groups.append((bucket, bucket.take()))
        return groups

    def _split(self, groups: list[tuple[_Bucket, Group]], buckets: dict[int, _Bucket]) -> list[Group]:
        """While GPUs are left over, split the group that gains most by it."""
        free = self._cluster.gpu_count - sum(bucket.gpus for bucket, _ in groups)
        kind_of = self._place_of_kind.tolist()
        splits = [(bucket, group, best_split(bucket, group, kind_of)) for bucket, group in groups] if free else []
        done = [] if free else [group for _, group in groups]
        while splits:
            index = max(range(len(splits)), key=lambda index: splits[index][2][0] / splits[index][0].gpus)
            bucket, group, (gain, one, other) = splits.pop(index)
            if gain <= 0 or bucket.gpus > free:
                done.append(group)
                continue
            free -= bucket.gpus
            splits += [(bucket, part, best_split(bucket, part, kind_of)) for part in (one, other)]
        return done


def best_split(bucket: _Bucket, group: Group, kind_of: Sequence[int]) -> tuple[float, Group, Group]:
    """The two parts of a group (members in the order of their kinds) that are worth most, and what that gains."""

    def value(part: Group) -> float:
        return bucket.value(part, [kind_of[job] for job in part])

    best: tuple[float, Group, Group] = (0.0, group, ())
    whole = value(group)
    for mask in range(1, 1 << (len(group) - 1)):
        one = tuple(job for place_, job in enumerate(group) if mask >> place_ & 1)
        other = tuple(job for place_, job in enumerate(group) if not mask >> place_ & 1)
        best = max(best, (value(one) + value(other) - whole, one, other))
    return best
