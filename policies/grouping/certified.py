"""Maximum-weight matching on a dense graph of distinct profiles, with a proof.

1. Assignment (`solve_assignment`) gives potentials π: Σ π_i bounds every matching from above.
2. Its permutation falls into cycles. A cycle of two is a pair, of an even length two matchings of
   which the better is taken, of an odd length one job is left out. Only odd cycles lose weight.
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
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from muri.errors import MuriError
from muri.policies.speed import Floats, Indices

_BLOCK_CELLS = 1 << 18  # Cells worked on at once, so that they stay in the processor's cache (2 MiB)
_TILE = 512  # Rows and columns of the tiles by which an array is compared with its transpose


@dataclass(frozen=True, slots=True)
class Matching:
    """Disjoint pairs, and a proven upper bound on the weight of any matching.

    Pairs are (first, second) with first < second, or of types (one type, the same or a later type, number of pairs).
    """

    pairs: tuple[tuple[int, ...], ...]
    weight: float
    upper_bound: float

    @property
    def gap(self) -> float:
        """Share of the bound by which the weight may fall short of the optimum."""
        return max(0.0, 1.0 - self.weight / self.upper_bound) if self.upper_bound > 0 else 0.0


class WeightsError(MuriError):
    """An array of pair weights has a form that no matching can be computed for."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Weights between 0 and 1 that differ from the caller's by a power of two, hence without rounding.

    Attributes:
        values: Array (n, n); 0 on the diagonal and where a pair may not be made.
        unit: The value of 1 in the caller's weights.
    """

    values: Floats
    unit: float


def scaled(weights: Floats, *, diagonal: bool = False) -> Scaled:
    """Check the weights and bring them to a common scale; the diagonal is cleared unless `diagonal`.

    Raises:
        WeightsError: The array is not square, not symmetric or holds an infinity.
    """
    given = np.asarray(weights, dtype=np.float64)
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise WeightsError(f"pair weights must be a square array, one row and column per job, not {given.shape}")
    values = np.where(given > 0, given, 0.0)
    if not diagonal:
        np.fill_diagonal(values, 0.0)
    largest = float(values.max(initial=0.0))
    if math.isinf(largest):
        row, column = np.argwhere(np.isinf(values))[0]
        raise WeightsError(f"the weight of pair ({row}, {column}) is infinite; leave out a pair with NaN or 0")
    _refuse_asymmetric(values)
    exponent = math.frexp(largest)[1] if largest else 0
    np.ldexp(values, -exponent, out=values)
    return Scaled(values, math.ldexp(1.0, exponent))


def _refuse_asymmetric(values: Floats) -> None:
    for top in range(0, len(values), _TILE):
        for left in range(top, len(values), _TILE):
            upper = values[top : top + _TILE, left : left + _TILE]
            lower = values[left : left + _TILE, top : top + _TILE].T
            if not np.array_equal(upper, lower):
                row, column = np.argwhere(upper != lower)[0] + (top, left)
                raise WeightsError(
                    f"pair weights must be symmetric, but ({row}, {column}) is {values[row, column]} "
                    f"and ({column}, {row}) is {values[column, row]}"
                )


def row_blocks(count: int) -> list[slice]:
    """Ranges of rows of a (count, count) array that fit the processor's cache."""
    size = max(1, _BLOCK_CELLS // max(1, count))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


_BLOSSOM_LIMIT: Final = 100_000_000  # Most nodes × edges of a component for Blossom: a few seconds, or 580 jobs
_CLOSING_ROUNDS: Final = 12  # Rounds of Blossom, each with twice the pairs of the one before
_TOLERANCE: Final = 1e-12  # A loss per job that is only rounding, on weights up to 1
_DAMPED_ROUNDS: Final = 3  # Rounds after which the first potentials no longer improve much
_FIRST_DEGREE: Final = 16  # Candidate pairs per job to start with
_ADDED_DEGREE: Final = 8  # Undervalued pairs per job that one round adds at most
_SAMPLE_ROWS: Final = 64  # Rows from which the threshold for candidates is estimated
_ROUNDS: Final = 100  # Most rounds of pricing. The bound holds after any of them; four or five are usual.
_DUAL_TOLERANCE: Final = 1e-13  # Below this, on weights up to 1, there is only rounding
_QUANTUM_BITS: Final = 40  # Weights are compared to twelve digits: below that there is only the rounding of floats
_TIE_BITS: Final = 40  # Bits that tell pairs of equal weight apart
_SUM_BITS: Final = 20  # Room for adding up the tie-breakers of a million pairs without touching the weights


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
        """Most by which a matching may fall short; `mate` is the job itself where it stays alone."""
        return self.bound - float(self.weights[np.arange(len(mate)), mate].sum()) / 2


def match_dense(weights: Floats) -> Matching:
    """Find a maximum-weight matching and an upper bound, which is its weight where optimality was proven.

    Args:
        weights: Array (n, n), symmetric; NaN or ≤ 0 where a pair may not be made. The diagonal is ignored.

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

    A matching with a pair beyond a threshold weighs at most Σ π_i less the threshold, all others at most what Blossom
    found: the larger of the two is the bound.
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
    places = np.searchsorted(jobs, rows), np.searchsorted(jobs, columns)
    mate[jobs] = jobs
    for first, second in match_rustworkx(*places, weights[rows, columns]):
        mate[jobs[first]], mate[jobs[second]] = jobs[second], jobs[first]


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment and the dual that bounds it.

    Attributes:
        choice: The choice of each job: a permutation; itself for a job that stays alone.
        potential: π, at least 0, with π_i + π_j ≥ w_ij up to rounding.
    """

    choice: Indices
    potential: Floats


def solve_assignment(weights: Floats) -> Assignment:
    """Find a best assignment and its potentials: the relaxation that bounds every matching from above.

    Let every job choose one job, itself included (worth 0), so that every job is chosen once. A matching is such an
    assignment in which the choices are mutual, and counts every pair twice: half of the best assignment is an upper
    bound. Duality proves it without trusting the solver: numbers π_i ≥ 0 ("potentials") with π_i + π_j ≥ w_ij for every
    pair give

        Σ_{pairs} w_ij ≤ Σ_{pairs} (π_i + π_j) ≤ Σ_i π_i    for every matching,

    and any vector v yields such potentials: π_i = (max_j (w_ij − v_j) + v_i) / 2, the mean of both sides of an
    assignment's dual (w is symmetric). SciPy gives the choices but not the dual. It is recovered from them on a few
    promising pairs, then all pairs are priced, the undervalued ones are added, until none is left.

    Shortest augmenting paths on the whole array take O(n³) at worst. SciPy's sparse solver would be faster with the
    same pricing around it, but does not always end when weights are tied.

    Args:
        weights: Array (n, n), symmetric, from 0 to 1, the diagonal 0.
    """
    count = len(weights)
    choice = np.asarray(linear_sum_assignment(weights, maximize=True)[1], dtype=np.intp)
    own = weights[np.arange(count), choice]
    potential = _first_potential(weights)
    if potential.sum() - own.sum() / 2 <= _DUAL_TOLERANCE * count:
        return Assignment(choice, potential)
    cells = _first_cells(weights, potential, choice)
    for _ in range(_ROUNDS):
        side = _column_dual(weights, cells, choice, potential)
        best, missed = _price(weights, own - side[choice], side)
        potential = (best + side) / 2
        if not len(missed):
            break
        cells = np.union1d(cells, _mirrored(missed, count))
    return Assignment(choice, np.maximum(potential, 0.0))


def _mirrored(cells: Indices, count: int) -> Indices:
    return np.union1d(cells, cells % count * count + cells // count)


def _first_potential(weights: Floats) -> Floats:
    """Feasible potentials from a few rounds of averaging a job's potential with its best response."""
    potential: Floats = weights.max(axis=1, initial=0.0) / 2
    for _ in range(_DAMPED_ROUNDS):
        potential = (potential + best_response(weights, potential)) / 2
    return potential


def best_response(weights: Floats, potential: Floats) -> Floats:
    """max_j (w_ij − v_j) for every i."""
    best = np.empty(len(weights))
    for rows in row_blocks(len(weights)):
        best[rows] = (weights[rows] - potential).max(axis=1)
    return best


def _first_cells(weights: Floats, potential: Floats, choice: Indices) -> Indices:
    """Cells (row · n + column, ascending) of the pairs that the potentials overestimate least, and of the diagonal."""
    count = len(weights)
    # Just below the threshold: where many pairs are tied, they could be nearly all.
    below = np.nextafter(slack_threshold(weights, potential, _FIRST_DEGREE), -1.0)
    own = np.arange(count) * count
    always = np.concatenate([own + np.arange(count), _mirrored(own + choice, count)])
    return np.union1d(cheap_cells(weights, potential, float(below)), always)


def slack_threshold(weights: Floats, potential: Floats, degree: int) -> float:
    """About the largest π_i + π_j − w_ij if each row is to have `degree` such cells, from a sample of rows."""
    count = len(weights)
    sample = np.arange(0, count, max(1, count // _SAMPLE_ROWS))
    slack = (potential[sample, None] + potential - weights[sample]).ravel()
    wanted = min(degree * len(sample), len(slack)) - 1
    return float(np.partition(slack, wanted)[wanted])


def cheap_cells(weights: Floats, potential: Floats, threshold: float, *, worthless: bool = True) -> Indices:
    """Cells (row · n + column, ascending) with π_i + π_j − w_ij ≤ threshold, those worth 0 only if asked."""
    count = len(weights)
    found = []
    for rows in row_blocks(count):
        cheap = weights[rows] - potential >= (potential[rows] - threshold)[:, None]
        if not worthless:
            cheap &= weights[rows] > 0
        found.append(np.flatnonzero(cheap) + rows.start * count)
    return np.concatenate(found) if found else np.empty(0, dtype=np.intp)


def _column_dual(weights: Floats, cells: Indices, choice: Indices, start: Floats) -> Floats:
    """The columns' side v of the dual on the given cells, by the method of Bellman and Ford.

    With u_i = w_{i,σ(i)} − v_{σ(i)} the dual asks v_j ≥ v_{σ(i)} + w_ij − w_{i,σ(i)} for every cell. An optimal σ
    leaves no cycle to gain on, so raising v where it is too low comes to an end.
    """
    count = len(weights)
    # The set of cells is symmetric: sorted by row and read transposed, it is sorted by column.
    columns, rows = np.divmod(cells, count)
    first = np.searchsorted(columns, np.arange(count))
    chosen = choice[rows]
    gain = weights[rows, columns] - weights[rows, chosen]
    side = start
    for _ in range(count):
        raised = np.maximum(np.maximum.reduceat(side[chosen] + gain, first), side)
        if (raised - side).max() <= _DUAL_TOLERANCE:
            break
        side = raised
    return side


def _price(weights: Floats, own: Floats, side: Floats) -> tuple[Floats, Indices]:
    """The best response of every row, and the cells that the dual undervalues most."""
    count = len(weights)
    best = np.empty(count)
    missed, excess = [np.empty(0, dtype=np.intp)], [np.empty(0)]
    for rows in row_blocks(count):
        value = weights[rows] - side
        best[rows] = value.max(axis=1)
        suspects = np.flatnonzero(best[rows] > own[rows] + _DUAL_TOLERANCE)
        over = value[suspects] - own[rows][suspects, None]
        row, column = np.nonzero(over > _DUAL_TOLERANCE)
        missed.append((suspects[row] + rows.start) * count + column)
        excess.append(over[row, column])
    cells, amounts = np.concatenate(missed), np.concatenate(excess)
    limit = _ADDED_DEGREE * count
    if len(cells) > limit:
        cells = cells[np.argpartition(-amounts, limit)[:limit]]
    return best, cells


def whole_weights(first: Indices, second: Indices, weight: Floats) -> list[int]:
    """Weights, 0 to 1, as whole numbers that no other set of pairs can equal by chance.

    rustworkx and networkx get the same ones, so both choose the same pairs, on every machine. Adding a fixed
    pseudo-random number below the last digit that counts makes the optimal matching unique (the isolation lemma of
    Mulmuley, Vazirani and Vazirani).
    """
    parts = np.rint(np.ldexp(weight, _QUANTUM_BITS)).astype(np.int64).tolist()
    ties = _scrambled(first, second)
    return [(part << (_TIE_BITS + _SUM_BITS)) + tie for part, tie in zip(parts, ties, strict=True)]


def _scrambled(first: Indices, second: Indices) -> list[int]:
    """Numbers below 2^40 that depend on both indices only (the finalizer of SplitMix64)."""
    value = (first.astype(np.uint64) << np.uint64(32)) + second.astype(np.uint64) + np.uint64(1)
    value *= np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = (value ^ (value >> np.uint64(31))) >> np.uint64(64 - _TIE_BITS)
    ties: list[int] = value.tolist()
    return ties


def match_rustworkx(first: Indices, second: Indices, weight: Floats) -> list[tuple[int, int]]:
    """The maximum-weight matching by rustworkx's Blossom, sorted."""
    import rustworkx  # loaded only by a plan that needs it

    graph: rustworkx.PyGraph[None, int] = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from([None] * (1 + int(second.max(initial=-1))))
    whole = whole_weights(first, second, weight)
    graph.add_edges_from(list(zip(first.tolist(), second.tolist(), whole, strict=True)))
    pairs = rustworkx.max_weight_matching(graph, weight_fn=lambda weight: weight)
    return sorted((min(pair), max(pair)) for pair in pairs)


def match_networkx(first: Indices, second: Indices, weight: Floats) -> list[tuple[int, int]]:
    """The same by networkx."""
    import networkx  # loaded only by a plan that needs it

    graph: networkx.Graph[int] = networkx.Graph()
    whole = whole_weights(first, second, weight)
    graph.add_weighted_edges_from(zip(first.tolist(), second.tolist(), whole, strict=True))
    return sorted((min(pair), max(pair)) for pair in networkx.max_weight_matching(graph))
