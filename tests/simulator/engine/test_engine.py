"""The engine on cases worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest
from engine_builders import CPU, GPU, NETWORK, STORAGE, by_id, ends, job, run

from muri.policies.options import OptionsError
from muri.policies.registry import UnknownPolicyError
from muri.simulator.model import Cluster, Outage, SimulationError, TraceJob

ONE_GPU = Cluster(1, 1)


def test_a_job_alone_takes_its_service_time_and_pays_nothing_for_its_first_start() -> None:
    (record,) = run([job(7, 5.0, 100.0)], "fifo", ONE_GPU, restart_s=30.0).records
    assert (record.start_s, record.end_s, record.run_s) == (5.0, 105.0, 100.0)
    assert (record.restarts, record.shared_s) == (0, 0.0)


LONG, SHORT = job(1, 0.0, 1000.0), job(2, 100.0, 100.0)
HUNDRED = job(1, 0.0, 100.0)
FAILS, LATER = Outage(0, 40.0, 70.0), Outage(0, 20.0, 90.0)


def stopped(
    name: str, policy: str, jobs: list[TraceJob], ended: dict[int, float], first: tuple[int, float], **how: Any
) -> Any:
    """A case: when each job ends, then the restarts of job 1 and its seconds on GPUs."""
    cluster = Cluster(how.pop("nodes", 1), 1)
    return pytest.param(policy, jobs, cluster, {"restart_s": 30.0, **how}, ended, first, id=name)


@pytest.mark.parametrize(
    ("policy", "jobs", "cluster", "how", "ended", "first"),
    [
        stopped("a stopped job loses its restart and nothing else", "srtf", [LONG, SHORT],
                {1: 200.0 + 30.0 + 900.0, 2: 200.0}, (1, 100.0 + 930.0)),
        stopped("a job may state its own restart", "srtf", [replace(LONG, restart_s=70.0), SHORT],
                {1: 200.0 + 70.0 + 900.0, 2: 200.0}, (1, 100.0 + 970.0)),
        # Job 1 starts again at 200, is stopped at 210 before it got on, and starts a third time at 260.
        stopped("a job stopped while it restarts pays again", "srtf", [LONG, SHORT, job(3, 210.0, 50.0)],
                {1: 260.0 + 30.0 + 900.0, 2: 200.0, 3: 260.0}, (2, 100.0 + 10.0 + 930.0)),
        stopped("without checkpoints none can be stopped", "srtf", [LONG, SHORT],
                {1: 1000.0, 2: 1100.0}, (0, 1000.0), checkpoints=False),
        stopped("a job that joins disturbs none", "muri-s", [LONG, job(2, 100.0, 100.0, CPU)],
                {1: 1000.0, 2: 200.0}, (0, 1000.0)),
        stopped("without joins a new group restarts who runs", "muri-s", [LONG, job(2, 100.0, 100.0, CPU)],
                {1: 100.0 + 30.0 + 900.0, 2: 200.0}, (1, 1030.0), options={"join": False}),
        stopped("a failed node gives its jobs back with what their checkpoints hold", "fifo", [HUNDRED],
                {1: 70.0 + 30.0 + 60.0}, (1, 40.0 + 90.0), outages=(FAILS,)),
        stopped("without checkpoints a failure costs all", "fifo", [HUNDRED],
                {1: 70.0 + 30.0 + 100.0}, (1, 40.0 + 130.0), outages=(FAILS,), checkpoints=False),
        stopped("jobs of a failed node go on elsewhere", "fifo", [HUNDRED],
                {1: 40.0 + 30.0 + 60.0}, (1, 40.0 + 90.0), outages=(Outage(0, 40.0, 1e6),), nodes=2),
        stopped("a drained node finishes what runs and takes nothing new", "srtf", [HUNDRED, job(2, 50.0, 10.0)],
                {1: 100.0, 2: 310.0}, (0, 100.0), outages=(Outage(0, 40.0, 300.0, drain=True),)),
        stopped("overlapping outages end with the last", "fifo", [job(1, 10.0, 100.0)],
                {1: 190.0}, (0, 100.0), outages=(Outage(0, 0.0, 50.0), LATER)),
    ],
)  # fmt: skip
def test_what_a_stop_or_an_outage_costs(
    policy: str, jobs: list[TraceJob], cluster: Cluster, how: dict[str, Any], ended: dict[int, float], first: Any
) -> None:
    result = run(jobs, policy, cluster, **how)
    assert ends(result) == ended
    assert (by_id(result)[1].restarts, by_id(result)[1].run_s) == first


def test_a_pair_advances_one_iteration_a_period_and_who_is_left_goes_on_at_full_speed() -> None:
    # Stages (1, 0, 2, 0) and (1, 0, 0, 1): Eq. 3 gives T = 4 in both orderings, for iterations of 3 and 2 s.
    jobs = [job(1, 0.0, 300.0, (1.0, 0.0, 2.0, 0.0)), job(2, 0.0, 100.0, (1.0, 0.0, 0.0, 1.0))]
    result = run(jobs, "muri-s", ONE_GPU)
    period_s = 4.0
    assert ends(result)[2] == pytest.approx(50 * period_s)
    # By then job 1 has done 50 of its 100 iterations; it goes on without a restart.
    assert ends(result)[1] == pytest.approx(50 * period_s + 50 * 3.0)
    assert [record.restarts for record in result.records] == [0, 0]
    assert [record.shared_s for record in result.records] == [pytest.approx(200.0)] * 2


def test_four_jobs_of_four_resources_don_t_slow_each_other() -> None:
    jobs = [job(index, 0.0, 100.0, stages) for index, stages in enumerate((STORAGE, CPU, GPU, NETWORK))]
    result = run(jobs, "muri-l", ONE_GPU, with_spans=True)
    assert set(ends(result).values()) == {100.0}
    assert [(sorted(span.members), span.start_s, span.end_s) for span in result.spans[:1]] == [
        ([0, 1, 2, 3], 0.0, 100.0)
    ]
    assert result.samples[0].utilization == (1.0, 1.0, 1.0, 1.0)


def test_service_counts_with_the_number_of_gpus() -> None:
    # At 50 s job 1 has had 200 GPU-seconds; job 2 comes then, and needs 150 of them on its single GPU.
    jobs = [job(1, 0.0, 1000.0, gpu_count=4), job(2, 50.0, 150.0)]
    assert ends(run(jobs, "2d-las", Cluster(1, 4), restart_s=0.0, interval_s=50.0))[2] == 200.0


@pytest.mark.parametrize("any_user", [False, True])
def test_jobs_of_different_users_share_only_where_users_mix(any_user: bool) -> None:
    jobs = [replace(job(1, 0.0, 1000.0, GPU), user="ann"), replace(job(2, 100.0, 100.0, CPU), user="bob")]
    result = run(jobs, "muri-jct", ONE_GPU, checkpoints=False, any_user=any_user)
    assert ends(result)[2] == (200.0 if any_user else 1100.0)


def test_the_fair_runtime_is_used_when_the_policy_plans_for_it() -> None:
    jobs = [job(1, 0.0, 400.0, (0.0, 1.0, 3.0, 0.0)), job(2, 0.0, 400.0, (0.0, 3.0, 1.0, 0.0))]
    # Max-min fair: both resources are asked for one second a second, so both jobs keep their full speed.
    fair = run(jobs, "muri-jct", ONE_GPU, options={"speed_model": "fair"})
    assert set(ends(fair).values()) == {400.0}
    lockstep = run(jobs, "muri-jct", ONE_GPU, options={"speed_model": "lockstep"})
    assert min(ends(lockstep).values()) >= 400.0


@pytest.mark.parametrize(("interval_s", "start_s"), [(60.0, 60.0), (0.1, 10.0), (10.0, 10.0), (7.0, 14.0)])
def test_plans_follow_the_interval(interval_s: float, start_s: float) -> None:
    (record,) = run([job(1, 10.0, 100.0)], "fifo", ONE_GPU, interval_s=interval_s).records
    assert record.start_s == pytest.approx(start_s)


def test_jobs_larger_than_a_node_get_whole_nodes() -> None:
    jobs = [job(1, 0.0, 100.0, gpu_count=4), job(2, 0.0, 100.0, gpu_count=1)]
    result = run(jobs, "fifo", Cluster(2, 2))
    assert ends(result) == {1: 100.0, 2: 200.0}


def test_a_group_that_gpu_memory_does_not_hold_is_not_made() -> None:
    jobs = [job(1, 0.0, 100.0, GPU, gpu_mem_gib=30.0), job(2, 0.0, 100.0, CPU, gpu_mem_gib=30.0)]
    assert sorted(ends(run(jobs, "muri-s", Cluster(1, 1, gpu_mem_gib=40.0))).values()) == [100.0, 200.0]
    assert sorted(ends(run(jobs, "muri-s", Cluster(1, 1, gpu_mem_gib=80.0))).values()) == [100.0, 100.0]


def test_the_first_job_of_a_model_waits_for_its_dry_run_and_the_next_ones_for_the_same() -> None:
    jobs = [job(1, 0.0, 100.0, name="a"), job(2, 40.0, 100.0, name="a"), job(3, 500.0, 100.0, name="a")]
    result = run(jobs, "muri-s", Cluster(1, 2), profiling_s=60.0)
    assert [record.start_s for record in result.records] == [60.0, 60.0, 500.0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"interval_s": -1.0}, "interval_s is -1.0"),
        ({"restart_s": float("nan")}, "restart_s is nan"),
        ({"profile_noise": 1.5}, "profile_noise is 1.5"),
        ({"outages": (Outage(3, 0.0, 1.0),)}, "outage of node 3: valid are 0 to 0"),
        ({"outages": (Outage(0, 5.0, 1.0),)}, "must end after it starts"),
        ({"outages": (Outage(0, 0.0, float("inf")),)}, "starts none of the 1 jobs"),
    ],
)
def test_settings_that_cannot_be_are_refused(how: dict[str, object], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run([job(1, 0.0, 10.0)], "fifo", ONE_GPU, **how)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (job(1, 0.0, 10.0, gpu_count=2), "needs 2 GPUs, but the cluster has 1"),
        (job(1, -1.0, 10.0), "submitted at -1.0 s"),
        (job(1, 0.0, 0.0), r"needs 0.0 s of service"),
        (job(1, 0.0, 10.0, gpu_mem_gib=90.0), "needs 90.0 GiB of GPU memory"),
    ],
)
def test_jobs_that_cannot_run_are_refused(bad: object, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run([bad], "fifo", Cluster(1, 1, gpu_mem_gib=40.0))  # type: ignore[list-item]


def test_empty_traces_repeated_ids_unknown_policies_and_contradicting_options_are_refused() -> None:
    with pytest.raises(SimulationError, match="has no jobs"):
        run([], "fifo", ONE_GPU)
    with pytest.raises(SimulationError, match="several jobs of one id"):
        run([job(1, 0.0, 10.0), job(1, 0.0, 10.0)], "fifo", ONE_GPU)
    with pytest.raises(UnknownPolicyError, match="valid are"):
        run([job(1, 0.0, 10.0)], "fifoo", ONE_GPU)
    with pytest.raises(OptionsError, match="muri-s always has"):
        run([job(1, 0.0, 10.0)], "muri-s", ONE_GPU, options={"speed_model": "fair"})
