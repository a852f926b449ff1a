"""Maximum-weight matching on a dense graph of distinct profiles, with a proof.

1. Assignment (`assignment.py`) gives potentials π: Σ π_i bounds every matching from above.
2. Its permutation falls into cycles. A cycle of two is a pair, of an even length two matchings of
   which the better is taken, of an odd length one job is left out. What is lost are the odd cycles.
3. With slack r_ij = π_i + π_j − w_ij ≥ 0 the weight of any matching is

       Σ π_i − Σ_{pairs} r_ij − Σ_{alone} π_i .

   A matching heavier than one of weight L thus has no pair with r_ij > Σ π_i − L (reduced-cost fixing).
   Few pairs pass, and they fall into many components, of which only those that lose something are
   solved with Blossom. When no pair was left out that could pass, the result is optimal, and its
   weight is the bound. Otherwise, when a component is too large, the gap is reported.

Nothing depends on time, so the same weights give the same pairs on every machine.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from muri.policies.matching.assignment import cheap_cells, slack_threshold, solve_assignment
from muri.policies.matching.blossom import rustworkx_graph, solve_rustworkx
from muri.policies.matching.result import Matching
from muri.policies.matching.weights import scaled
from muri.policies.speed.model import Floats, Indices

_BLOSSOM_LIMIT: Final = 100_000_000
"""Most nodes × edges of a component that Blossom is asked to solve: a few seconds. Any graph of
up to 580 jobs stays below it."""

_CLOSING_ROUNDS: Final = 12
"""Rounds of Blossom, each with twice the pairs of the one before."""

_TOLERANCE: Final = 1e-12
"""A loss per job that is only rounding, on weights up to 1."""


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The scaled weights and the potentials that bound their matchings."""

    weights: Floats
    potential: Floats

    @property
    def bound(self) -> float:
        return math.fsum(self.potential.tolist())

    @property
    def tolerance(self) -> float:
        return _TOLERANCE * len(self.weights)

    def gap(self, mate: Indices) -> float:
        """By how much a matching may fall short; `mate` is the job itself where it stays alone."""
        return self.bound - float(self.weights[np.arange(len(mate)), mate].sum()) / 2


def match_dense(weights: Floats) -> Matching:
    """Find a maximum-weight matching and an upper bound that proves how good it is.

    Args:
        weights: Array (n, n), symmetric; NaN or ≤ 0 where a pair may not be made. The diagonal is
            ignored.

    Returns:
        The matching. Its `upper_bound` is its weight where optimality was proven, to about twelve digits.

    Raises:
        WeightsError: The array is not square, not symmetric or holds an infinity.
    """
    scale = scaled(weights)
    if not scale.values.any():
        return Matching((), 0.0, 0.0)
    assignment = solve_assignment(scale.values)
    relaxed = _Relaxed(scale.values, assignment.potential)
    mate, bound = _close(relaxed, _split_cycles(scale.values, assignment.choice))
    first = np.flatnonzero(mate > np.arange(len(mate)))
    weight = math.fsum(scale.values[first, mate[first]].tolist()) * scale.unit
    if bound * scale.unit - weight <= relaxed.tolerance * scale.unit:
        bound = weight / scale.unit
    pairs = tuple(zip(first.tolist(), mate[first].tolist(), strict=True))
    return Matching(pairs, weight, max(weight, bound * scale.unit))


def assignment_bound(weights: Floats) -> float:
    """The proven upper bound alone, for matchings found in another way."""
    scale = scaled(weights)
    return math.fsum(solve_assignment(scale.values).potential.tolist()) * scale.unit if len(scale.values) else 0.0


def _split_cycles(weights: Floats, choice: Indices) -> Indices:
    """Make the choices mutual: the best half of every cycle."""
    jobs = np.arange(len(choice))
    mutual = choice[choice] == jobs
    mate = np.where(mutual, choice, jobs)
    seen = mutual.copy()
    for start in np.flatnonzero(~mutual).tolist():
        cycle = []
        job = start
        while not seen[job]:
            seen[job] = True
            cycle.append(job)
            job = int(choice[job])
        for one, other in _best_half(weights, cycle):
            mate[one], mate[other] = other, one
    mate[weights[jobs, mate] <= 0] = jobs[weights[jobs, mate] <= 0]
    return mate


def _best_half(weights: Floats, cycle: list[int]) -> list[tuple[int, int]]:
    """Every second step of a cycle; of an odd one the steps between the ends that leave the best."""
    size = len(cycle)
    steps = list(pairwise([*cycle, *cycle[:1]]))
    worth = np.array([weights[step] for step in steps])
    if size % 2 == 0:
        return steps[int(worth[::2].sum() < worth[1::2].sum()) :: 2]
    # Going round twice in steps of two meets every step of an odd cycle once.
    order = np.arange(0, 2 * size, 2) % size
    total = np.concatenate([[0.0], np.cumsum(np.tile(worth[order], 2))])
    start = int(np.argmax(total[size // 2 :][:size] - total[:size]))
    return [steps[order[(start + offset) % size]] for offset in range(size // 2)]


def _close(relaxed: _Relaxed, mate: Indices) -> tuple[Indices, float]:
    """Improve a matching until its gap excludes every pair not considered, or Blossom has too much to do.

    A matching with a pair beyond a threshold weighs at most Σ π_i less the threshold, all others at
    most what Blossom found: the larger of the two is the bound.
    """
    bound = relaxed.bound
    degree = 2
    for _ in range(_CLOSING_ROUNDS):
        gap = relaxed.gap(mate)
        if gap <= relaxed.tolerance:
            break
        wanted = slack_threshold(relaxed.weights, relaxed.potential, degree)
        # With so many pairs per job as there are jobs, all belong to them.
        threshold = min(gap, wanted if degree < len(mate) else math.inf) + relaxed.tolerance
        mate, complete = _improve(relaxed, mate, threshold)
        weight = relaxed.bound - relaxed.gap(mate)
        if not complete:
            break
        bound = max(weight, relaxed.bound - threshold)
        if bound <= weight:
            break
        degree *= 2
    return mate, bound


def _improve(relaxed: _Relaxed, mate: Indices, threshold: float) -> tuple[Indices, bool]:
    """The best matching among the pairs within the threshold, and whether every component was solved."""
    count = len(mate)
    jobs = np.arange(count)
    cells = cheap_cells(relaxed.weights, relaxed.potential, threshold, worthless=False)
    rows, columns = np.divmod(np.union1d(cells, jobs * count + mate), count)
    usable = rows < columns
    rows, columns = rows[usable], columns[usable]
    _, part = connected_components(coo_array((np.ones(len(rows)), (rows, columns)), shape=(count, count)), False)
    lost = np.bincount(part, relaxed.potential - relaxed.weights[jobs, mate] / 2)
    open_parts = np.flatnonzero(lost > relaxed.tolerance / 2)
    nodes, edges = np.bincount(part), np.bincount(part[rows], minlength=len(lost))
    order = np.argsort(part[rows], kind="stable")
    ends = np.cumsum(edges)
    mate, complete = mate.copy(), True
    for index in open_parts.tolist():
        if int(nodes[index]) * int(edges[index]) > _BLOSSOM_LIMIT:
            complete = False
            continue
        chosen = order[ends[index] - edges[index] : ends[index]]
        _rematch(relaxed.weights, mate, rows[chosen], columns[chosen])
    return mate, complete


def _rematch(weights: Floats, mate: Indices, rows: Indices, columns: Indices) -> None:
    """Match one component optimally, in place."""
    if not len(rows):
        return
    jobs = np.union1d(rows, columns)
    graph = rustworkx_graph(np.searchsorted(jobs, rows), np.searchsorted(jobs, columns), weights[rows, columns])
    mate[jobs] = jobs
    for first, second in solve_rustworkx(graph):
        mate[jobs[first]], mate[jobs[second]] = jobs[second], jobs[first]
