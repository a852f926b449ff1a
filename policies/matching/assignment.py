"""Linear assignment on a symmetric matrix: the relaxation that bounds every matching from above.

Let every job choose one job, itself included (worth 0), so that every job is chosen once. A
matching is such an assignment in which the choices are mutual, and counts every pair twice: half
of the best assignment is an upper bound. Duality proves it without trusting the solver: numbers
π_i ≥ 0 ("potentials") with π_i + π_j ≥ w_ij for every pair give

    Σ_{pairs} w_ij ≤ Σ_{pairs} (π_i + π_j) ≤ Σ_i π_i    for every matching,

and any vector v yields such potentials: π_i = (max_j (w_ij − v_j) + v_i) / 2, the mean of both sides
of an assignment's dual (w is symmetric).

SciPy's assignment solver gives the choices but not the dual. It is recovered from them on a few
promising pairs, then all pairs are priced, those that the dual undervalues are added, and so on
until there are none.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import linear_sum_assignment

from muri.policies.matching.weights import row_blocks
from muri.policies.speed.model import Floats, Indices

_DAMPED_ROUNDS: Final = 3
"""Rounds after which the first potentials no longer improve much."""

_FIRST_DEGREE: Final = 16
"""Candidate pairs per job to start with."""

_ADDED_DEGREE: Final = 8
"""Undervalued pairs per job that one round adds at most."""

_SAMPLE_ROWS: Final = 64
"""Rows from which the threshold for candidates is estimated."""

_ROUNDS: Final = 100
"""Most rounds of pricing. The bound holds after any of them; four or five are usual."""

_TOLERANCE: Final = 1e-13
"""Below this, on weights up to 1, there is only rounding."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment and the dual that bounds it.

    Attributes:
        choice: Whom each job chose: a permutation; itself for a job that stays alone.
        potential: π, at least 0, with π_i + π_j ≥ w_ij up to rounding.
    """

    choice: Indices
    potential: Floats


def solve_assignment(weights: Floats) -> Assignment:
    """Find a best assignment and its potentials.

    Shortest augmenting paths on the whole array take O(n³) at worst. SciPy's sparse solver would be
    faster with the same pricing around it, but does not always end when weights are tied.

    Args:
        weights: Array (n, n), symmetric, from 0 to 1, the diagonal 0.
    """
    count = len(weights)
    choice = np.asarray(linear_sum_assignment(weights, maximize=True)[1], dtype=np.intp)
    own = weights[np.arange(count), choice]
    potential = _first_potential(weights)
    if potential.sum() - own.sum() / 2 <= _TOLERANCE * count:
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
    """Feasible potentials from a few rounds of averaging what a job offers with what it could get."""
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
    """Cells (row · n + column, ascending) of the pairs that the potentials overestimate least.

    The diagonal belongs to them, so that no column is without a cell.
    """
    count = len(weights)
    # Just below the threshold: where many pairs are tied, they could be nearly all.
    below = np.nextafter(slack_threshold(weights, potential, _FIRST_DEGREE), -1.0)
    own = np.arange(count) * count
    always = np.concatenate([own + np.arange(count), _mirrored(own + choice, count)])
    return np.union1d(cheap_cells(weights, potential, float(below)), always)


def slack_threshold(weights: Floats, potential: Floats, degree: int) -> float:
    """About how large π_i + π_j − w_ij may be if each row is to have `degree` such cells.

    One threshold for all rows, estimated from evenly spread ones.
    """
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
        if (raised - side).max() <= _TOLERANCE:
            break
        side = raised
    return side


def _price(weights: Floats, own: Floats, side: Floats) -> tuple[Floats, Indices]:
    """What every row could get at best, and the cells that the dual undervalues most."""
    count = len(weights)
    best = np.empty(count)
    missed, excess = [np.empty(0, dtype=np.intp)], [np.empty(0)]
    for rows in row_blocks(count):
        value = weights[rows] - side
        best[rows] = value.max(axis=1)
        suspects = np.flatnonzero(best[rows] > own[rows] + _TOLERANCE)
        over = value[suspects] - own[rows][suspects, None]
        row, column = np.nonzero(over > _TOLERANCE)
        missed.append((suspects[row] + rows.start) * count + column)
        excess.append(over[row, column])
    cells, amounts = np.concatenate(missed), np.concatenate(excess)
    limit = _ADDED_DEGREE * count
    if len(cells) > limit:
        cells = cells[np.argpartition(-amounts, limit)[:limit]]
    return best, cells
