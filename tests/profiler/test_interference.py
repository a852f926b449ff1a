"""Fits, ratios, estimates and the choice of the next pair: pure parts of interference."""

from dataclasses import asdict, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_builders import A, B, C, make_profile, pair, profile

from muri.profiler.dryrun.messages import StampReader
from muri.profiler.errors import FitError
from muri.profiler.interference import (
    LEARNED,
    Interference,
    LinearFit,
    Point,
    busy_shares,
    by_pair,
    estimated_ratio,
    find,
    fit_computation,
    fit_line,
    known_pairs,
    overlap_exponent,
    put,
)
from muri.profiler.records import ProfileDetail
from muri.profiler.store import ProfileStore

positive = st.floats(1e-4, 10)


def best_interleaving(a, b):
    """ξ when the two take turns as well as can be: max(1, max_r (u_a,r + u_b,r))."""
    return max(1.0, *(one + two for one, two in zip(busy_shares(a), busy_shares(b), strict=True)))


shares = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@given(positive, positive, st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(fixed_s, per_unit_s, sizes):
    fit = fit_line(Point(size, fixed_s + per_unit_s * size) for size in sizes)
    for size in sizes:
        assert fit.seconds(size) == pytest.approx(fixed_s + per_unit_s * size, rel=1e-6)
    assert fit.r_squared == pytest.approx(1, abs=1e-6)
    assert LinearFit.from_dict(asdict(fit)) == fit


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ([], "there are none"),
        ([Point(8, 1.0), Point(8, 1.1)], "all have size 8"),
        ([Point(1, 1.0), Point(2, float("nan"))], "both must be finite"),
        ([Point(-1, 1.0), Point(2, 1.0)], "≥ 0"),
    ],
)
def test_points_that_determine_no_line_are_refused(points, text):
    with pytest.raises(FitError, match=text):
        fit_line(points)


def test_computation_is_all_of_an_iteration_but_the_network_and_leaves_estimates_out():
    profiles = [
        make_profile(batch_size=size, propagate_s=0.0, synchronize_s=0.5, iteration_s=0.6 + 0.01 * size)
        for size in (16, 32, 64)
    ]
    wrong = replace(make_profile(batch_size=128, iteration_s=99.0), source="scaled")
    unknown = make_profile(batch_size=0, iteration_s=99.0)
    fit = fit_computation([*profiles, wrong, unknown])
    assert (fit.fixed_s, fit.per_unit_s) == (pytest.approx(0.1), pytest.approx(0.01))
    with pytest.raises(FitError, match="one model"):
        fit_computation([*profiles, make_profile("gpt2", batch_size=8)])


@given(st.floats(0.001, 10), st.floats(0.001, 10), st.floats(1, 20))
def test_the_overlap_exponent_is_the_one_that_gives_the_iteration(compute_s, network_s, exponent):
    iteration_s = (compute_s**exponent + network_s**exponent) ** (1 / exponent)
    seen = make_profile(gpu_count=2, synchronize_s=max(0.0, iteration_s - compute_s), iteration_s=iteration_s)
    found = overlap_exponent(replace(seen, detail=ProfileDetail(busy_s=(0, 0, compute_s, network_s))))
    again_s = max(compute_s, network_s) if found == inf else (compute_s**found + network_s**found) ** (1 / found)
    assert found >= 1
    assert again_s == pytest.approx(iteration_s, rel=1e-6)
    assert overlap_exponent(seen) in (1.0, None)  # what goes on behind other stages is not known
    assert overlap_exponent(replace(seen, key=A)) is None


@given(shares, shares)
def test_the_estimate_is_symmetric_and_no_better_than_the_best_interleaving(first, second):
    a, b = profile(first), profile(second)
    assert estimated_ratio(a, b) == pytest.approx(estimated_ratio(b, a))
    assert best_interleaving(a, b) - 1e-9 <= max(estimated_ratio(a, b), 1.0)
    assert 1 <= estimated_ratio(a, b) <= 5


def test_the_estimate_of_plain_cases():
    gpu, storage, half = profile((0, 0, 1, 0)), profile((1, 0, 0, 0)), profile((0.5, 0, 0.5, 0))
    assert estimated_ratio(gpu, gpu) == 2
    assert estimated_ratio(gpu, storage) == 1
    assert estimated_ratio(half, half) == 1.5
    assert best_interleaving(half, half) == 1
    assert busy_shares(make_profile(load_s=0.24))[0] == 0.5  # without detail: what each stage owns


def test_a_pair_is_kept_and_found_from_both_sides(tmp_path):
    with ProfileStore(tmp_path / "profiles.db") as store:
        put(store, pair(B, A, 1.5, 1.2))
        known = known_pairs(store)
        assert known == (pair(B, A, 1.5, 1.2),)
        known = by_pair(known)
        assert find(known, B, A).a.ratio == 1.5
        assert find(known, A, B).a.ratio == 1.2
        assert find(known, A, C) is None
        put(store, pair(A, B, 1.9, 1.1))
        assert [item.a.ratio for item in known_pairs(store)] == [1.9]  # the same pair, newer


def test_a_pair_that_0_2_learned_is_still_a_learned_one():
    assert Interference.from_dict({**asdict(pair(A, B, 1.9, 1.1)), "source": "learnt"}).source == LEARNED


def test_stamps_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "iterations"
    reader = StampReader(path)
    assert reader.read() == []
    path.write_text("1.5\n2.")
    assert reader.read() == [1.5]
    path.write_text("1.5\n2.5\n3.5\n")
    assert reader.read() == [1.5, 2.5, 3.5]
