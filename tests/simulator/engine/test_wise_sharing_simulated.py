"""SJF-BSBF in a simulation: what happens is what the plan was made for."""

import pytest
from engine_builders import ends, job, run

from muri.policies.traits import BatchModel, PairSpeed
from muri.simulator.model import Cluster

TWO_THIRDS = (PairSpeed("a", "a", 2 / 3, 2 / 3), PairSpeed("a", "b", 0.25, 0.25))
ONE_GPU = Cluster(1, 1, gpu_mem_gib=16.0)


def test_a_pair_ends_when_theorem_1_says():
    """At 10 s the first still needs 90 s, and the second, which comes then, 50: it ends at 85, the first at 125 s."""
    result = run([job(1, 0, 100.0, name="a"), job(2, 10, 50.0, name="a")], "sjf-bsbf", ONE_GPU, interference=TWO_THIRDS)
    assert ends(result) == pytest.approx({1: 125.0, 2: 85.0})


def test_a_pair_that_slows_down_too_much_runs_one_after_the_other():
    jobs = [job(1, 0, 100.0, name="a"), job(2, 10, 50.0, name="b")]
    assert ends(run(jobs, "sjf-bsbf", ONE_GPU, interference=TWO_THIRDS)) == {1: 100.0, 2: 150.0}
    # At a quarter of its speed job 2 ends at 210 s, by when job 1 has done 10 + 50 s of its work.
    assert ends(run(jobs, "sjf-ffs", ONE_GPU, interference=TWO_THIRDS)) == pytest.approx({1: 250.0, 2: 210.0})


def test_a_batch_is_divided_to_fit_and_costs_what_its_model_says():
    """12 of 16 GiB are held. Whole, the second needs 8, in two steps 4: an iteration then takes 1.2 s instead of 1."""
    batch = BatchModel(8, 0.2, 0.1, mem_gib_per_sample=1.0, max_accumulate_steps=4)
    jobs = [job(1, 0, 1000.0, name="a", gpu_mem_gib=12.0), job(2, 10, 50.0, name="a", gpu_mem_gib=8.0, batch=batch)]
    found = ends(run(jobs, "sjf-bsbf", ONE_GPU, interference=TWO_THIRDS))
    assert found[2] == pytest.approx(10 + 50 * 1.2 * 1.5)
    assert found[1] == pytest.approx(1000 + 50 * 1.2 * 1.5 / 3)
