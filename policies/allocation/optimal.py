"""Synergy-OPT: an integer program for the CPUs and memory of the jobs that TUNE would run, with a proven bound."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from scipy.sparse import coo_array, csc_array

from muri.policies.allocation.demand import cells, fair_share, throughput
from muri.policies.allocation.mechanisms import tune
from muri.policies.allocation.seats import JobShares, Round, Seat, Seating, Servers, per_gpu
from muri.policies.highs import solve_integer
from muri.policies.speed.model import Indices
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import Certificate, FreeNode, NodeShare

TIME_LIMIT_S: Final = 30.0
"""HiGHS stops then, with the best that it has found; which that is depends on the machine."""

GAP: Final = 1e-4
"""Relative gap at which HiGHS may stop."""


def optimal(round_: Round, *, merge_equal: bool = True, time_limit_s: float = TIME_LIMIT_S) -> Seating:
    """Seat the jobs that TUNE seats so that their speeds add up to the most.

    Speeds are relative to the GPU-proportional share of the whole cluster. Each job gets a node and one of the shares
    of its sensitivity that are no slower than its proportional one. What runs keeps its node, and loses what its
    restart takes of the round if its share changes. Jobs on several nodes keep what TUNE gives them.
    Where HiGHS finds nothing better in time, TUNE's seats are the answer, with HiGHS' bound.

    Source: Synergy (Mohan et al., OSDI 2022), section 4.1: Synergy-OPT; here nodes are part of one program, and
    jobs that are alike are counted instead of having a variable each.

    Args:
        round_: The jobs and the nodes.
        merge_equal: Whether to count jobs that are alike; without it every job has variables of its own, as in the
            paper, which takes far longer.
        time_limit_s: When HiGHS has to stop.
    """
    tuned = tune(round_)
    program = Program.of(round_, tuned.by_rank(), merge_equal=merge_equal)
    value = sum(program.worth(seat) for seat in tuned.by_rank())
    if not program.columns:
        return Seating(tuned.seats, Certificate(value, value))
    amount, bound = program.solve(time_limit_s)
    bound = max(value, bound + program.fixed_value)
    if amount is not None:
        seats = {seat.rank: seat for seat in (*program.spread, *program.seats(amount))}
        better = sum(program.worth(seat) for seat in seats.values())
        if better > value * (1 + 1e-9):
            return Seating(seats, Certificate(better, max(better, bound)))
    return Seating(tuned.seats, Certificate(value, bound))


class Kind(NamedTuple):
    """What jobs have in common that are the same to the program.

    Attributes:
        partition: Their partition.
        gpu_count: GPUs of each.
        sensitivity: What CPUs and memory do for them.
        rank: Of a job that is like no other, because it runs and stays; -1 of all others.
    """

    partition: str
    gpu_count: int
    sensitivity: Sensitivity | None
    rank: int


class Column(NamedTuple):
    """Jobs of a kind on a node with a share, which is per GPU."""

    kind: Kind
    node: str
    share: Demand
    value: float


@dataclass(frozen=True)
class Program:
    """How many jobs of each kind get which share on which node.

    Attributes:
        jobs: Seats of TUNE on one node, by kind and rank.
        spread: Seats on several nodes, which stay as they are.
        servers: What the jobs on one node can be given.
        usual: CPUs and memory of a GPU in the whole cluster, what speeds are relative to.
        interval_s: Seconds until the next plan.
        columns: The choices.
    """

    jobs: Mapping[Kind, Sequence[Seat]]
    spread: tuple[Seat, ...]
    servers: Servers
    usual: Demand
    interval_s: float
    columns: tuple[Column, ...] = ()

    @staticmethod
    def of(round_: Round, tuned: Sequence[Seat], *, merge_equal: bool = True) -> "Program":
        """The program that starts from TUNE's seats."""
        servers = round_.servers.copy()
        jobs: dict[Kind, list[Seat]] = {}
        spread = tuple(seat for seat in tuned if len(seat.gpus) > 1)
        for seat in spread:
            servers.gpus.take_exactly(seat.gpus)
            servers.take_shares(seat.cpu_mem)
        for seat in tuned:
            if len(seat.gpus) == 1:
                bucket, rank = seat.contender.bucket, seat.rank if seat.stays or not merge_equal else -1
                kind = Kind(bucket.partition, bucket.gpu_count, seat.contender.job.sensitivity, rank)
                jobs.setdefault(kind, []).append(seat)
        program = Program(jobs, spread, servers, _mean_share(servers.nodes.values()), round_.interval_s)
        return replace(program, columns=tuple(column for kind in jobs for column in program._columns_of(kind)))

    @property
    def fixed_value(self) -> float:
        """What the jobs on several nodes are worth."""
        return sum(self.worth(seat) for seat in self.spread)

    def worth(self, seat: Seat) -> float:
        """Speed of a seat; of a running job with another share less what the restart takes of the round."""
        nodes = zip(seat.gpus, seat.cpu_mem, strict=True)
        shares = [(self.servers.nodes[gpus.node], per_gpu(cpu_mem, gpus.gpu_count)) for gpus, cpu_mem in nodes]
        slowest = min(self._speed(seat.contender.job.sensitivity, share, node) for node, share in shares)
        return slowest * self._kept_time(seat, seat.kept)

    def solve(self, time_limit_s: float = TIME_LIMIT_S) -> tuple[Indices | None, float]:
        """How many jobs each column gets, None where nothing was found in time; and a proven bound."""
        kinds, nodes = list(self.jobs), list(self.servers.nodes)
        rows: list[tuple[int, int, float]] = []
        for number, column in enumerate(self.columns):
            node = self.servers.nodes[column.node]
            gpus, first = column.kind.gpu_count, len(kinds) + 3 * nodes.index(column.node)
            rows.append((kinds.index(column.kind), number, 1.0))
            rows.append((first, number, gpus))
            rows += [(first + 1, number, column.share.cpus * gpus)] if node.cpu_count else []
            rows += [(first + 2, number, column.share.mem_gib * gpus)] if node.mem_gib else []
        counts = [float(len(self.jobs[kind])) for kind in kinds]
        limits = [limit for name in nodes for limit in (self.servers.gpus.on_node(name), *self.servers.free(name))]
        row, chosen, amount = (np.array(part) for part in zip(*rows, strict=True))
        shape = (len(kinds) + len(limits), len(self.columns))
        solved = solve_integer(
            np.array([column.value for column in self.columns]),
            csc_array(coo_array((amount.astype(float), (row.astype(np.intp), chosen.astype(np.intp))), shape=shape)),
            np.array([*counts, *[0.0] * len(limits)]),
            np.array([*counts, *limits]) * (1 + 1e-9),
            gap=GAP,
            time_limit_s=time_limit_s,
        )
        return solved.amount, min(solved.upper_bound, self._every_job_at_its_best())

    def seats(self, amount: Indices) -> list[Seat]:
        """The seats: the most urgent jobs of a kind take the largest shares."""
        found = []
        left = {kind: iter(seats) for kind, seats in self.jobs.items()}
        order = sorted(range(len(self.columns)), key=lambda index: (-self.columns[index].value, index))
        for index in order:
            column = self.columns[index]
            for _ in range(int(amount[index])):
                seat = next(left[column.kind])
                gpus = seat.gpus if seat.stays else (NodeShare(column.node, column.kind.gpu_count),)
                found.append(replace(seat, gpus=gpus, cpu_mem=self._shares(column, seat), notes=()))
        return found

    def _every_job_at_its_best(self) -> float:
        """A bound that holds even where HiGHS was stopped before it had any."""
        best = dict.fromkeys(self.jobs, 0.0)
        for column in self.columns:
            best[column.kind] = max(best[column.kind], column.value)
        return sum(value * len(self.jobs[kind]) for kind, value in best.items())

    def _columns_of(self, kind: Kind) -> list[Column]:
        seat, found = self.jobs[kind][0], []
        names = [seat.node] if seat.stays else self.servers.with_gpus(seat.contender.job, kind.gpu_count)
        for name in names:
            node = self.servers.nodes[name]
            fair, most = fair_share(node), Demand(node.cpu_count / kind.gpu_count, node.mem_gib / kind.gpu_count)
            shares = [fair] if kind.sensitivity is None else list(cells(kind.sensitivity, fair, most))
            if seat.stays and seat.share not in shares:
                shares.append(seat.share)
            for share in shares:
                column = Column(kind, name, share, 0.0)
                kept = seat.stays and self._shares(column, seat) == seat.held
                value = self._speed(kind.sensitivity, share, node) * self._kept_time(seat, kept)
                found.append(column._replace(value=value))
        return found

    def _shares(self, column: Column, seat: Seat) -> JobShares:
        if seat.stays and column.share == per_gpu(seat.held[0], seat.gpus[0].gpu_count):
            return seat.held
        return self.servers.shares_on((NodeShare(column.node, column.kind.gpu_count),), column.share)

    def _kept_time(self, seat: Seat, kept: bool) -> float:
        """Share of the round in which a job gets on."""
        if kept or not seat.stays:
            return 1.0
        return max(0.0, 1.0 - seat.contender.job.restart_s / max(self.interval_s, 1.0))

    def _speed(self, sensitivity: Sensitivity | None, share: Demand, node: FreeNode) -> float:
        if sensitivity is None:
            return 1.0
        usual = throughput(sensitivity, self.usual, self.usual)
        return throughput(sensitivity, share, fair_share(node)) / usual if usual > 0 else 1.0


def _mean_share(nodes: Iterable[FreeNode]) -> Demand:
    listed = [node for node in nodes if node.gpu_count]
    gpus = sum(node.gpu_count for node in listed) or 1
    return Demand(sum(node.cpu_count for node in listed) / gpus, sum(node.mem_gib for node in listed) / gpus)
