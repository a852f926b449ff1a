"""Figures of simulations that were worked out by hand."""

import pytest
from engine_builders import CPU, GPU, job, run

from muri.profiler.records import RESOURCES
from muri.simulator.metrics import metrics_of, percentile_99
from muri.simulator.model import Cluster, SimulationError, SimulationResult

ONE_GPU = Cluster(1, 1)


def two_in_a_row() -> SimulationResult:
    """Job 1 runs from 0 to 100, job 2 waits from 0 to 100 and runs until 400."""
    return run([job(1, 0.0, 100.0, GPU), job(2, 0.0, 300.0, CPU)], "fifo", ONE_GPU)


def test_times_of_jobs() -> None:
    figures = metrics_of(two_in_a_row())
    assert (figures.jobs, figures.avg_jct_s, figures.median_jct_s, figures.p99_jct_s) == (2, 250.0, 250.0, 400.0)
    assert (figures.makespan_s, figures.queueing_delay_s) == (400.0, 50.0)
    assert figures.restarts == 0


def test_means_over_time() -> None:
    figures = metrics_of(two_in_a_row())
    assert figures.queue_length_mean == pytest.approx(100 / 400)
    # While job 2 waits, it has waited 50 of its 300 s on average.
    assert figures.blocking_index_mean == pytest.approx(50 / 300 * 100 / 400)
    assert figures.utilization == pytest.approx({"storage": 0.0, "cpu": 0.75, "gpu": 0.25, "network": 0.0})
    assert figures.gpus_held_share == pytest.approx(1.0)


def test_fairness_compares_with_an_equal_share_of_what_was_asked_for() -> None:
    figures = metrics_of(two_in_a_row())
    # Job 1: two GPUs asked for all the time, so 200 s would be fair, and it took 100 s. Job 2: demand was 2 for 100 s
    # and 1 for 300 s, 1.25 on average, so 375 s would be fair, and it took 400 s.
    assert figures.finish_time_fairness_max == pytest.approx(400 / 375)
    assert figures.finish_time_fairness_mean == pytest.approx((100 / 200 + 400 / 375) / 2)


def test_an_idle_cluster_is_no_fairer_than_one_that_suffices() -> None:
    figures = metrics_of(run([job(1, 0.0, 100.0, GPU)], "fifo", Cluster(1, 8)))
    assert figures.finish_time_fairness_mean == pytest.approx(1.0)


def test_breakdowns_cover_every_job_once() -> None:
    jobs = [job(1, 0.0, 100.0, GPU), job(2, 0.0, 100.0, CPU, gpu_count=2), job(3, 0.0, 300.0, CPU, gpu_count=2)]
    figures = metrics_of(run(jobs, "fifo", Cluster(1, 8)))
    assert {count: (part.jobs, part.avg_jct_s) for count, part in figures.by_gpu_count.items()} == {
        1: (1, 100.0),
        2: (2, 200.0),
    }
    assert {name: part.jobs for name, part in figures.by_bottleneck.items()} == {"cpu": 2, "gpu": 1}
    assert set(figures.by_bottleneck) <= set(RESOURCES)


def test_steady_state_counts_jobs_by_their_place_in_the_order_of_submission() -> None:
    jobs = [job(9 - index, 100.0 * index, 100.0 + index) for index in range(10)]
    result = run(jobs, "fifo", Cluster(1, 10))
    figures = metrics_of(result, 2, 5)
    assert (figures.jobs, figures.avg_jct_s) == (3, pytest.approx(103.0))
    assert figures.makespan_s == pytest.approx(400.0 + 104.0 - 200.0)
    # From the submission of job 2 to that of job 4; jobs overlap by a few seconds.
    assert figures.gpus_held_share == pytest.approx((100 + 1 + 100 + 2) / 200 / 10)


@pytest.mark.parametrize(("first", "last"), [(5, 5), (-1, 2), (0, 11), (7, 3)])
def test_a_steady_state_that_the_trace_does_not_have_is_refused(first: int, last: int) -> None:
    result = run([job(index, 0.0, 10.0) for index in range(10)], "fifo", ONE_GPU)
    with pytest.raises(SimulationError, match=r"0 ≤ FIRST < LAST ≤ 10"):
        metrics_of(result, first, last)


@pytest.mark.parametrize(("count", "index"), [(1, 0), (99, 98), (100, 99), (200, 198), (1494, 1479)])
def test_p99_is_the_value_that_the_published_figures_take(count: int, index: int) -> None:
    assert percentile_99([float(value) for value in reversed(range(count))]) == float(index)
