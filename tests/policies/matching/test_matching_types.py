"""Matching over types equals matching of the single jobs, whatever the counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.policies.grouping import solvers
from muri.policies.grouping.certified import WeightsError
from muri.policies.grouping.solvers import match_types, match_weights


@st.composite
def typed_jobs(draw, largest=8, most=7):
    types = draw(st.integers(0, largest))
    levels = draw(st.sampled_from((1, 2, 5, 1_000_000)))
    unit = draw(st.sampled_from((1.0, 1e-6, 3e4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.integers(-levels // 4, levels + 1, (types, types)) / levels * unit
    weights[rng.random((types, types)) > draw(st.floats(0, 1))] = np.nan
    return np.triu(weights) + np.triu(weights, 1).T, rng.integers(0, most + 1, types).tolist()


def expanded(weights, counts):
    of_job = np.repeat(np.arange(len(counts)), counts)
    return weights[np.ix_(of_job, of_job)]


def weights_of(types, seed):
    half = np.triu(np.random.default_rng(seed).random((types, types)))
    return half + np.triu(half, 1).T


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
    found = match_types(weights_of(48, seed), counts.tolist())
    assert found.gap <= 1e-9
    assert (used_jobs(found.pairs, 48) <= counts).all()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_types_and_single_jobs_agree_on_hundreds_of_jobs(seed):
    weights = weights_of(20, seed)
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
