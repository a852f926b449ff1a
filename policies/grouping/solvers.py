"""Solvers: linear and integer programs by HiGHS, and matchings of units that all differ or of kinds that are alike.

SciPy's HiGHS solves every program from its beginning; for column generation, here it continues from the last optimum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from muri.errors import MuriError
from muri.policies.grouping.certified import (
    Matching,
    WeightsError,
    match_dense,
    match_networkx,
    match_rustworkx,
    scaled,
    solve_assignment,
)
from muri.policies.options import MATCHINGS, OptionsError
from muri.policies.speed import Floats, Indices

_UNLIMITED: Final = 2**31 - 1
# Simplex iterations of a linear program at most, far more than any needs: a solver that cycles would hold the
# controller for ever. Unlike a limit in seconds it is the same on every machine.
_ITERATIONS: Final = 1_000_000


class SolverError(MuriError):
    """A solver failed on a program that has a solution."""


class LinearSolution(NamedTuple):
    """Optimum of a linear program, and the price of each row: positive where its upper side binds, else negative."""

    amount: Floats
    price: Floats
    value: float


class IntegerSolution(NamedTuple):
    """A solution of an integer program, None when the branches ran out before one was found, and the proven bound."""

    amount: Indices | None
    upper_bound: float


class LinearProgram:
    """Maximize value·x with least ≤ matrix·x ≤ most and x ≥ 0, where columns may join after it was solved."""

    def __init__(self, least: Floats, most: Floats) -> None:
        self._highs = _program(least, most)
        # Presolve would forget the optimum that there is, and costs more than it saves on programs so small.
        self._highs.setOptionValue("presolve", "off")
        self._highs.setOptionValue("simplex_iteration_limit", _ITERATIONS)

    def add(self, value: Floats, matrix: csc_array, most: Floats | float = np.inf) -> None:
        """Add columns: array (n,) of values, array (rows, n), and upper limits of their amounts."""
        _add(self._highs, value, matrix, most)

    def solve(self) -> LinearSolution:
        """The optimum over the present columns.

        Raises:
            SolverError: HiGHS gave no solution.
        """
        self._highs.run()
        status = self._highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise SolverError(f"HiGHS could not solve a linear program: {self._highs.modelStatusToString(status)}")
        solution = self._highs.getSolution()
        value = float(self._highs.getInfo().objective_function_value)
        return LinearSolution(np.array(solution.col_value), np.array(solution.row_dual), value)


def linear_value(value: Floats, matrix: csc_array, right: Floats, most: Floats) -> float:
    """The optimum of value·x with matrix·x ≤ right and 0 ≤ x ≤ most.

    Raises:
        SolverError: HiGHS gave no solution.
    """
    program = LinearProgram(np.full(len(right), -np.inf), right)
    program.add(value, matrix, most)
    return program.solve().value


def solve_integer(
    value: Floats,
    matrix: csc_array,
    least: Floats | float,
    most: Floats,
    *,
    gap: float,
    nodes: int | None = None,
    time_limit_s: float = np.inf,
) -> IntegerSolution:
    """Maximize value·x with least ≤ matrix·x ≤ most over whole numbers x ≥ 0.

    Args:
        value: Value of one of each column.
        matrix: The constraints.
        least: Their lower sides.
        most: Their upper sides.
        gap: Relative gap at which HiGHS may stop; 0 for the optimum.
        nodes: Most branches, which unlike a limit in seconds is the same on every machine; None: no limit.
        time_limit_s: Limit in seconds; where it is reached, the solution depends on the machine.
    """
    highs = _program(np.broadcast_to(least, most.shape), most)
    _add(highs, value, matrix, np.inf)
    columns = np.arange(len(value), dtype=np.int32)
    highs.changeColsIntegrality(len(value), columns, np.full(len(value), highspy.HighsVarType.kInteger))
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("mip_max_nodes", _UNLIMITED if nodes is None else nodes)
    highs.setOptionValue("time_limit", time_limit_s)
    highs.run()
    info, solution = highs.getInfo(), highs.getSolution()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return IntegerSolution(
        amount=np.rint(solution.col_value).astype(np.intp) if found else None, upper_bound=float(info.mip_dual_bound)
    )


def _program(least: Floats, most: Floats) -> highspy.Highs:
    """A program to be maximized, with rows and no columns."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy annotates all but this
    highs.setOptionValue("output_flag", False)
    # More threads wait for each other on programs so small, and a controller must not start any.
    highs.setOptionValue("threads", 1)
    highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
    nothing = np.zeros(0, dtype=np.int32)
    highs.addRows(len(most), least, most, 0, np.zeros(len(most), dtype=np.int32), nothing, np.zeros(0))
    return highs


def _add(highs: highspy.Highs, value: Floats, matrix: csc_array, most: Floats | float) -> None:
    count = len(value)
    highs.addCols(
        count,
        value,
        np.zeros(count),
        np.broadcast_to(most, count),
        matrix.nnz,
        matrix.indptr[:-1].astype(np.int32),
        matrix.indices.astype(np.int32),
        matrix.data,
    )


Counts = NDArray[np.int64]
_FIRST_DEGREE: Final = 8  # Pairs of types, per type, that the relaxation starts with
_PRICED: Final = 1e-9  # Undervaluation, on weights up to 1, below which a pair of types is not added
_CLOSED: Final = 1e-11  # Gap per job, on weights up to 1, that is only rounding
_NODE_LIMIT: Final = 50  # Most nodes of the branch and bound tree; the gap is reported when they don't suffice


def match_weights(weights: Floats, method: str = "certified") -> Matching:
    """Choose pairs without a common member, with the largest sum of weights.

    Args:
        weights: Array (n, n), symmetric, by priority; NaN or ≤ 0 where a pair may not be made. The diagonal is ignored.
        method: One of `MATCHINGS`: "certified" (fast, with a proven bound), "rustworkx" or "networkx" (Blossom on the
            whole graph; both choose the same pairs) or "priority-order" (neighbors in the queue).

    Raises:
        OptionsError: The method is not known.
        WeightsError: The array is not square, not symmetric or holds an infinity.
    """
    if method not in MATCHINGS:
        raise OptionsError(f"matching is {method!r}; valid are: {', '.join(MATCHINGS)}")
    if method == "certified":
        return match_dense(weights)
    scale = scaled(weights)
    if method == "priority-order":
        pairs = _in_order(scale.values)
        bound = math.fsum(solve_assignment(scale.values).potential.tolist()) * scale.unit
    else:
        blossom = match_rustworkx if method == "rustworkx" else match_networkx
        first, second = np.nonzero(np.triu(scale.values > 0, 1))
        pairs, bound = blossom(first, second, scale.values[first, second]) if len(first) else [], 0.0
    total = math.fsum(float(scale.values[pair]) for pair in pairs) * scale.unit
    return Matching(tuple(pairs), total, max(total, bound))


def _in_order(values: Floats) -> list[tuple[int, int]]:
    """The most urgent takes the next most urgent that it may be merged with."""
    free = np.ones(len(values), dtype=bool)
    pairs = []
    for job, row in enumerate(values):
        free_job, free[job] = free[job], False
        partners = np.flatnonzero(free & (row > 0)) if free_job else np.empty(0, dtype=np.intp)
        if len(partners):
            free[partners[0]] = False
            pairs.append((job, int(partners[0])))
    return pairs


def match_types(weights: Floats, counts: Sequence[int]) -> Matching:
    """Find a maximum-weight b-matching and an upper bound that proves how good it is.

    Jobs of one type are interchangeable, so only the number x_st of pairs between types s and t counts:

        maximize Σ w_st x_st   with   Σ_{t≠s} x_st + 2 x_ss ≤ n_s for every type s,   x whole.

    1. The linear relaxation, by column generation: solved on promising pairs of types, all others are priced with its
    dual π, the undervalued ones added until there are none. Σ n_s π_s bounds every whole solution. Basic solutions are
    half-integral, so rounding down loses at most half a pair each.
    2. The rest after rounding, with one pair given back for each pair of types used, is a matching of few single jobs:
    solved as such (`match_dense`). Mostly this reaches the bound.
    3. If not, a better solution can only use pairs with π_s + π_t − w_st at most the gap. HiGHS solves the integer
    program on these; its dual bound replaces the linear one.

    The size depends on the number of types only; with thousands of types, `match_weights` is the right tool.

    Args:
        weights: Array (K, K), symmetric; NaN or ≤ 0 where two types may not be paired. The diagonal is for two jobs of
            the same type.
        counts: Number of jobs of each type.

    Raises:
        WeightsError: The array or the counts have an impossible form.
    """
    scale = scaled(weights, diagonal=True)
    jobs = _checked_counts(counts, len(scale.values))
    values = np.where(np.minimum.outer(jobs, jobs) > 0, scale.values, 0.0)
    np.fill_diagonal(values, np.where(jobs > 1, values.diagonal(), 0.0))
    if not values.any():
        return Matching((), 0.0, 0.0)
    relaxation = _relax(values, jobs)
    amount = _round(values, jobs, relaxation)
    bound = math.fsum((jobs * relaxation.potential).tolist())
    if bound - _weight(values, amount) > _CLOSED * jobs.sum():
        amount, bound = _close(values, jobs, relaxation.potential, amount)
    weight = _weight(values, amount) * scale.unit
    first, second = np.nonzero(amount)
    pairs = zip(first.tolist(), second.tolist(), amount[first, second].tolist(), strict=True)
    return Matching(tuple(pairs), weight, max(weight, bound * scale.unit))


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """The linear program's solution on columns (first[i], second[i]), and its dual."""

    first: Indices
    second: Indices
    amount: Floats
    potential: Floats


def _checked_counts(counts: Sequence[int], types: int) -> Counts:
    given = np.asarray(counts, dtype=np.float64)
    if given.shape != (types,):
        raise WeightsError(f"there must be one count for each of {types} types, not {len(counts)}")
    bad = np.flatnonzero(~((given >= 0) & (given == np.floor(given)) & np.isfinite(given)))
    if len(bad):
        raise WeightsError(f"the count of type {bad[0]} is {counts[bad[0]]}; it must be a whole number ≥ 0")
    return given.astype(np.int64)


def _weight(values: Floats, amount: Counts) -> float:
    """Weight of an upper triangle of pair counts."""
    used = np.nonzero(amount)
    return math.fsum((values[used] * amount[used]).tolist())


def _incidence(first: Indices, second: Indices, types: int) -> csc_array:
    """Array (types, pairs of types): number of jobs of the type in a pair."""
    column = np.arange(len(first))
    cells = (np.concatenate([first, second]), np.concatenate([column, column]))
    return csc_array((np.ones(2 * len(first)), cells), shape=(types, len(first)))


def _relax(values: Floats, jobs: Counts) -> _Relaxation:
    """Solve the linear relaxation by column generation."""
    types = len(values)
    upper = np.triu(values > 0)
    start = values.max(axis=1) / 2
    slack = np.where(values > 0, start[:, None] + start - values, np.inf)
    degree = min(_FIRST_DEGREE, types) - 1
    near = slack <= np.partition(slack, degree, axis=1)[:, degree, None]
    active = (near | near.T) & upper
    program = LinearProgram(np.full(types, -np.inf), jobs.astype(np.float64))
    first, second = new_first, new_second = np.nonzero(active)
    while True:
        program.add(values[new_first, new_second], _incidence(new_first, new_second, types))
        solution = program.solve()
        potential = np.maximum(solution.price, 0.0)
        missing = np.where(upper, values - potential[:, None] - potential, 0.0)
        added = (missing > _PRICED) & ~active
        if not added.any():
            missing = np.maximum(missing, missing.T)
            # Half of the largest violation on either side makes the dual feasible beyond doubt.
            potential = potential + np.maximum(missing.max(axis=1), 0.0) / 2
            return _Relaxation(first, second, solution.amount, potential)
        active |= added
        new_first, new_second = np.nonzero(added)
        first, second = np.concatenate([first, new_first]), np.concatenate([second, new_second])


def _round(values: Floats, jobs: Counts, relaxation: _Relaxation) -> Counts:
    """Whole numbers near the relaxation: an upper triangle of pair counts."""
    types = len(values)
    first, second = relaxation.first, relaxation.second
    whole = np.floor(relaxation.amount + 1e-6).astype(np.int64)
    given_back = np.minimum(whole, 1)
    amount = np.zeros((types, types), dtype=np.int64)
    amount[first, second] = whole - given_back
    left = jobs - amount.sum(axis=0) - amount.sum(axis=1)
    # Jobs that the relaxation leaves alone stay so: of each type only the number that it would pair, and one more.
    wanted = np.ceil(_incidence(first, second, types) @ (relaxation.amount - amount[first, second]) - 1e-6)
    single = np.repeat(np.arange(types), np.minimum(left, np.maximum(wanted, 0).astype(np.int64) + 1))
    for one, other in match_dense(values[np.ix_(single, single)]).pairs:
        amount[single[one], single[other]] += 1
    return amount


def _close(values: Floats, jobs: Counts, potential: Floats, amount: Counts) -> tuple[Counts, float]:
    """An integer program on the pairs that a better solution could use: the better amounts, and a bound."""
    weight = _weight(values, amount)
    bound = math.fsum((jobs * potential).tolist())
    slack = potential[:, None] + potential - values
    first, second = np.nonzero(np.triu((values > 0) & (slack <= bound - weight + _PRICED)))
    incidence = _incidence(first, second, len(values))
    solution = solve_integer(
        values[first, second], incidence, -np.inf, jobs.astype(np.float64), gap=0.0, nodes=_NODE_LIMIT
    )
    bound = min(bound, max(weight, solution.upper_bound))
    if solution.amount is None:
        return amount, bound
    found = np.zeros_like(amount)
    found[first, second] = solution.amount
    fits = bool((found.sum(axis=0) + found.sum(axis=1) <= jobs).all())
    return (found if fits and _weight(values, found) > weight else amount), bound
