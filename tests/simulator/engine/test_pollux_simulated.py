"""Pollux in the simulator: jobs grow into free GPUs, at the speed of their goodput, and restarts cost."""

from pathlib import Path

import pytest
from engine_builders import GPU, by_id, ends, job, run

from muri.policies.traits import model_of, relative_goodput
from muri.simulator.model import Cluster, Settings, TraceJob
from muri.simulator.run import simulate
from muri.simulator.sweep.metrics import metrics_of
from muri.simulator.traces.read import read_trace

EXAMPLES = Path(__file__).parents[3] / "examples" / "traces"
FOUR = Cluster(1, 4)


def speed(item: TraceJob, gpu_count: int) -> float:
    model = model_of(item.batch, item.profile)
    assert model is not None
    return relative_goodput(model, item.gpu_count, gpu_count)


def test_a_lone_job_has_all_gpus_and_their_goodput() -> None:
    lone = job(1, 0.0, 3600.0, GPU)
    assert ends(run([lone], "pollux", FOUR)) == {1: pytest.approx(3600 / speed(lone, 4))}


def test_a_job_grows_when_another_ends_and_pays_for_the_restart() -> None:
    """Two GPUs each until the first ends; then the other restarts on four."""
    jobs = [job(1, 0.0, 1000.0, GPU), job(2, 0.0, 8000.0, GPU)]
    result = run(jobs, "pollux", FOUR, restart_s=30.0)
    first_s = 1000 / speed(jobs[0], 2)
    left_s = 8000 - first_s * speed(jobs[1], 2)
    assert ends(result) == {1: pytest.approx(first_s), 2: pytest.approx(first_s + 30 + left_s / speed(jobs[1], 4))}
    assert {number: record.restarts for number, record in by_id(result).items()} == {1: 0, 2: 1}


def test_on_a_crowded_cluster_elastic_jobs_wait_less_than_under_fifo() -> None:
    trace = read_trace(EXAMPLES / "mixed-appetites.csv")
    found = {
        policy: metrics_of(simulate(trace, policy, Cluster(4, 8), Settings(interval_s=360.0)))
        for policy in ("fifo", "pollux")
    }
    assert found["pollux"].avg_jct_s < found["fifo"].avg_jct_s
    assert found["pollux"].queueing_delay_s < found["fifo"].queueing_delay_s / 2
