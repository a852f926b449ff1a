"""Synergy-OPT: an integer program for the CPUs and memory of the jobs that TUNE would run, with a proven bound."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

import numpy as np
from scipy.sparse import coo_array, csc_array

from muri.policies.cycle.free_gpus import Shares
from muri.policies.grouping.solvers import solve_integer
from muri.policies.siblings.mechanisms import tune
from muri.policies.siblings.shares import (
    SLACK,
    JobShares,
    Round,
    Seat,
    Seating,
    Servers,
    cells,
    fair_share,
    per_gpu,
    throughput,
)
from muri.policies.siblings.synergy import Synergy, Way
from muri.policies.speed import Indices
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import Certificate, FreeNode, NodeShare
from muri_lab.policies.ideal import Choice, Ideal, Need, Room, map_to_nodes, whole_gpus

TIME_LIMIT_S: Final = 30.0  # HiGHS stops then, with the best that it has found; which that is depends on the machine
GAP: Final = 1e-4  # Relative gap at which HiGHS may stop
K = TypeVar("K")


def optimal(round_: Round, *, merge_equal: bool = True, time_limit_s: float = TIME_LIMIT_S) -> Seating:
    """Seat the jobs that TUNE seats so that their speeds add up to the most.

    Speeds are relative to the GPU-proportional share of the whole cluster. Each job gets nodes and one of the shares of
    its sensitivity that are at least as fast as its proportional one. Running jobs keep their nodes, and lose their
    restart's time of the round if their share changes. A new job on several nodes gets the same for each GPU, on TUNE's
    nodes or on those of the paper's second program. If HiGHS finds nothing better in time, TUNE's seats are the answer.
    The bound holds for any choice of nodes.

    Source: Synergy (Mohan et al., OSDI 2022), section 4.1: Synergy-OPT; here nodes are part of the integer program.

    Args:
        round_: The jobs and the nodes.
        merge_equal: Whether to count jobs that are alike; the paper has variables for each job, which takes far longer.
        time_limit_s: When HiGHS has to stop.
    """
    tuned = tune(round_)
    program = Program.of(round_, tuned.by_rank(), merge_equal=merge_equal)
    value = sum(program.worth(seat) for seat in tuned.by_rank())
    if not program.columns:
        return Seating(tuned.seats, Certificate(value, value))
    program = program.with_second_program(time_limit_s)
    amount, bound = program.solve(time_limit_s)
    if amount is not None:
        seats = {seat.rank: seat for seat in program.seats(amount)}
        better = sum(program.worth(seat) for seat in seats.values())
        if better > value * (1 + 1e-9):
            return Seating(seats, Certificate(better, max(better, bound)))
    return Seating(tuned.seats, Certificate(value, max(value, bound)))


class Kind(NamedTuple):
    """What jobs have in common that are the same to the program."""

    partition: str  # Their partition
    gpus_each: tuple[int, ...]  # GPUs of each of a job's nodes, the most first
    sensitivity: Sensitivity | None  # What CPUs and memory do for them
    rank: int  # Of a job that is like no other, because it runs and stays; -1 of all others

    @property
    def gpu_count(self) -> int:
        """GPUs of each job."""
        return sum(self.gpus_each)

    @property
    def spread(self) -> bool:
        """Whether its jobs are on several nodes."""
        return len(self.gpus_each) > 1


class Column(NamedTuple):
    """Jobs of a kind on nodes with CPUs and memory of each."""

    kind: Kind
    gpus: Shares
    cpu_mem: JobShares
    value: float


@dataclass(frozen=True)
class Program:
    """How many jobs of each kind get which share on which nodes."""

    jobs: Mapping[Kind, Sequence[Seat]]  # Seats of TUNE by kind and rank
    servers: Servers  # What the jobs can be given
    usual: Demand  # CPUs and memory of a GPU in the whole cluster, what speeds are relative to
    interval_s: float  # Seconds until the next plan
    columns: tuple[Column, ...] = ()  # The choices

    @staticmethod
    def of(round_: Round, tuned: Sequence[Seat], *, merge_equal: bool = True) -> "Program":
        """The program that starts from TUNE's seats."""
        servers = round_.servers.copy()
        jobs: dict[Kind, list[Seat]] = {}
        for seat in tuned:
            rank = seat.rank if seat.stays or not merge_equal else -1
            gpus_each = tuple(sorted((share.gpu_count for share in seat.gpus), reverse=True))
            kind = Kind(seat.contender.bucket.partition, gpus_each, seat.contender.job.sensitivity, rank)
            jobs.setdefault(kind, []).append(seat)
        program = Program(jobs, servers, _mean_share(servers.nodes.values()), round_.interval_s)
        return replace(program, columns=tuple(column for kind in jobs for column in program._columns_of(kind)))

    def worth(self, seat: Seat) -> float:
        """Speed of a seat; of a running job with another share less what the restart takes of the round."""
        speed = self._speed(seat.contender.job.sensitivity, seat.gpus, seat.cpu_mem)
        return speed * self._kept_time(seat, seat.kept)

    def solve(self, time_limit_s: float = TIME_LIMIT_S) -> tuple[Indices | None, float]:
        """How many jobs each column gets, None where nothing was found in time; and a proven bound."""
        kinds, nodes = _numbers(self.jobs), _numbers(self.servers.nodes)
        rows: list[tuple[int, int, float]] = []
        for number, column in enumerate(self.columns):
            rows.append((kinds[column.kind], number, 1.0))
            for gpus, share in zip(column.gpus, column.cpu_mem, strict=True):
                node, first = self.servers.nodes[share.node], len(kinds) + 3 * nodes[share.node]
                rows.append((first, number, gpus.gpu_count))
                rows += [(first + 1, number, share.cpus)] if node.cpu_count else []
                rows += [(first + 2, number, share.mem_gib)] if node.mem_gib else []
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
        ideal = self.ideal().bound()
        # The columns of a new job on several nodes name only some of the nodes where it could be.
        return solved.amount, ideal if self._new_spread() else min(solved.upper_bound, ideal)

    def with_second_program(self, time_limit_s: float = TIME_LIMIT_S) -> "Program":
        """The same where new jobs on several nodes may also take those that the paper's second program names."""
        more = [
            column
            for kind, placements in self._mapped(time_limit_s).items()
            for gpus in placements
            for column in self._columns_at(kind, gpus)
        ]
        return replace(self, columns=tuple(dict.fromkeys((*self.columns, *more))))

    def ideal(self) -> Ideal:
        """The paper's first program: the same choices on one machine."""
        kinds, best = _numbers(self.jobs), dict[tuple[int, Demand], float]()
        for column in self.columns:
            total = Demand(sum(share.cpus for share in column.cpu_mem), sum(share.mem_gib for share in column.cpu_mem))
            choice = (kinds[column.kind], total)
            best[choice] = max(best.get(choice, 0.0), column.value)
        for kind in self._new_spread():  # wherever they are
            for name, node in self.servers.nodes.items():
                gpus = (NodeShare(name, kind.gpus_each[-1]),)
                for share in self._shares_at(kind.sensitivity, gpus) if kind.partition in node.partitions else ():
                    total = Demand(share.cpus * kind.gpu_count, share.mem_gib * kind.gpu_count)
                    choice = (kinds[kind], total)
                    value = self._speed(kind.sensitivity, gpus, self.servers.shares_on(gpus, share))
                    best[choice] = max(best.get(choice, 0.0), value)
        free = [self.servers.free(name) for name in self.servers.nodes]
        capacity = Demand(sum(each.cpus for each in free), sum(each.mem_gib for each in free))
        choices = [Choice(kind, total, value) for (kind, total), value in best.items()]
        return Ideal(choices, [len(seats) for seats in self.jobs.values()], capacity)

    def seats(self, amount: Indices) -> list[Seat]:
        """The seats: the most urgent jobs of a kind take the largest shares."""
        found = []
        left = {kind: iter(seats) for kind, seats in self.jobs.items()}
        order = sorted(range(len(self.columns)), key=lambda index: (-self.columns[index].value, index))
        for index in order:
            column = self.columns[index]
            found += [
                replace(next(left[column.kind]), gpus=column.gpus, cpu_mem=column.cpu_mem, notes=())
                for _ in range(int(amount[index]))
            ]
        return found

    def _new_spread(self) -> list[Kind]:
        """Jobs on several nodes that start."""
        return [kind for kind, seats in self.jobs.items() if kind.spread and not seats[0].stays]

    def _mapped(self, time_limit_s: float) -> dict[Kind, list[Shares]]:
        """Nodes of new jobs on several nodes by the paper's two programs, with whole GPUs."""
        shares = self.ideal().allocation(time_limit_s) if self._new_spread() else None
        if shares is None:
            return {}
        names, left = list(self.servers.nodes), self.servers.copy()
        needs: list[tuple[Kind, Need]] = []
        for kind, given in zip(self.jobs, shares, strict=True):
            if self.jobs[kind][0].stays:
                (seat,) = self.jobs[kind]
                left.gpus.take_exactly(seat.gpus)
                left.take_shares(seat.cpu_mem)
                continue
            nodes = [number for number, name in enumerate(names) if left.gpus.suits(name, kind.partition, 0.0)]
            needs += [(kind, Need(kind.gpu_count, total, nodes, len(kind.gpus_each))) for total in given]
        laid = map_to_nodes([need for _, need in needs], [self._room(left, name) for name in names])
        found: dict[Kind, list[Shares]] = {}
        for number, (kind, need) in enumerate(needs if laid is not None else ()):
            if kind.spread and laid is not None:
                free = [left.gpus.on_node(name) if at in need.nodes else 0 for at, name in enumerate(names)]
                pairs = whole_gpus(laid[number], kind.gpus_each, free)
                if pairs is not None:
                    gpus = tuple(NodeShare(names[node], count) for node, count in pairs)
                    left.gpus.take_exactly(gpus)
                    found.setdefault(kind, []).append(gpus)
        return found

    def _room(self, left: Servers, name: str) -> Room:
        node, free = self.servers.nodes[name], left.free(name)
        cpus, mem_gib = free.cpus if node.cpu_count else np.inf, free.mem_gib if node.mem_gib else np.inf
        return Room(left.gpus.on_node(name), max(0.0, cpus), max(0.0, mem_gib))

    def _columns_of(self, kind: Kind) -> list[Column]:
        seats = self.jobs[kind]
        if kind.spread or seats[0].stays:
            placements = list(dict.fromkeys(seat.gpus for seat in seats))
        else:
            names = self.servers.with_gpus(seats[0].contender.job, kind.gpu_count)
            placements = [(NodeShare(name, kind.gpu_count),) for name in names]
        return [column for gpus in placements for column in self._columns_at(kind, gpus)]

    def _columns_at(self, kind: Kind, gpus: Shares) -> list[Column]:
        """Return a kind's possible shares on some nodes."""
        seat = self.jobs[kind][0]
        choices = [self._exactly(gpus, share, seat) for share in self._shares_at(kind.sensitivity, gpus)]
        if seat.stays:
            choices.append(seat.cpu_mem)
        elif kind.spread:
            choices += [each.cpu_mem for each in self.jobs[kind] if each.gpus == gpus]
            choices.append(self.servers.shares_on(gpus))
        return [
            Column(kind, gpus, cpu_mem, speed * self._kept_time(seat, seat.stays and cpu_mem == seat.held))
            for cpu_mem in dict.fromkeys(choices)
            for speed in [self._speed(kind.sensitivity, gpus, cpu_mem)]
        ]

    def _shares_at(self, sensitivity: Sensitivity | None, gpus: Shares) -> list[Demand]:
        """Shares per GPU that are worth considering: nowhere slower than the proportional one."""
        nodes = [(self.servers.nodes[share.node], share.gpu_count) for share in gpus]
        if sensitivity is None:
            return [fair_share(nodes[0][0])] if len(nodes) == 1 else []
        limits = [(fair_share(node), Demand(node.cpu_count / count, node.mem_gib / count)) for node, count in nodes]
        shares = {share for fair, most in set(limits) for share in cells(sensitivity, fair, most)}
        if len(nodes) == 1:
            return list(cells(sensitivity, *limits[0]))
        return sorted(
            share
            for share in shares
            if all(
                throughput(sensitivity, share, fair) >= throughput(sensitivity, fair, fair) * (1 - SLACK)
                for fair, _ in limits
            )
        )

    def _exactly(self, gpus: Shares, share: Demand, seat: Seat) -> JobShares:
        """Return a share; of a job that holds it already, without a rounding error."""
        if seat.stays and share == per_gpu(seat.held[0], seat.gpus[0].gpu_count):
            return seat.held
        return self.servers.shares_on(gpus, share)

    def _kept_time(self, seat: Seat, kept: bool) -> float:
        """Share of the round in which a job gets on."""
        if kept or not seat.stays:
            return 1.0
        return max(0.0, 1.0 - seat.contender.job.restart_s / max(self.interval_s, 1.0))

    def _speed(self, sensitivity: Sensitivity | None, gpus: Shares, cpu_mem: JobShares) -> float:
        """Return a job's speed with its shares: the slowest node counts."""
        if sensitivity is None:
            return 1.0
        usual = throughput(sensitivity, self.usual, self.usual)
        slowest = min(
            throughput(sensitivity, per_gpu(share, each.gpu_count), fair_share(self.servers.nodes[share.node]))
            for each, share in zip(gpus, cpu_mem, strict=True)
        )
        return slowest / usual if usual > 0 else 1.0


def _mean_share(nodes: Iterable[FreeNode]) -> Demand:
    listed = [node for node in nodes if node.gpu_count]
    gpus = sum(node.gpu_count for node in listed) or 1
    return Demand(sum(node.cpu_count for node in listed) / gpus, sum(node.mem_gib for node in listed) / gpus)


def _numbers(items: Iterable[K]) -> dict[K, int]:
    return {item: number for number, item in enumerate(items)}


class SynergyOpt(Synergy):
    """CPUs and memory by an integer program: slow, with a bound.

    Source: Synergy (Mohan et al., OSDI 2022), section 4.1.
    """

    name = "synergy-opt"
    way = Way(optimal)
