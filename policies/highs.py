"""Linear and integer programs, solved by HiGHS through SciPy."""

from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, vstack

from muri.errors import MuriError
from muri.policies.speed.model import Floats, Indices

_UNLIMITED: Final = 2**31 - 1


class SolverError(MuriError):
    """A solver failed on a program that has a solution."""


class LinearSolution(NamedTuple):
    """Optimum of a linear program, and its prices: what one more of each right-hand side is worth."""

    amount: Floats
    price: Floats
    value: float


class IntegerSolution(NamedTuple):
    """A solution of an integer program, None when the branches ran out before one was found, and the proven bound."""

    amount: Indices | None
    upper_bound: float


def solve_linear(value: Floats, matrix: csr_array, right: Floats) -> LinearSolution:
    """Maximise value·x with matrix·x ≤ right and x ≥ 0.

    Raises:
        SolverError: HiGHS gave no solution.
    """
    # SciPy takes sparse matrices here; its stubs don't know.
    solved = linprog(-value, matrix, right, method="highs-ds")  # type: ignore[call-overload]
    if solved.x is None or solved.fun is None:
        raise SolverError(f"HiGHS could not solve a linear program: {solved.message}")
    return LinearSolution(solved.x, -solved.ineqlin.marginals, -float(solved.fun))


def linear_value(value: Floats, matrix: csr_array, right: Floats, most: Floats) -> float:
    """The optimum of value·x with matrix·x ≤ right and 0 ≤ x ≤ most: without prices, in a third of the time.

    Raises:
        SolverError: HiGHS gave no solution.
    """
    constraints, bounds = LinearConstraint(matrix, -np.inf, right), Bounds(0, most)
    solved = milp(-value, constraints=constraints, bounds=bounds)  # without integrality: a linear program
    if solved.fun is None:
        raise SolverError(f"HiGHS could not solve a linear program: {solved.message}")
    return -float(solved.fun)


def solve_integer(
    value: Floats,
    matrix: csr_array,
    least: Floats | float,
    most: Floats,
    *,
    gap: float,
    nodes: int | None = None,
    time_limit_s: float = np.inf,
) -> IntegerSolution:
    """Maximise value·x with least ≤ matrix·x ≤ most over whole numbers x ≥ 0.

    Args:
        value: What one of each is worth.
        matrix: The constraints.
        least: Their lower sides.
        most: Their upper sides.
        gap: Relative gap at which HiGHS may stop; 0 for the optimum.
        nodes: Branches at most, which unlike a limit in seconds is the same on every machine; None: no limit.
        time_limit_s: Seconds at most; with a limit that is reached, the solution depends on the machine.
    """
    solved = milp(
        -value,
        constraints=LinearConstraint(matrix, least, most),
        integrality=np.ones(len(value), dtype=np.intp),
        bounds=Bounds(0, np.inf),
        options={
            "mip_rel_gap": gap,
            "node_limit": _UNLIMITED if nodes is None else nodes,
            "time_limit": time_limit_s,
        },
    )
    return IntegerSolution(
        amount=None if solved.x is None else np.rint(solved.x).astype(np.intp),
        upper_bound=np.inf if solved.mip_dual_bound is None else -float(solved.mip_dual_bound),
    )


def stacked(*blocks: csr_array) -> csr_array:
    """Sparse matrices on top of each other."""
    return csr_array(vstack(blocks, format="csr"))


def row_of_ones(length: int) -> csr_array:
    """A matrix of one row that adds everything up."""
    return csr_array(np.ones((1, length)))
