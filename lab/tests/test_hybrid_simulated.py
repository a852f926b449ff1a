"""`muri-hybrid` simulated: what its decisions come to, and conservation with CPUs, memory and measured pairs."""

import pytest
from engine_builders import CPU, GPU, STORAGE, by_id, ends, job, run, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from muri.policies.traits import PairSpeed
from muri.simulator.model import Cluster, TraceJob

PAIRS = (PairSpeed("a", "b", 0.7, 0.8),)


def test_a_group_shares_plainly_where_that_was_measured_to_be_faster() -> None:
    jobs = [job(1, 0.0, 700.0, GPU, name="a"), job(2, 0.0, 800.0, GPU, name="b")]
    hybrid = run(jobs, "muri-hybrid", Cluster(1, 1), interference=PAIRS, interval_s=0.0)
    assert ends(hybrid) == pytest.approx({1: 1000.0, 2: 1000.0})
    # Both need the GPU all the time, so turns gain nothing and one runs after the other.
    jct = run(jobs, "muri-jct", Cluster(1, 1), interference=PAIRS, interval_s=0.0)
    assert ends(jct) == pytest.approx({1: 700.0, 2: 1500.0})


def test_cpus_that_one_job_needs_not_make_the_other_faster() -> None:
    jobs = [job(1, 0.0, 1200.0, CPU, name="a"), job(2, 0.0, 1200.0, GPU, name="b")]
    cluster = Cluster(1, 2, cpus_per_node=8)
    result = run(jobs, "muri-hybrid", cluster, interval_s=0.0)
    # Of 4 CPUs each the second keeps one, and the first is 7/4 as fast. Nothing is restarted when the second ends.
    assert by_id(result)[1].run_s == pytest.approx(1200 * 4 / 7)
    assert by_id(result)[2].run_s == pytest.approx(1200.0)
    assert all(record.restarts == 0 for record in result.records)


def test_a_group_s_cpus_stay_with_whoever_is_left() -> None:
    jobs = [
        job(1, 0.0, 100.0, GPU, name="a", user="alice"),
        job(2, 0.0, 900.0, STORAGE, name="b", user="alice"),
        job(3, 0.0, 900.0, CPU, name="c", user="bob"),
    ]
    cluster = Cluster(1, 2, cpus_per_node=8)
    result = run(jobs, "muri-hybrid", cluster, interval_s=0.0, restart_s=30.0, any_user=False)
    assert by_id(result)[1].shared_s == 100.0  # beside job 2
    assert by_id(result)[2].restarts == 0


@settings(max_examples=25)
@given(
    traces(most=10),
    st.sampled_from([0.0, 60.0]),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
    st.sampled_from([(8.0, 0.0), (6.0, 64.0)]),
)
def test_nothing_is_given_out_twice_whatever_comes(
    jobs: list[TraceJob], interval_s: float, noise: float, durations_known: bool, host: tuple[float, float]
) -> None:
    cluster = Cluster(2, 4, gpu_mem_gib=40.0, cpus_per_node=host[0], mem_gib_per_node=host[1])
    how = {"interval_s": interval_s, "profile_noise": noise, "durations_known": durations_known}
    pairs = (PairSpeed("model-0", "model-1", 0.95, 0.95), PairSpeed("model-2", "model-2", 0.8, 0.8))
    result = run(jobs, "muri-hybrid", cluster, interference=pairs, **how)
    assert len(result.records) == len(jobs)
    assert ends(run(jobs, "muri-hybrid", cluster, interference=pairs, **how)) == ends(result)
