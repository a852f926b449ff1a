"""When live stage times say that a profile no longer holds."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_builders import make_profile

from muri.profiler.drift import (
    LEAST_ITERATIONS,
    LEAST_OBSERVATIONS,
    DriftRule,
    find_drift,
    is_due,
    measured_by_jobs,
)
from muri.profiler.records import ProfileDetail
from muri.profiler.store import Observation

MEASURED = datetime(2026, 3, 1, 12, tzinfo=UTC)
PROFILE = make_profile(load_s=0.1, preprocess_s=0.05, propagate_s=0.3, synchronize_s=0.001, iteration_s=0.451)
RULE = DriftRule(limit=0.2, after_s=600.0)


def observed(stage_s, *, count=7, every_s=100.0, job_id=1, per_observation=50, begin_s=10.0):
    return [
        Observation(
            (MEASURED + timedelta(seconds=begin_s + number * every_s)).isoformat(),
            job_id,
            (number + 1) * per_observation,
            tuple(stage_s),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("stage_s", "stage", "drifted", "right"),
    [
        ((0.1, 0.05, 0.3, 0.001), "load", False, True),
        ((0.1, 0.05, 0.37, 0.001), "propagate", True, False),
        ((0.1, 0.05, 0.23, 0.001), "propagate", True, False),  # faster is drift as well
        ((0.115, 0.05, 0.3, 0.001), "load", False, False),  # between half the limit and the limit
        ((0.1, 0.05, 0.3, 0.008), "synchronize", False, False),  # eight times as long, of a stage that hardly counts
        ((0.1, 0.05, 0.3, 0.05), "synchronize", True, False),
    ],
)
def test_the_stage_that_differs_most_decides(stage_s, stage, drifted, right):
    drift = find_drift(PROFILE, observed(stage_s), RULE)
    assert (drift.what, drift.drifted, drift.right) == (stage, drifted, right)


def test_jobs_measure_what_a_stage_owns_and_the_iteration():
    detail = ProfileDetail(busy_s=(0.2, 0.05, 0.3, 0.0), stage_cv=(0.1,) * 4, confidence=0.02, cpu_cores=1.5)
    unsure = replace(PROFILE, iteration_s=0.501, detail=detail)
    found = measured_by_jobs(unsure, observed((0.4, 0.05, 0.3, 0.002)), RULE)
    assert found.stage_s == pytest.approx((0.2, 0.05, 0.3, 0.002))  # half of the reading is hidden, as it was before
    assert found.iteration_s == pytest.approx(0.552 + 0.05)
    assert (found.source, found.iterations, found.detail.cpu_cores) == ("run", 300, 1.5)
    assert (found.detail.busy_s, found.detail.confidence) == ((0.4, 0.05, 0.3, 0.002), None)
    assert measured_by_jobs(unsure, observed((0.4, 0.05, 0.3, 0.002), count=2), RULE) is None


@pytest.mark.parametrize(
    "observations",
    [
        [],
        observed((0.2, 0.05, 0.3, 0.0), count=6),  # 500 s, not 600
        observed((0.2, 0.05, 0.3, 0.0), count=LEAST_OBSERVATIONS - 1, every_s=700),
        observed((0.2, 0.05, 0.3, 0.0), per_observation=1),  # too few iterations
        observed((0.2, 0.05, 0.3, 0.0), begin_s=-10_000),  # before the measurement
        observed((0.2, 0.05, 0.3)),  # not four stages
    ],
)
def test_too_little_is_no_judgement(observations):
    assert find_drift(PROFILE, observations, RULE) is None


def test_a_slow_model_is_watched_for_as_long_as_it_takes():
    slow = observed((0.2, 0.05, 0.3, 0.001), count=30, per_observation=2)  # 12 iterations in the shortest window
    assert find_drift(PROFILE, slow[:25], RULE) is None
    assert find_drift(PROFILE, slow, RULE).iterations == LEAST_ITERATIONS


def test_a_burst_is_no_drift():
    calm, burst = (0.1, 0.05, 0.3, 0.001), (0.9, 0.05, 0.3, 0.001)
    times = observed(calm, count=9)
    spikes = [Observation(item.observed_at, item.job_id, item.iterations, burst) for item in times[6:]]
    assert not find_drift(PROFILE, times[:6] + spikes, RULE).drifted


def test_only_the_newest_window_counts():
    old = observed((0.9, 0.05, 0.3, 0.001), count=10)
    new = observed((0.1, 0.05, 0.3, 0.001), count=7, begin_s=10_000)
    assert find_drift(PROFILE, old + new, RULE).right


def test_hidden_use_is_compared_with_hidden_use():
    """Owned times are shorter than used ones where stages overlap; live figures are of use."""
    overlapping = make_profile(
        load_s=0.01, preprocess_s=0.01, propagate_s=0.3, synchronize_s=0.0, iteration_s=0.32,
        detail=ProfileDetail(busy_s=(0.2, 0.1, 0.3, 0.0)),
    )  # fmt: skip
    assert find_drift(overlapping, observed((0.2, 0.1, 0.3, 0.0)), RULE).right
    assert find_drift(overlapping, observed((0.01, 0.01, 0.3, 0.0)), RULE).drifted


def test_iterations_are_counted_within_each_job():
    jobs = [*observed((0.2, 0.05, 0.3, 0.0), job_id=1), *observed((0.2, 0.05, 0.3, 0.0), job_id=2)]
    assert find_drift(PROFILE, jobs, RULE).iterations == 2 * 6 * 50


@given(st.lists(st.tuples(*[st.floats(0, 10)] * 4), min_size=7, max_size=7), st.randoms())
def test_the_order_of_observations_does_not_matter_and_a_verdict_is_one(times, chance):
    found = [
        Observation(item.observed_at, 1, item.iterations, stage_s)
        for item, stage_s in zip(observed((0, 0, 0, 0)), times, strict=True)
    ]
    drift = find_drift(PROFILE, found, RULE)
    shuffled = list(found)
    chance.shuffle(shuffled)
    assert find_drift(PROFILE, shuffled, RULE) == drift
    assert not (drift.drifted and drift.right)
    assert drift.iterations >= LEAST_ITERATIONS


def test_a_job_is_observed_ten_times_in_a_window():
    at = (MEASURED + timedelta(seconds=1000)).isoformat()
    recent = Observation((MEASURED + timedelta(seconds=950)).isoformat(), 1, 5, (0, 0, 0, 0))
    older = Observation((MEASURED + timedelta(seconds=940)).isoformat(), 1, 5, (0, 0, 0, 0))
    assert not is_due([recent], 1, at, RULE)
    assert is_due([older], 1, at, RULE)
    assert is_due([recent], 2, at, RULE)


@pytest.mark.parametrize(
    ("held_gib", "what", "drifted", "right"),
    [
        ([9.0] * 7, "load", False, True),  # the context's part
        ([10.2] * 7, "GPU memory", False, False),
        ([11.0] * 7, "GPU memory", True, False),
        ([2.0] * 7, "load", False, True),  # less than the peak says nothing
        ([None] * 5 + [20.0] * 2, "load", False, True),
        ([1.0] * 4 + [30.0] * 3, "load", False, True),
    ],
)
def test_gpu_memory_that_grows_past_the_profile_is_drift(held_gib, what, drifted, right):
    profile = replace(PROFILE, gpu_mem_gib=8.0)
    seen = [
        replace(each, gpu_mem_gib=gib) for each, gib in zip(observed((0.1, 0.05, 0.3, 0.001)), held_gib, strict=True)
    ]
    found = find_drift(profile, seen, RULE)
    assert (found.what, found.drifted, found.right) == (what, drifted, right)
    if drifted:
        assert str(found) == "GPU memory was 11.0 GiB instead of 8.0 GiB over 300 iterations"
