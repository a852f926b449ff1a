"""The certified solver reaches networkx's optimum and proves it, of single jobs as of types of equal ones."""

import math
from itertools import combinations

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.policies.grouping import certified, solvers
from muri.policies.grouping.certified import (
    WeightsError,
    match_networkx,
    match_rustworkx,
    scaled,
    solve_assignment,
    whole_weights,
)
from muri.policies.grouping.solvers import match_types, match_weights
from muri.policies.options import MATCHINGS, OptionsError

EXACT = ("certified", "rustworkx", "networkx")


@st.composite
def weight_arrays(draw, largest=40):
    """Symmetric arrays with missing (NaN), negative and tied entries."""
    size = draw(st.integers(0, largest))
    levels = draw(st.sampled_from((1, 2, 5, 1_000_000)))  # few levels: many ties
    density = draw(st.floats(0, 1))
    unit = draw(st.sampled_from((1.0, 1e-6, 3e4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.integers(-levels // 4, levels + 1, (size, size)) / levels * unit
    weights[rng.random((size, size)) > density] = np.nan
    return np.triu(weights) + np.triu(weights, 1).T


def oracle_weight(weights):
    graph = networkx.Graph()
    rows, columns = np.nonzero(np.triu(weights > 0, 1))
    graph.add_weighted_edges_from(zip(rows.tolist(), columns.tolist(), weights[rows, columns].tolist(), strict=True))
    return sum(graph.edges[pair]["weight"] for pair in networkx.max_weight_matching(graph))


def close_to(weight):
    return pytest.approx(weight, rel=1e-9, abs=1e-12)


def random_weights(size, seed):
    half = np.triu(np.random.default_rng(seed).random((size, size)))
    return half + np.triu(half, 1).T


@given(weight_arrays())
def test_every_method_pairs_what_it_may_and_the_exact_ones_reach_the_optimum(weights):
    before, optimum = weights.copy(), oracle_weight(weights)
    found = {method: match_weights(weights, method) for method in MATCHINGS}
    assert found["rustworkx"] == found["networkx"]
    for method, matching in found.items():
        members = [member for pair in matching.pairs for member in pair]
        assert len(members) == len(set(members))
        assert list(matching.pairs) == sorted(matching.pairs)
        assert all(first < second and weights[first, second] > 0 for first, second in matching.pairs)
        assert matching.weight == close_to(math.fsum(weights[pair] for pair in matching.pairs))
        assert matching.upper_bound >= max(matching.weight, optimum * (1 - 1e-9))
        if method in EXACT:
            assert matching.weight == matching.upper_bound == close_to(optimum)
    assert match_weights(weights.copy()) == found["certified"]
    np.testing.assert_array_equal(weights, before)


@given(weight_arrays())
def test_potentials_are_a_feasible_dual(weights):
    values = scaled(weights).values
    if not values.any():
        return
    assignment = solve_assignment(values)
    assert (assignment.potential >= 0).all()
    assert (assignment.potential[:, None] + assignment.potential - values >= -1e-12).all()
    chosen = values[np.arange(len(values)), assignment.choice].sum() / 2
    assert assignment.potential.sum() == pytest.approx(chosen, abs=1e-9)


def test_the_assignment_bound_alone_is_not_tight_on_a_triangle():
    triangle = np.ones((3, 3)) - np.eye(3)
    found = match_weights(triangle, "priority-order")
    assert (found.weight, found.upper_bound) == (1.0, 1.5)
    assert found.gap == pytest.approx(1 / 3)


def test_a_component_too_large_for_blossom_leaves_a_gap_that_is_reported(monkeypatch):
    monkeypatch.setattr(certified, "_BLOSSOM_LIMIT", 0)
    weights = np.kron(np.eye(4), np.ones((3, 3)) - np.eye(3))
    found = match_weights(weights)
    assert (found.weight, found.upper_bound) == (4.0, 6.0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_hundreds_of_jobs_agree_with_blossom(seed):
    weights = random_weights(250, seed)
    found = match_weights(weights)
    assert found.weight == found.upper_bound == close_to(match_weights(weights, "rustworkx").weight)


@pytest.mark.parametrize("size", [101, 102])
def test_every_bucket_of_equal_weights_is_paired_off(size):
    found = match_weights(np.full((size, size), 0.3))
    assert len(found.pairs) == size // 2
    assert found.weight == found.upper_bound == close_to(0.3 * (size // 2))


@pytest.mark.parametrize("method", MATCHINGS)
@pytest.mark.parametrize("size", [0, 1])
def test_nobody_to_pair_with(method, size):
    found = match_weights(np.ones((size, size)), method)
    assert (found.pairs, found.weight, found.upper_bound, found.gap) == ((), 0.0, 0.0, 0.0)


def test_priority_order_pairs_neighbors():
    weights = np.full((4, 4), np.nan)
    for (first, second), worth in {(0, 3): 1.0, (0, 1): 0.1, (2, 3): 0.1, (1, 2): 1.0}.items():
        weights[first, second] = weights[second, first] = worth
    assert match_weights(weights, "priority-order").pairs == ((0, 1), (2, 3))
    assert match_weights(weights).pairs == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 3)), r"must be a square array.*\(2, 3\)"),
        (np.ones(4), r"must be a square array.*\(4,\)"),
        (np.array([[0, 1.0], [2.0, 0]]), r"must be symmetric, but \(0, 1\) is 1\.0 and \(1, 0\) is 2\.0"),
        (np.array([[0, np.nan], [2.0, 0]]), "must be symmetric"),
        (np.array([[0, np.inf], [np.inf, 0]]), r"pair \(0, 1\) is infinite"),
    ],
)
def test_impossible_weights_are_refused(weights, message):
    for method in MATCHINGS:
        with pytest.raises(WeightsError, match=message):
            match_weights(weights, method)


def test_an_unknown_method_names_the_valid_ones():
    with pytest.raises(OptionsError, match="certified, rustworkx, networkx, priority-order"):
        match_weights(np.ones((2, 2)), "blossom")


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
    pairs = match_rustworkx(first, second, weight)
    assert pairs == match_networkx(first, second, weight)
    assert len(pairs) == 15


# Types of equal jobs


@st.composite
def typed_jobs(draw):
    weights = draw(weight_arrays(largest=8))
    return weights, draw(st.lists(st.integers(0, 7), min_size=len(weights), max_size=len(weights)))


def expanded(weights, counts):
    of_job = np.repeat(np.arange(len(counts)), counts)
    return weights[np.ix_(of_job, of_job)]


def used_jobs(pairs, types):
    used = np.zeros(types, dtype=int)
    for first, second, how_many in pairs:
        used[first] += how_many
        used[second] += how_many
    return used


@given(typed_jobs())
def test_it_equals_the_matching_of_single_jobs(problem):
    weights, counts = problem
    found = match_types(weights, counts)
    alone = match_weights(expanded(weights, counts), "rustworkx")
    assert found.weight == pytest.approx(alone.weight, rel=1e-6)
    assert found.upper_bound >= alone.weight * (1 - 1e-9)
    assert found.gap <= 1e-6
    assert (used_jobs(found.pairs, len(counts)) <= counts).all()
    assert list(found.pairs) == sorted(found.pairs)
    assert all(first <= second and how_many > 0 for first, second, how_many in found.pairs)
    assert all(weights[first, second] > 0 for first, second, _ in found.pairs)
    assert match_types(weights, counts) == found


def test_one_job_of_a_type_has_no_twin():
    assert match_types(np.array([[1.0]]), [1]).pairs == ()
    assert match_types(np.array([[1.0]]), [7]).pairs == ((0, 0, 3),)


def test_odd_counts_need_the_integer_program():
    # Three types, one job each, all pairs worth 1: the relaxation makes half of each pair.
    triangle = np.ones((3, 3)) - np.eye(3)
    found = match_types(triangle, [1, 1, 1])
    assert (found.weight, found.upper_bound) == (1.0, 1.0)


def test_a_bound_that_is_not_reached_is_reported(monkeypatch):
    triangle = np.ones((3, 3)) - np.eye(3)
    monkeypatch.setattr(solvers, "_close", lambda values, jobs, potential, amount: (amount, 1.5 * values.max()))
    assert match_types(triangle, [1, 1, 1]).gap == pytest.approx(1 / 3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
def test_many_jobs_of_many_types_are_proven_optimal(seed):
    counts = np.random.default_rng(seed).integers(0, 4_000, 48)
    found = match_types(random_weights(48, seed), counts.tolist())
    assert found.gap <= 1e-9
    assert (used_jobs(found.pairs, 48) <= counts).all()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_types_and_single_jobs_agree_on_hundreds_of_jobs(seed):
    weights = random_weights(20, seed)
    counts = np.random.default_rng(seed).integers(5, 20, 20).tolist()
    assert match_types(weights, counts).weight == pytest.approx(match_weights(expanded(weights, counts)).weight)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1], "one count for each of 2 types, not 1"),
        ([1, -1], "count of type 1 is -1"),
        ([0.5, 1], "count of type 0 is 0.5"),
        ([1, float("nan")], "count of type 1 is nan"),
    ],
)
def test_impossible_counts_are_refused(counts, message):
    with pytest.raises(WeightsError, match=message):
        match_types(np.ones((2, 2)), counts)
