"""Synergy-OPT's two linear programs: a bound on the throughput of every allocation, and a map of jobs to nodes.

Source: Synergy (Mohan et al., OSDI 2022), section 4.1; its extended version proves the bound on split jobs.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from scipy.sparse import coo_array, csc_array

from muri.policies.grouping.solvers import LinearProgram, SolverError, solve_integer
from muri.policies.speed import Floats
from muri.policies.traits import Demand

ROUNDING: Final = 1e-7  # Parts of a job that are less than this are rounding errors of the solver
_GAP: Final = 1e-4


class Choice(NamedTuple):
    """Jobs of a kind with a share."""

    kind: int  # The kind's number
    total: Demand  # CPUs and memory (GiB) of one job on all its nodes
    value: float


class Ideal(NamedTuple):
    """One machine with the CPUs and memory of all nodes, on which every job gets one of its shares."""

    choices: Sequence[Choice]  # The shares that each kind may get
    counts: Sequence[int]  # Jobs of each kind
    capacity: Demand  # CPUs and memory (GiB) of all nodes together

    def bound(self) -> float:
        """Return the greatest sum of values, with fractions: no choice on single nodes is greater.

        Source: LP (1)-(5) and theorem 4.1; jobs that are alike are counted, and `choices` leaves out shares that would
        be slower than the proportional share (5).
        """
        program = LinearProgram(self._least, self._most)
        program.add(self._values, self._matrix)
        return program.solve().value

    def allocation(self, time_limit_s: float) -> list[list[Demand]] | None:
        """What each job of each kind gets, c* and m* of equations (6) and (7); None where nothing was found in time."""
        found = solve_integer(
            self._values, self._matrix, self._least, self._most, gap=_GAP, time_limit_s=time_limit_s
        ).amount
        if found is None:
            return None
        shares: list[list[Demand]] = [[] for _ in self.counts]
        for choice, amount in zip(self.choices, found, strict=True):
            shares[choice.kind] += [choice.total] * int(amount)
        return shares

    @property
    def _values(self) -> Floats:
        return np.array([choice.value for choice in self.choices])

    @property
    def _least(self) -> Floats:
        return np.array([*self.counts, 0.0, 0.0], dtype=float)

    @property
    def _most(self) -> Floats:
        return np.array([*self.counts, *self.capacity], dtype=float) * (1 + 1e-9)

    @property
    def _matrix(self) -> csc_array:
        kinds, count = [choice.kind for choice in self.choices], len(self.choices)
        amounts = [(1.0, *choice.total) for choice in self.choices]
        rows = [row for kind in kinds for row in (kind, len(self.counts), len(self.counts) + 1)]
        columns = np.repeat(np.arange(count), 3)
        return csc_array(coo_array((np.ravel(amounts), (rows, columns)), shape=(len(self.counts) + 2, count)))


class Need(NamedTuple):
    """Resources of a job, wherever it runs."""

    gpus: int  # Its GPUs
    cpu_mem: Demand  # Its CPUs and memory (GiB), on all nodes together
    nodes: Sequence[int]  # Numbers of the nodes where it may be
    pieces: int = 1  # On how many nodes it is to be in the end

    def fits(self, room: "Room") -> bool:
        """Whether a node has enough for one of its pieces."""
        return all(
            amount <= limit * self.pieces for amount, limit in zip((self.gpus, *self.cpu_mem), room, strict=True)
        )


class Room(NamedTuple):
    """Resources of a node; infinite if not limited."""

    gpus: float
    cpus: float
    mem_gib: float


def map_to_nodes(needs: Sequence[Need], rooms: Sequence[Room]) -> Floats | None:
    """Lay jobs on nodes so that at most three times as many jobs are split as there are nodes.

    The program has a row for each job and three for each node. A corner of it has no more parts above 0 than rows, and
    every job has one, so only the 3s others can be second parts of jobs. The objective fills the first nodes first, and
    shuns nodes that are too small for a job.

    Source: Synergy (Mohan et al., OSDI 2022), section 4.1.2: at most 3s fragmented jobs on s machines.

    Returns:
        Array (jobs, nodes): the part of each job that is on each node; None where the jobs do not fit.
    """
    pairs = [(job, node) for job, need in enumerate(needs) for node in need.nodes]
    if not pairs:
        return np.zeros((len(needs), len(rooms)))
    entries: list[tuple[int, int, float]] = []
    for number, (job, node) in enumerate(pairs):
        amounts = (needs[job].gpus, *needs[job].cpu_mem)
        first = len(needs) + 3 * node
        limited = [(first + row, number, amount) for row, amount in enumerate(amounts) if rooms[node][row] < np.inf]
        entries += [(job, number, 1.0), *limited]
    row, column, amount = (np.array(part) for part in zip(*entries, strict=True))
    limits = np.array([limit for room in rooms for limit in room], dtype=float) * (1 + 1e-9)
    shape = (len(needs) + len(limits), len(pairs))
    program = LinearProgram(
        np.concatenate((np.ones(len(needs)), np.full(len(limits), -np.inf))),
        np.concatenate((np.ones(len(needs)), limits)),
    )
    penalty = [0 if needs[job].fits(rooms[node]) else len(rooms) for job, node in pairs]
    cost = [-float(needs[job].gpus * (node + 1 + more)) for (job, node), more in zip(pairs, penalty, strict=True)]
    program.add(
        np.array(cost), csc_array(coo_array((amount.astype(float), (row.astype(int), column.astype(int))), shape=shape))
    )
    try:
        parts = program.solve().amount
    except SolverError:
        return None
    laid = np.zeros((len(needs), len(rooms)))
    laid[tuple(np.array(pairs).T)] = np.where(parts > ROUNDING, parts, 0.0)
    return laid


def split_jobs(laid: Floats) -> int:
    """How many jobs are on several nodes."""
    return int(((laid > 0).sum(axis=1) > 1).sum())


def whole_gpus(part: Floats, gpus_each: Sequence[int], free: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Return the nodes of a job with whole GPUs, larger shares on nodes with more of it; None where too few have them.

    Source: section 4.1.3 leaves the rounding of "3.3 GPUs on server 1 and 2.7 on server 2" to a heuristic.
    """
    found: list[tuple[int, int]] = []
    for gpus in sorted(gpus_each, reverse=True):
        taken = {node for node, _ in found}
        fitting = [node for node in range(len(free)) if node not in taken and free[node] >= gpus]
        if not fitting:
            return None
        found.append((min(fitting, key=lambda node: (-part[node], free[node], node)), gpus))
    return tuple(sorted(found))
