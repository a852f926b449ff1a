"""Muri-S and Muri-L as the public simulator has them, and the paper's variants of them."""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.speed.reference import MULTIPLIERS, MULTIPLIERS_NO_BLOSSOM
from muri.simulator.model import Cluster
from muri.simulator.reference.constants import SAME_TIME_S
from muri.simulator.reference.events import Event, first_completion
from muri.simulator.reference.ledger import Ledger
from muri.simulator.reference.nodes import FreeNodes
from muri.simulator.reference.pairing import Pairing, merged
from muri.simulator.reference.speeds import GroupFigures, Kinds

Group = tuple[int, ...]
"""Rows of the jobs that share GPUs."""


@dataclass(frozen=True, slots=True)
class MuriOptions:
    """What the paper varies.

    Attributes:
        durations_known: Whether the order is SRSF (Muri-S) or 2D-LAS (Muri-L).
        ordering: "best" or "worst" permutation of a group's members.
        blossom: Whether groups are matched; otherwise neighbours in the queue form them.
        max_group_size: Most members.
    """

    durations_known: bool
    ordering: str = "best"
    blossom: bool = True
    max_group_size: int = MAX_GROUP_SIZE


_REMEMBERED = 1 << 12
"""Queues of a bucket whose pairs are remembered; most events leave most buckets as they were."""


class Unit(NamedTuple):
    """Jobs that share GPUs, or one alone.

    Attributes:
        jobs: Rows.
        kinds: Their kinds, ascending.
    """

    jobs: Group
    kinds: Kinds


@dataclass(slots=True)
class _Room:
    """GPUs that all units need, and those that there are."""

    wanted: int
    gpus: int

    @property
    def short(self) -> bool:
        return self.wanted > self.gpus


class Muri:
    """At each event everybody who fits, fourfold, is grouped anew.

    Args:
        ledger: The jobs.
        cluster: The nodes.
        options: Which Muri.
    """

    same_time_s = SAME_TIME_S

    def __init__(self, ledger: Ledger, cluster: Cluster, options: MuriOptions) -> None:
        table = ledger.table
        self._ledger = ledger
        self._cluster = cluster
        self._options = options
        self._kind: list[int] = table.kind.tolist()
        self._alone = [Unit((job,), (kind,)) for job, kind in enumerate(self._kind)]
        # Until its first run a job is rated by the duration that the trace lists.
        self._key = table.listed_s * table.gpus if options.durations_known else np.zeros(len(table))
        multipliers = MULTIPLIERS if options.blossom else MULTIPLIERS_NO_BLOSSOM
        self._figures = GroupFigures(table.shapes, options.ordering, multipliers)
        planned = GroupFigures(table.planned, options.ordering, multipliers)
        if table.planned == table.shapes:
            self._figures = planned
        for gpus in np.unique(table.gpus):
            planned.compute_all(np.unique(table.kind[table.gpus == gpus]).tolist(), options.max_group_size)
        self._pairing = Pairing(planned.efficiency, options.max_group_size)
        self._mates = lru_cache(maxsize=_REMEMBERED)(self._new_mates)

    def arrived(self, jobs: Sequence[int]) -> None:
        """Nothing to note."""

    def ended(self, jobs: Sequence[int]) -> None:
        """Nothing to note."""

    def plan(self) -> None:
        """Select, group and place."""
        ledger, table = self._ledger, self._ledger.table
        on = ledger.on()
        service_s = ledger.left[on] * table.iteration_s[on] if self._options.durations_known else ledger.received_s[on]
        self._key[on] = service_s * table.gpus[on]
        ledger.queue = ledger.queue[np.argsort(self._key[ledger.queue], kind="stable")]
        selected, leaders = select(ledger, self._cluster, self._options.max_group_size)
        room = _Room(sum(gpus * len(jobs) for gpus, jobs in selected.items()), self._cluster.gpu_count)
        matched = self._options.blossom
        groups = self._matched(selected, room) if matched else self._neighbours(selected, leaders, room)
        ledger.queue = ledger.queue[np.argsort(-table.gpus[ledger.queue], kind="stable")]
        start(ledger, place(ledger, self._cluster, groups), self._figures)

    def first_end(self) -> Event:
        """The next completion."""
        return first_completion(self._ledger)

    def next_jump_s(self) -> float:
        """Only arrivals and completions count."""
        return math.inf

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
        """Who is paired with whom, by place in the queue.

        The matching decides only on kinds. Every later step of the simulator's own search starts from the most
        urgent units again, so the lightest pairs, which it finds last, end up with them.
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

    def _neighbours(self, selected: Mapping[int, Sequence[int]], leaders: Mapping[int, int], room: _Room) -> list[Unit]:
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

    def _unit(self, jobs: Group) -> Unit:
        return Unit(jobs, tuple(sorted(self._kind[job] for job in jobs)))


def select(ledger: Ledger, cluster: Cluster, size: int) -> tuple[dict[int, list[int]], dict[int, int]]:
    """In order of the queue, each job that finds GPUs brings along the next ones of its GPU count.

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


def place(ledger: Ledger, cluster: Cluster, units: Sequence[Unit]) -> list[tuple[Unit, int]]:
    """The groups that find GPUs, with their first node, in the order of the queue, which is by GPU count."""
    place_of = np.empty(len(ledger.table), dtype=np.intp)
    place_of[ledger.queue] = np.arange(len(ledger.queue))
    rank = place_of.tolist()
    nodes = FreeNodes.of(cluster)
    gpus = ledger.table.gpus.tolist()
    ordered = sorted(units, key=lambda unit: min([rank[job] for job in unit.jobs]))
    placed = [(unit, nodes.take(gpus[unit.jobs[0]])) for unit in ordered]
    return [(unit, node) for unit, node in placed if node >= 0]


def start(ledger: Ledger, placed: Sequence[tuple[Unit, int]], figures: GroupFigures) -> None:
    """Let placed groups run and nobody else, each member at one iteration per period."""
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
