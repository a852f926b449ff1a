"""Dry runs of loaders that deliver several batches at once and then make the loop wait."""

import random
from itertools import islice

import pytest

from muri.profiler.dryrun.course import Course
from muri.profiler.dryrun.messages import Limits

LOAD, _, PROPAGATE, _ = range(4)
QUICK_S = 0.003
FETCH_S = 0.1584
"""Of each worker; twelve of them deliver a batch every 13.2 ms."""

PERIODS = (2, 4, 8, 12, 16)


def bursty(period, noise=0.0, ready=0, seed=1):
    """Iteration times with so many workers: `ready` batches at once, then a wait of the rest of a fetch each period."""
    chance = random.Random(seed)
    wait_s = FETCH_S - (period - 1) * QUICK_S
    step = -ready
    while True:
        length_s = wait_s if step >= 0 and step % period == 0 else QUICK_S
        yield max(1e-4, length_s * (1 + chance.gauss(0, noise)))
        step += 1


def course_of(lengths_s, *, ahead=None, hidden=False, limits=None):
    """A dry run of such iterations; `hidden`: workers tell of each fetch when the wait for it ends."""
    course, now_s = Course(limits or Limits()), 0.0
    if ahead is not None:
        course.works_ahead(*ahead)
    for length_s in lengths_s:
        start_s, now_s = now_s, now_s + length_s
        course.hold(PROPAGATE, now_s - QUICK_S / 2, now_s, 1.0, True)
        if hidden and length_s > 10 * QUICK_S:
            end_s = now_s - QUICK_S
            course.hold(LOAD, max(0.0, end_s - FETCH_S), end_s, 1.0, False)
        if course.iteration(start_s, now_s):
            break
    return course


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("period", PERIODS)
def test_the_mean_is_that_of_whole_periods(period, noise):
    lengths_s = bursty(period, noise, ready=2 * period)
    course = course_of(lengths_s, ahead=(2 * period, period))
    result = course.result()
    assert result.iteration_s == pytest.approx(FETCH_S / period, rel=0.01 + noise)
    assert result.detail.warmup_iterations >= 2 * period
    assert result.iterations % period == 0
    assert 2 * period <= result.iterations <= course.measured <= 40
    assert result.detail.confidence > (0.9 if noise == 0 else 0.2)


@pytest.mark.parametrize("period", PERIODS)
def test_fetches_that_are_told_late_leave_whole_periods(period):
    course = course_of(bursty(period, 0.02), ahead=(2 * period, period), hidden=True)
    result = course.result()
    assert result.iteration_s == pytest.approx(FETCH_S / period, rel=0.05)
    assert result.iterations % period == 0
    assert sum(result.stage_s) <= result.iteration_s
    assert result.stage_s[LOAD] > 0.7 * result.iteration_s
    assert result.detail.iteration_cv > 0.5
    assert result.iterations >= 2 * period
    assert "recur" not in result.stopped
    assert course.measured <= 40


@pytest.mark.parametrize("period", [24, 32, 40, 64])
def test_periods_that_do_not_fit_are_trusted_less_and_said(period):
    course = course_of(bursty(period, ready=2 * period), ahead=(2 * period, period))
    result = course.result()
    assert f"recur every {period} iterations, and fewer than 2 × {period} count" in result.stopped
    assert course.measured <= 40
    assert result.detail.confidence < 0.5
    if period <= 40:
        assert result.iterations == period
        assert result.iteration_s == pytest.approx(FETCH_S / period)


@pytest.mark.parametrize(("period", "count"), [(2, 6), (4, 14), (12, 30)])
def test_a_script_that_ends_early_counts_without_what_was_ready(period, count):
    course = course_of(islice(bursty(period, ready=count - period - 1), count), ahead=(2 * period, period))
    result = course.result()
    assert result.iterations >= period
    assert result.iteration_s > 2 * QUICK_S
    assert result.detail.confidence <= 0.5


@pytest.mark.parametrize("period", [8, 12, 16])
def test_waits_of_a_loader_that_was_not_seen_count_when_they_recur(period):
    course = course_of(bursty(period, 0.02, ready=6))
    assert course.measured == 40
    assert course.result().iteration_s == pytest.approx(FETCH_S / period, rel=0.6)
    assert course.result().iteration_s > 2 * QUICK_S
