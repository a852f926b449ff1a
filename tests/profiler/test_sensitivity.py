"""Bisection beside full sweeps, over generated and over published curves; the cache model beside published matrices."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.profiler.sensitivity import (
    GAIN,
    MOST_POINTS,
    Dataset,
    Measured,
    Point,
    bisect,
    combined,
    interpolated,
    matrix,
    measured_overlap,
    saturating_cache_gib,
    saturating_cpus,
    throughput,
)
from muri.profiler.sweep import Window, throughput_of


@st.composite
def curves(draw):
    """Throughput that never falls: any steps, also none, also always the same."""
    count = draw(st.integers(1, 128))
    shape = draw(st.sampled_from(("steps", "linear", "flat", "saturating")))
    if shape == "flat":
        return [10.0] * count
    if shape == "linear":
        return [float(cpus) for cpus in range(1, count + 1)]
    if shape == "saturating":
        knee = draw(st.integers(1, count))
        return [float(min(cpus, knee)) for cpus in range(1, count + 1)]
    steps = draw(st.lists(st.floats(0, 5), min_size=count, max_size=count))
    total, curve = 1.0, []
    for step in steps:
        total += step
        curve.append(total)
    return curve


class Job:
    """Answers from a curve, with scatter, and counts how often it was asked."""

    def __init__(self, curve, spread=0.0, seed=0):
        self.curve, self.spread, self.asked = curve, spread, []
        self.random = random.Random(seed)

    def __call__(self, cpus):
        self.asked.append(cpus)
        noisy = self.curve[cpus - 1] * max(0.1, self.random.gauss(1, self.spread))
        return Measured(noisy, self.spread)


def swept(curve):
    """The answer where every count is measured."""
    return saturating_cpus(Point(cpus, value) for cpus, value in enumerate(curve, 1))


@given(curves())
def test_without_noise_bisection_finds_what_a_sweep_finds(curve):
    job = Job(curve)
    few, full = bisect(job, len(curve)), swept(curve)
    assert full <= few.saturating_cpus <= full + 1  # never too few cores
    assert few.measurements == len(job.asked) <= MOST_POINTS
    if len(curve) >= 6:
        assert len(job.asked) <= len(curve) / 2
    if len(curve) >= 12 or len(curve) < 6:
        assert few.saturating_cpus == full
        assert few.undecided_cpus == 0


@given(curves(), st.floats(0.001, 0.05), st.integers(0, 1000))
def test_with_noise_it_is_off_only_where_the_noise_decides(curve, spread, seed):
    job = Job(curve, spread, seed)
    found = bisect(job, len(curve))
    true = swept(curve)
    between = range(min(found.saturating_cpus, true), max(found.saturating_cpus, true) + 1)
    threshold = curve[-1] / (1 + GAIN)
    doubtful = [cpus for cpus in between if abs(curve[cpus - 1] / threshold - 1) < 6 * spread]
    assert abs(found.saturating_cpus - true) <= 1 or len(doubtful) >= len(between) - 1
    assert len(job.asked) <= min(MOST_POINTS, max(4, len(curve) // 2))


def test_a_count_near_the_threshold_is_measured_again():
    curve = [10.0 * min(cpus, 10) / 10 for cpus in range(1, 17)]
    curve[8] = 10 / (1 + GAIN) * 1.005
    job = Job(curve, spread=0.01)
    bisect(job, 16)
    assert job.asked.count(9) == 2 or job.asked.count(16) == 2
    quiet = Job(curve)
    bisect(quiet, 16)
    assert len(quiet.asked) == len(set(quiet.asked))


def test_a_better_measurement_counts_more_and_scatter_is_seen():
    point = combined(4, [Measured(10.0, 0.001), Measured(12.0, 0.1)])
    assert point.throughput == pytest.approx(10.0, abs=0.01)
    assert point.measurements == 2
    assert combined(4, [Measured(10.0, 0.001), Measured(12.0, 0.001)]).spread > 0.05


def test_between_points_the_curve_is_straight():
    points = (Point(2, 10.0), Point(6, 30.0))
    assert [interpolated(points, cpus) for cpus in (1, 2, 4, 6, 9)] == [5.0, 10.0, 20.0, 30.0, 30.0]
    found = bisect(Job([1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]), 8)
    assert found.curve == (1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)


def test_when_measurements_run_out_the_greater_count_is_taken():
    found = bisect(Job([float(cpus) for cpus in range(1, 513)]), 512)
    # 466 of 512 would be enough; of 464 it is known that they are not.
    assert (found.measurements, found.saturating_cpus, found.undecided_cpus) == (8, 468, 3)


datasets = st.builds(Dataset, st.floats(1, 1000), st.floats(0.1, 500), st.floats(1, 5000), st.floats(0, 1))


@given(datasets, st.floats(0.01, 1000))
def test_the_least_cache_is_the_least(dataset, at_full):
    least_gib = saturating_cache_gib(dataset, at_full)
    assert 0 <= least_gib <= dataset.dataset_gib
    assert throughput(dataset, at_full, least_gib) * (1 + GAIN) >= at_full * (1 - 1e-6)
    if least_gib > 0.001 * dataset.dataset_gib:
        assert throughput(dataset, at_full, 0.99 * least_gib) * (1 + GAIN) < at_full


def test_prefetched_reading_hides_and_other_reading_adds_up():
    hidden = Dataset(100, 50, 500, overlap=1.0)
    assert [throughput(hidden, 20, gib) for gib in (0, 50, 100)] == pytest.approx([10, 20, 20])
    waited = replace(hidden, overlap=0.0)
    assert [throughput(waited, 20, gib) for gib in (0, 50, 100)] == pytest.approx([1 / 0.15, 10, 20])
    assert matrix(hidden, (5.0, 20.0), (0.0, 100.0)) == ((5.0, 5.0), (pytest.approx(10.0), 20.0))


def test_overlap_is_what_a_dry_run_saw():
    assert measured_overlap(0.15, owned_s=0.1, busy_s=0.1) == 0.0
    assert measured_overlap(0.10, owned_s=0.05, busy_s=0.1) == pytest.approx(1.0)
    assert measured_overlap(0.10, owned_s=0.0, busy_s=0.04) == pytest.approx(1.0)
    assert measured_overlap(0.125, owned_s=0.075, busy_s=0.1) == pytest.approx(0.5)
    assert measured_overlap(0.1, owned_s=0.0, busy_s=0.0) == 0.0


def ends(times_s):
    return [math.fsum(times_s[:count]) for count in range(len(times_s) + 1)]


def test_throughput_counts_the_pauses_between_bursts():
    bursts = ([0.003] * 11 + [0.127]) * 25  # twelve workers that each need 160 ms for a batch
    measured = throughput_of(ends(bursts))
    assert measured.throughput == pytest.approx(12 / 0.16)
    assert measured.spread < 0.05
    assert throughput_of(ends([0.1] * 40)).spread == pytest.approx(0, abs=1e-9)
    assert throughput_of(ends([0.1] * 20 + [0.2] * 20)).spread > 0.1


def test_a_window_begins_after_the_warm_up_and_lasts_its_time():
    window = Window(steady_s=1.0, warmup_iterations=5)
    assert window.start_index(ends([0.1] * 4)) == 5  # not there yet
    assert window.start_index(ends([0.1] * 40)) == 5
    assert window.start_index(ends([0.5] * 40)) == 2  # slow: the first second is enough
    assert [window.is_over(ends([0.1] * count)) for count in (4, 14, 16)] == [False, False, True]
    assert [window.is_over(ends([2.0] * count)) for count in (3, 4)] == [False, True]  # three of them at least
