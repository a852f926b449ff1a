"""Pollux in the simulator: jobs grow into free GPUs, at the speed of their goodput, and restarts cost."""

import pytest
from engine_builders import GPU, by_id, ends, job, run

from muri.policies.traits import model_of, relative_goodput
from muri.simulator.model import Cluster, TraceJob

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
