"""Whole-number weights of Blossom: ties have one optimum, real differences count first."""

from itertools import combinations

import numpy as np

from muri.policies.matching.certified import (
    networkx_graph,
    rustworkx_graph,
    solve_networkx,
    solve_rustworkx,
    whole_weights,
)


def all_pairs(size):
    first, second = zip(*combinations(range(size), 2), strict=True)
    return np.array(first), np.array(second)


def test_equal_weights_have_one_optimum():
    first, second = all_pairs(40)
    assert len(set(whole_weights(first, second, np.full(len(first), 0.5)))) == len(first)


def test_tie_breakers_never_outweigh_a_real_difference():
    first, second = all_pairs(100)
    low = whole_weights(first, second, np.full(len(first), 0.5))
    high = whole_weights(first, second, np.full(len(first), 0.5 + 1e-12))
    # Half a million of the largest tie-breakers weigh less than one step of the twelfth digit.
    assert min(high) - max(low) > 500_000 * (1 << 40)


def test_weights_that_differ_by_rounding_only_are_equal():
    first, second = np.array([0]), np.array([1])
    rounded = whole_weights(first, second, np.array([0.1 + 0.2]))
    assert rounded == whole_weights(first, second, np.array([0.3]))


def test_both_solvers_break_ties_alike():
    first, second = all_pairs(30)
    weight = np.full(len(first), 0.25)
    pairs = solve_rustworkx(rustworkx_graph(first, second, weight))
    assert pairs == solve_networkx(networkx_graph(first, second, weight))
    assert len(pairs) == 15
