"""Measuring over the first iterations of a job that trains on."""

import random

import pytest

from muri.profiler.dryrun.course import ENOUGH_ITERATIONS, LiveCourse
from muri.profiler.dryrun.steadiness import LoaderAhead
from muri.profiler.records import ProfileDetail

STAGES_S = (0.1, 0.0, 0.3, 0.0)


def after(course: LiveCourse, times_s: list[float]) -> int:
    """How many iterations it took until it was over, or all of them."""
    for count, own_s in enumerate(times_s, 1):
        if course.add(own_s, STAGES_S):
            return count
    return len(times_s)


def test_steady_iterations_are_sure_as_soon_as_those_of_a_dry_run() -> None:
    course = LiveCourse()
    assert after(course, [0.5] * 5) == 5
    assert course.result() is None  # too few
    course = LiveCourse()
    assert after(course, [0.5] * 100) == 12
    found = course.result(2.5, ProfileDetail(gradient_mib=7.0))
    assert found is not None
    assert (found.stage_s, found.iteration_s, found.iterations) == (STAGES_S, 0.5, 10)
    assert (found.gpu_mem_gib, found.detail.gradient_mib, found.detail.confidence) == (2.5, 7.0, 1.0)
    assert "sure within" in found.stopped


def test_the_warm_up_counts_for_nothing() -> None:
    course = LiveCourse()
    assert after(course, [5.0, 3.0, 2.0, 1.0, 0.7, *[0.5] * 100]) < 30
    found = course.result()
    assert found is not None
    assert found.iteration_s == pytest.approx(0.5)


def test_what_never_gets_sure_is_told_at_last_with_its_confidence() -> None:
    chance, course = random.Random(1), LiveCourse()
    count = after(course, [chance.choice((0.1, 2.0)) for _ in range(500)])
    found = course.result()
    assert found is not None
    assert found.iterations == ENOUGH_ITERATIONS < count < 2 * ENOUGH_ITERATIONS
    assert found.detail.confidence is not None
    assert found.detail.confidence < 0.7


def test_short_iterations_are_measured_for_longer() -> None:
    chance, course = random.Random(1), LiveCourse()
    after(course, [chance.choice((0.001, 0.02)) for _ in range(5000)])
    found = course.result()
    assert found is not None
    assert found.iterations > ENOUGH_ITERATIONS
    assert "sure within" in found.stopped


def test_bursts_of_a_loader_are_measured_over_whole_periods() -> None:
    course = LiveCourse(LoaderAhead(depth=8, period=4))
    after(course, [0.1, 0.1, 0.1, 0.5] * 30)
    found = course.result()
    assert found is not None
    assert found.iterations % 4 == 0
    assert found.iteration_s == pytest.approx(0.2)
