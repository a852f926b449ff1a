"""muri-jct under the public simulator's clock, speeds and overheads: groups chosen for the average completion time."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from muri.policies.speed.model import Floats, Indices
from muri.simulator.model import Cluster
from muri.simulator.reference.columns import Columns, columns_of
from muri.simulator.reference.constants import SAME_TIME_S
from muri.simulator.reference.events import Event, first_completion
from muri.simulator.reference.ledger import Ledger
from muri.simulator.reference.muri import Group, Unit, place, start
from muri.simulator.reference.nodes import FreeNodes
from muri.simulator.reference.speeds import GroupFigures

_GAPS: Final = 100
"""Times between events, the last so many, by which it is judged what the overheads of a group cost."""

_LEAST_KEPT: Final = 1e-3
"""Share of its time in which even the slowest group to restart is taken to get on, so that somebody always runs."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What progress of a job is worth: (service + offset) ** −power × GPUs ** −gpu_power.

    With both powers 1 it would be Smith's rule, which serves the job that ends next and forgets how many wait behind
    it; with 0 all that counts is throughput. In between is best. The figures were chosen on the two traces with
    published results; to either side average completion times change slowly.

    Attributes:
        power: How much the urgent count above the others.
        gpu_power: How much small jobs count above large ones.
        offset_s: Seconds of service below which jobs are about equally urgent.
    """

    power: float
    gpu_power: float
    offset_s: float


KNOWN: Final = Worth(0.5, 0.6, 1.0)
"""By remaining service."""

UNKNOWN: Final = Worth(0.5, 0.65, 20_000.0)
"""By service received."""


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
        """What a group is worth; members in the order of their kinds."""
        gain: list[float] = self.gain[self.columns.index[tuple(kinds)]].tolist()
        return sum(gain[place_] * float(self.worth[job]) for place_, job in enumerate(group))


class MuriJct:
    """At each event, groups are opened in order of worth per GPU, then split while GPUs are left over.

    Nothing is kept from event to event, for under this model an event costs everybody a restart anyway.

    Args:
        ledger: The jobs.
        cluster: The nodes.
        durations_known: Whether worth follows from remaining or from received service.
        max_group_size: Most members.
    """

    same_time_s = SAME_TIME_S

    def __init__(self, ledger: Ledger, cluster: Cluster, *, durations_known: bool, max_group_size: int) -> None:
        table = ledger.table
        self._ledger = ledger
        self._cluster = cluster
        self._durations_known = durations_known
        self._columns = {gpus: columns_of(table, gpus, max_group_size) for gpus in np.unique(table.gpus).tolist()}
        self._figures = GroupFigures(table.shapes)
        self._place_of_kind = np.array(
            [
                self._columns[gpus].kinds.index(kind)
                for gpus, kind in zip(table.gpus.tolist(), table.kind.tolist(), strict=True)
            ],
            dtype=np.intp,
        )
        self._gaps_s: deque[float] = deque(maxlen=_GAPS)
        self._planned_s = 0.0

    def arrived(self, jobs: Sequence[int]) -> None:
        """Nothing to note."""

    def ended(self, jobs: Sequence[int]) -> None:
        """Nothing to note."""

    def first_end(self) -> Event:
        """The next completion."""
        return first_completion(self._ledger)

    def next_jump_s(self) -> float:
        """Only arrivals and completions count."""
        return math.inf

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
