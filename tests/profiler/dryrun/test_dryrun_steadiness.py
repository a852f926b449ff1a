"""When a script has warmed up, and how sure a mean is."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from muri.profiler.dryrun.steadiness import (
    HALF_WINDOW,
    LEAST_WARMUP,
    MOST_WARMUP,
    certainty,
    ordinary,
    settled_after,
    student_quantile,
    student_within,
)

times = st.lists(st.floats(1e-4, 10), min_size=1, max_size=45)


def noisy(count, mean_s=0.1, spread=0.02, seed=1):
    chance = random.Random(seed)
    return [mean_s * (1 + chance.gauss(0, spread)) for _ in range(count)]


def test_steady_from_the_start_takes_the_least_warm_up():
    assert settled_after([0.1] * (LEAST_WARMUP + 2 * HALF_WINDOW)) == LEAST_WARMUP
    assert settled_after([0.1] * (LEAST_WARMUP + 2 * HALF_WINDOW - 1)) is None


@pytest.mark.parametrize("slow", range(3, 10))
def test_slow_first_iterations_are_warm_up(slow):
    found = settled_after([1.0] * slow + noisy(25))
    assert slow <= found <= slow + 2


def test_a_script_that_never_settles_is_measured_all_the_same():
    assert settled_after([1.1**step for step in range(60)]) == MOST_WARMUP


@pytest.mark.parametrize("place", range(3, 12))
def test_one_hiccup_does_not_put_it_off_for_long(place):
    series = noisy(40)
    series[place] *= 8
    assert settled_after(series) <= place + 1


@given(times)
def test_looking_only_at_what_is_new_finds_the_same(series):
    found = None
    for count in range(1, len(series) + 1):
        found = settled_after(series[:count], known_unsettled=max(0, count - 2 * HALF_WINDOW))
        if found is not None:
            break
    assert found == settled_after(series)


def test_half_widths_hold_the_true_mean_in_19_of_20_cases():
    held = 0
    for seed in range(400):
        sure = certainty(noisy(12, spread=0.1, seed=seed))
        held += abs(sure.mean - 0.1) <= sure.half_width * sure.mean
    assert 0.91 <= held / 400 <= 1.0


def test_what_holds_up_neighbors_counts_less():
    calm, busy = [0.1, 0.101, 0.099, 0.1] * 4, [0.13, 0.131, 0.129, 0.13] * 4
    alternating = [value for pair in zip(calm, busy, strict=True) for value in pair]
    assert certainty(calm + busy).half_width > 2 * certainty(alternating).half_width


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 9, 17, 38, 401, 1000])
def test_student_as_scipy_has_it(freedom):
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-4)
    for limit in (0.0, 0.5, 1.0, 2.0, 4.0):
        exact = stats.t.cdf(limit, freedom) - stats.t.cdf(-limit, freedom)
        assert student_within(limit, freedom) == pytest.approx(exact, abs=1e-9)


def test_few_outliers_are_left_out_and_many_are_not():
    few, many = noisy(20), noisy(20)
    few[7] = 1.0
    many[7] = many[3] = many[15] = 1.0
    assert [place for place, kept in enumerate(ordinary(few)) if not kept] == [7]
    assert all(ordinary(many))
    assert all(ordinary([0.1] * 4))
