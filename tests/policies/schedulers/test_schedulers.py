"""Every policy on a queue small enough to be checked by hand."""

import pytest
from policy_builders import KINDS, NOW_S, QUEUE, make_job, make_node, make_profile, make_request, order, queue, tiresias

from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy
from muri.policies.schedulers import finish_time_fairness
from muri.policies.types import NodeShare, Running


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fifo", [2, 1, 3, 4]),
        ("sjf", [4, 3, 2, 1]),
        ("srtf", [4, 2, 3, 1]),
        ("srsf", [3, 2, 4, 1]),
        ("las", [4, 3, 1, 2]),
        ("2d-las", [3, 1, 4, 2]),
        ("themis", [3, 2, 1, 4]),
        ("muri-s", [3, 2, 4, 1]),
        ("muri-l", [3, 1, 4, 2]),
        ("auto", [3, 2, 4, 1]),
        ("muri-jct", [3, 2, 4, 1]),
    ],
)
def test_the_order_of_the_queue(name, expected):
    assert order(get_policy(name), queue()) == expected


# Job 2 no longer tells its duration: it follows those who do.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sjf", [4, 3, 1, 2]),
        ("srtf", [4, 3, 1, 2]),
        ("srsf", [3, 4, 1, 2]),
        ("auto", [3, 1, 4, 2]),  # as muri-l: not everybody's duration is known
        ("muri-jct", [3, 1, 4, 2]),
        # It is taken to need 300 s more, as much as it has had: ρ = 1300 / 600 = 2.17, before job 4 alone.
        ("themis", [3, 1, 2, 4]),
    ],
)
def test_unknown_durations(name, expected):
    jobs = queue(QUEUE | {2: (0.0, 2, 600.0, None)})
    assert order(get_policy(name), jobs, interval_s=60.0) == expected


def test_the_highest_of_slurms_priorities_goes_first_then_the_earlier_then_the_lower_id():
    figures = enumerate([(5, 9.0), (7, 9.0), (5, 8.0), (5, 8.0)], start=1)
    jobs = [make_job(number, priority=priority, submit_s=submit_s) for number, (priority, submit_s) in figures]
    assert order(get_policy("muri-slurm"), jobs) == [2, 3, 4, 1]


def test_a_job_that_must_run_alone_does_not_decide_for_auto():
    jobs = queue(QUEUE | {2: (0.0, 2, 600.0, None)})
    jobs[1] = make_job(2, gpu_count=2, groupable=False, alone_reason="asked to", attained_gpu_s=600.0)
    assert order(get_policy("auto"), jobs) == [3, 4, 1, 2]


def test_fairness_of_a_job_that_nothing_is_known_of():
    # 100 s old, never ran, unknown duration: it will need at least the 60 s to the next plan.
    job = make_job(1, submit_s=900.0)
    assert finish_time_fairness(job, NOW_S, 60.0) == pytest.approx(160 / 60)
    assert finish_time_fairness(make_job(1, submit_s=NOW_S, remaining_s=5.0), NOW_S, 60.0) == 1.0


def test_a_job_at_the_limit_has_left_the_queue():
    jobs = queue({1: (0.0, 1, 200.0, None), 2: (5.0, 1, 199.0, None)})
    assert order(tiresias(), jobs) == [2, 1]


@pytest.mark.parametrize(
    ("promote_after", "expected"),
    [
        # Job 2 has run for 300 s and waited for 1000 s, more than 3 × 300 s: it is the oldest in the first queue.
        (3.0, [2, 1, 3, 4]),
        # 1020 s are not over yet. First queue (below 200): 1 since 10 s, 3 since 20 s. Second (below 500): 4. Third: 2.
        (3.4, [1, 3, 4, 2]),
    ],
)
def test_tiresias_promotes_who_has_waited_long(promote_after, expected):
    assert order(tiresias(promote_after=promote_after), queue()) == expected


def test_a_running_job_does_not_wait_and_is_promoted_by_nothing():
    # Job 1 has left the first two queues; it came 1000 s ago, far more than a tenth of the 600 s that it has had.
    first, second = queue({1: (0.0, 1, 600.0, None), 2: (900.0, 1, 0.0, None)}, preemptible=True, groupable=False)
    assert with_running(tiresias(promote_after=0.1), first, second) == STOPPED


def test_waiting_counts_from_the_last_service():
    jobs = queue(waiting_since_s=950.0)  # 50 s ago: no job has waited longer than it has run
    assert order(tiresias(promote_after=1.0), jobs) == [1, 3, 4, 2]


@pytest.mark.parametrize(
    "name", ["fifo", "sjf", "srtf", "srsf", "las", "2d-las", "tiresias", "tiresias-gittins", "themis"]
)
def test_exclusive_policies_let_nobody_share(name):
    jobs = [make_job(1, "cpu", remaining_s=1.0), make_job(2, "gpu", remaining_s=1.0)]
    for policy in (get_policy(name), get_policy(name, PolicyOptions(max_group_size=4))):
        plan = policy.plan(make_request(jobs, [make_node("n1", 1)]))
        assert (len(plan.groups), len(plan.solo), len(plan.waiting)) == (0, 1, 1)


def with_running(policy, running, waiting):
    """One GPU, which `running` holds; who has it now, and who waits or was stopped."""
    request = make_request(
        [waiting], [make_node("n1", 0, gpu_count=1)], now_s=NOW_S, running=(Running((running,), (NodeShare("n1", 1),)),)
    )
    plan = policy.plan(request)
    stopped = [str(item.reasons[0]) for item in plan.waiting if item.preempted]
    assert stopped in ([], ["stopped: more urgent jobs get its 1 GPU"])
    return [(solo.job_id, solo.kept) for solo in plan.solo], [(item.job_id, item.preempted) for item in plan.waiting]


STOPPED = ([(2, False)], [(1, True)])
KEPT = ([(1, True)], [(2, False)])


# Job 1 runs, job 2 waits; the figures are submission, GPUs, attained GPU-seconds, remaining seconds.
@pytest.mark.parametrize(
    ("name", "running", "waiting", "expected"),
    [
        ("srtf", (0.0, 1, 500.0, 100.0), (900.0, 1, 0.0, 10.0), STOPPED),
        ("srtf", (0.0, 1, 500.0, 5.0), (900.0, 1, 0.0, 10.0), KEPT),
        ("srsf", (0.0, 1, 500.0, 100.0), (900.0, 1, 0.0, 10.0), STOPPED),
        ("las", (0.0, 1, 500.0, None), (900.0, 1, 0.0, None), STOPPED),
        ("2d-las", (0.0, 1, 500.0, None), (900.0, 1, 600.0, None), KEPT),
        ("tiresias", (0.0, 1, 3300.0, None), (900.0, 1, 0.0, None), STOPPED),  # job 1 has left the first queue
        ("tiresias", (0.0, 1, 500.0, None), (900.0, 1, 0.0, None), KEPT),  # both are in it, and 1 came first
        ("themis", (0.0, 1, 990.0, 990.0), (900.0, 1, 0.0, 10.0), STOPPED),  # 1990 / 1980 against 110 / 10
        ("fifo", (950.0, 1, 50.0, 1e6), (900.0, 1, 0.0, 10.0), KEPT),
        ("sjf", (950.0, 1, 50.0, 1e6), (900.0, 1, 0.0, 10.0), KEPT),
        ("antman", (950.0, 1, 50.0, 1e6), (900.0, 1, 0.0, 10.0), KEPT),
    ],
)
def test_who_is_stopped_for_whom(name, running, waiting, expected):
    # Both use nothing but the GPU, so sharing it does not help.
    always = make_profile((0.0, 0.0, 1.0, 0.0))
    first, second = queue({1: running, 2: waiting}, profile=always, preemptible=True)
    assert with_running(get_policy(name), first, second) == expected


@pytest.mark.parametrize("name", ["srtf", "srsf", "muri-s", "muri-jct"])
def test_what_cannot_be_resumed_is_not_stopped(name):
    always = make_profile((0.0, 0.0, 1.0, 0.0))
    first, second = queue({1: (0.0, 1, 500.0, 100.0), 2: (900.0, 1, 0.0, 10.0)}, profile=always)
    assert with_running(get_policy(name), first, second) == KEPT


def test_preemption_can_be_turned_off():
    first, second = queue({1: (0.0, 1, 500.0, 100.0), 2: (900.0, 1, 0.0, 10.0)}, preemptible=True)
    assert with_running(get_policy("srtf", {"preemption": False}), first, second) == KEPT


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("muri-s", 4, [1, 1, 1, 1]),  # one GPU for each of the four jobs
        ("muri-s", 3, [2, 2]),  # the paper merges all pairs of a round, and leaves a GPU idle
        ("auto", 3, [1, 1, 2]),
        ("muri-s", 1, [4]),
        ("auto", 1, [4]),
        ("srsf", 1, [1]),
    ],
)
def test_how_far_jobs_are_merged(name, gpus, expected):
    jobs = [make_job(number, kind, remaining_s=10.0) for number, kind in enumerate(KINDS, start=1)]
    plan = get_policy(name).plan(make_request(jobs, [make_node("n1", gpus, gpu_count=4)]))
    assert sorted([1] * len(plan.solo) + [len(group.members) for group in plan.groups]) == expected
