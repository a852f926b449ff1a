"""Linear programs that grow, and what solvers say of programs without a solution."""

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csc_array

from muri.policies.grouping import solvers
from muri.policies.grouping.solvers import LinearProgram, SolverError, linear_value, solve_integer


@pytest.mark.parametrize("seed", range(10))
def test_columns_that_join_later_give_the_same_optimum(seed):
    rng = np.random.default_rng(seed)
    value, matrix, most = rng.random(40), rng.integers(0, 3, (6, 40)).astype(float), rng.integers(2, 9, 6).astype(float)
    matrix[0] = 1.0  # no column is free
    program = LinearProgram(np.full(6, -np.inf), most)
    for part in (slice(0, 10), slice(10, 11), slice(11, 40)):
        program.add(value[part], csc_array(matrix[:, part]))
        grown = program.solve()
    at_once = linprog(-value, matrix, most)
    assert grown.value == pytest.approx(-at_once.fun)
    assert (matrix @ grown.amount <= most + 1e-9).all()
    # The prices prove it: no column is worth more than it takes, and what there is costs as much as it brings.
    assert (value <= grown.price @ matrix + 1e-9).all()
    assert grown.price @ most == pytest.approx(grown.value)


def test_a_lower_side_that_binds_has_a_negative_price():
    program = LinearProgram(np.array([2.0, -np.inf]), np.array([5.0, 3.0]))
    program.add(np.array([1.0, 4.0]), csc_array(np.array([[1.0, 0.0], [1.0, 1.0]])))
    solution = program.solve()
    assert solution.amount.tolist() == [2.0, 1.0]
    assert solution.price.tolist() == [-3.0, 4.0]


def test_a_program_without_a_solution_says_so():
    row = csc_array(np.ones((1, 1)))
    with pytest.raises(SolverError, match="Infeasible"):
        linear_value(np.ones(1), row, np.array([-1.0]), np.ones(1))
    assert solve_integer(np.ones(1), row, 0.2, np.array([0.8]), gap=0.0).amount is None


def test_a_solver_that_goes_on_and_on_is_stopped(monkeypatch):
    monkeypatch.setattr(solvers, "_ITERATIONS", 1)
    matrix = csc_array(np.vstack([np.eye(8), np.ones(8)]))
    with pytest.raises(SolverError, match="Iteration limit"):
        linear_value(np.arange(1.0, 9.0), matrix, np.full(9, 4.5), np.full(8, 9.0))


def test_solving_prints_nothing(capfd):
    solve_integer(np.ones(2), csc_array(np.array([[2.0, 3.0]])), -np.inf, np.array([7.0]), gap=0.0)
    assert capfd.readouterr() == ("", "")
