"""Every policy on a queue small enough to be checked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_builders import KINDS, make_job, make_node, make_profile, make_request

from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy
from muri.policies.schedulers.exclusive import GittinsIndex, finish_time_fairness
from muri.policies.types import NodeShare, Running

NOW_S = 1000.0
KEYS = ("submit_s", "gpu_count", "attained_gpu_s", "remaining_s")

# The clock shows 1000 s. What follows from each line:
#
#        submitted GPUs attained remaining |          whole      rem.   GPU-s  ρ = (waited + remaining)
#            at s         GPU-s      s     | att. s    s         × GPUs  att.     / whole
QUEUE = {  #                              |
    1: (10.0, 1, 150.0, 400.0),  #        |  150     550        400     150   1390 / 550 = 2.53
    2: (0.0, 2, 600.0, 50.0),  #          |  300     350        100     600   1050 / 350 = 3.00
    3: (20.0, 1, 100.0, 90.0),  #         |  100     190         90     100   1070 / 190 = 5.63
    4: (900.0, 4, 240.0, 30.0),  #        |   60      90        120     240    130 /  90 = 1.44
}


def queue(figures=QUEUE, **changes):
    return [make_job(number, **dict(zip(KEYS, values, strict=True)), **changes) for number, values in figures.items()]


def order(policy, jobs, **changes):
    """The jobs as the policy ranks them: on a full cluster all wait in that order."""
    plan = policy.plan(make_request(jobs, [make_node("n1", 0, gpu_count=8)], now_s=NOW_S, **changes))
    assert not plan.groups
    assert not plan.solo
    return [item.job_id for item in plan.waiting]


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


def test_a_job_that_must_run_alone_does_not_decide_for_auto():
    jobs = queue(QUEUE | {2: (0.0, 2, 600.0, None)})
    jobs[1] = make_job(2, gpu_count=2, groupable=False, alone_reason="asked to", attained_gpu_s=600.0)
    assert order(get_policy("auto"), jobs) == [3, 4, 1, 2]


def test_fairness_of_a_job_that_nothing_is_known_of():
    # 100 s old, never ran, unknown duration: it will need at least the 60 s to the next plan.
    job = make_job(1, submit_s=900.0)
    assert finish_time_fairness(job, NOW_S, 60.0) == pytest.approx(160 / 60)
    assert finish_time_fairness(make_job(1, submit_s=NOW_S, remaining_s=5.0), NOW_S, 60.0) == 1.0


def tiresias(name="tiresias", **options):
    return get_policy(name, {"queue_limits_gpu_s": (200.0, 500.0), "promote_after": math.inf} | options)


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
    jobs = queue(waiting_since_s=950.0)  # 50 s ago: nobody has waited longer than it has run
    assert order(tiresias(promote_after=1.0), jobs) == [1, 3, 4, 2]


def test_gittins_prefers_who_is_about_to_finish():
    # Half of the past jobs needed 200 GPU-seconds. Job 1 has had 150 and may end after 50 more, job 3 after 100 more:
    #   job 1: 1 of 2 ends within 50, on average 50 are spent: 1 / (50 + 50)   = 0.0100
    #   job 3: 1 of 2 ends within 100:                         1 / (100 + 100) = 0.0050
    policy = tiresias("tiresias-gittins", service_history_gpu_s=(200.0, 5000.0))
    assert GittinsIndex((200.0, 5000.0)).at(150.0) == pytest.approx(0.01)
    assert GittinsIndex((5000.0, 200.0)).at(100.0) == pytest.approx(0.005)
    older = queue(QUEUE | {3: (5.0, 1, 100.0, 90.0)})
    assert order(tiresias(), older) == [3, 1, 4, 2]
    assert order(policy, older) == [1, 3, 4, 2]


@given(
    st.lists(st.integers(1, 50).map(float), min_size=1, max_size=8),
    st.integers(0, 49).map(float),
)
def test_the_gittins_index_is_the_best_of_all_quanta(history, attained):
    longer = [total - attained for total in history if total > attained]
    rates = [
        sum(needed <= quantum for needed in longer) / sum(min(needed, quantum) for needed in longer)
        for quantum in (step / 4 for step in range(1, 201))
        if longer
    ]
    assert GittinsIndex(tuple(history)).at(attained) == pytest.approx(max(rates, default=0.0))


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
        [waiting],
        [make_node("n1", 0, gpu_count=1)],
        now_s=NOW_S,
        running=(Running((running,), (NodeShare("n1", 1),)),),
    )
    plan = policy.plan(request)
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
    # Both use nothing but the GPU, so sharing it is no way out.
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
