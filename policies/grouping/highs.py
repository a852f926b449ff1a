"""Linear and integer programs, solved by HiGHS.

SciPy's HiGHS solves every program from its beginning; for column generation, here it continues from the last optimum.
"""

from typing import Final, NamedTuple

import highspy
import numpy as np
from scipy.sparse import csc_array

from muri.errors import MuriError
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
