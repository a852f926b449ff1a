"""Horus and its baselines: the parts by hand, and what every plan of theirs must keep."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_builders import (
    busy,
    feed_back,
    make_cluster_node,
    make_job,
    make_profile,
    make_request,
)

from muri.errors import UsageError
from muri.policies.registry import get_policy
from muri.policies.siblings.horus import ByCost, JobQueue, cluster, pick, queues_of
from muri.policies.siblings.horus_cost import MAX_RAISES, Load, raised_gib
from muri.profiler.slowdown import Parabola, published_slowdown

RTX_2080 = published_slowdown("rtx2080")
NAMES = ("horus", "horus-f", "obp", "pab")


# Cost


def test_the_cost_of_a_placement_by_hand():
    before = Load.of([busy(1, 0.4, 6.0)])
    # 0.3 · 16/24 + 0.7 · (1.16664 − 0.00302·120 + 4e−5·120²)
    price = ByCost(0.3, 0.7, 1.0).price(before, before.plus(busy(2, 0.8, 10.0)), 24.0, RTX_2080)
    assert price == pytest.approx(0.2 + 0.7 * 1.38024)


def test_an_idle_gpu_is_cheaper_even_where_memory_is_unknown_and_both_are_hardly_used():
    nodes = [make_cluster_node("n1", 2)]
    plan = get_policy("horus").plan(make_request([busy(1, 0.1, 0.0), busy(2, 0.1, 0.0)], nodes))
    assert [item.gpus[0].gpu_ids for item in plan.sharers] == [(0,), (1,)]


@pytest.mark.parametrize(("newcomer", "expected"), [(0.5, True), (0.8, True), (1.0, False)])
def test_sharing_pays_while_the_sum_of_speeds_does_not_fall(newcomer, expected):
    before = Load(1, 1.0, 1.0)
    after = Load(2, 2.0, 1.0 + newcomer)  # f = 1.61, 1.92, 2.16: two jobs do 2/f
    assert (ByCost(0.5, 0.5, 1.0).price(before, after, 24.0, RTX_2080) is not None) is expected


def test_without_measured_utilization_the_propagate_share_counts():
    job = make_job(1, profile=make_profile((3.0, 0.0, 1.0, 0.0)))
    assert Load.of([job]).utilization == 0.25


# Queues


def test_k_means_goes_by_the_l1_distance():
    corner, far, near = (0.0, 0.0), (1.0, 1.0), (0.85, 0.35)
    # (0.5, 0) is 0.50 from the corner and 0.70 from `near`, but 0.50 and 0.49 as the crow flies.
    kinds = cluster([corner] * 10 + [far] * 10 + [near] * 10 + [(0.5, 0.0)], 3)
    assert kinds == [0] * 10 + [2] * 10 + [1] * 10 + [0]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=30), st.integers(1, 4), st.randoms())
@settings(deadline=None, max_examples=30)
def test_k_means_gives_equal_points_one_kind_and_no_more_than_asked(points, count, shuffler):
    kinds = dict(zip(points, cluster(points, count), strict=True))
    assert set(kinds.values()) == set(range(len(set(kinds.values()))))
    assert len(set(kinds.values())) <= count
    shuffled = list(points)
    shuffler.shuffle(shuffled)
    assert cluster(shuffled, count) == [kinds[point] for point in shuffled]


def test_a_queue_weighs_its_length_times_its_median_wait_in_rounds():
    jobs = [busy(job_id, 0.5, submit_s=1000.0 - waited_s) for job_id, waited_s in enumerate((60, 720, 3600), 1)]
    (queue,) = queues_of(jobs, 1, now_s=1000.0, round_s=360.0)
    assert queue.weight == 3 * 2.0
    assert [job.job_id for job in queue.jobs] == [3, 2, 1]
    (fresh,) = queues_of(jobs[:1], 1, now_s=1000.0, round_s=360.0)
    assert fresh.weight == 1.0


def test_weighted_fair_queueing_serves_by_weight():
    heavy = JobQueue(tuple(busy(job_id, 0.5) for job_id in (1, 2, 3, 4)), weight=2.0)
    light = JobQueue(tuple(busy(job_id, 0.5) for job_id in (5, 6, 7)), weight=1.0)
    # Virtual times: 1 → 0.5, 2 and 5 → 1, 3 → 1.5, 4 and 6 → 2, 7 → 3; ties to the earlier submission.
    assert [job.job_id for job in pick((heavy, light), 10)] == [1, 2, 5, 3, 4, 6, 7]
    assert [job.job_id for job in pick((heavy, light), 3)] == [1, 2, 5]


# Out of memory


def test_a_job_out_of_memory_asks_for_more_until_it_has_a_gpu_to_itself():
    asked_gib, asked = 4.0, []
    for raises in range(MAX_RAISES + 1):
        more = raised_gib(asked_gib, raises, 24.0)
        asked.append(more)
        asked_gib = more or asked_gib
    assert asked == [6.0, 9.0, 24.0, None]
    assert raised_gib(24.0, 0, 24.0) is None
    assert raised_gib(0.0, 0, 24.0) == 24.0
    assert raised_gib(4.0, 2, 0.0) == 6.0
    assert raised_gib(0.0, 0, 0.0) is None
    with pytest.raises(UsageError, match="negative"):
        raised_gib(-1.0, 0, 24.0)


# Plans


def test_horus_spreads_over_idle_gpus_then_joins_the_one_that_is_used_least():
    jobs = [busy(1, 0.9), busy(2, 0.5), busy(3, 0.3)]
    plan = get_policy("horus").plan(make_request(jobs, [make_cluster_node("n1", 2, gpu_mem_gib=24.0)]))
    where = {item.job_id: item.gpus[0].gpu_ids for item in plan.sharers}
    assert where == {1: (0,), 2: (1,), 3: (1,)}
    speeds = {item.job_id: item.speed for item in plan.sharers}
    assert speeds[1] == 1.0
    assert speeds[2] == speeds[3] < 1.0
    assert "it shares GPUs with 3 at an expected" in " ".join(str(reason) for reason in plan.sharers[1].reasons)


def test_horus_keeps_off_a_gpu_on_which_less_would_get_done_and_obp_does_not():
    request = make_request([busy(1, 1.0), busy(2, 1.0)], [make_cluster_node("n1", 1, 1, gpu_mem_gib=24.0)])
    assert [item.job_id for item in get_policy("horus").plan(request).sharers] == [1]
    assert [item.job_id for item in get_policy("obp").plan(request).sharers] == [1, 2]


def test_what_was_fitted_on_the_site_goes_before_the_published_curves():
    request = make_request([busy(1, 0.3), busy(2, 0.3)], [make_cluster_node("n1", 1, 1, gpu_mem_gib=24.0)])
    steep = {"gpu": Parabola(1.0, 0.05, 0.0), "other": Parabola(1.0, 0.0, 0.0)}
    assert len(get_policy("horus").plan(request).sharers) == 2
    plan = get_policy("horus").plan(dataclasses.replace(request, slowdowns=steep))
    assert [item.job_id for item in plan.sharers] == [1]  # together they would be four times slower


@pytest.mark.parametrize("name", NAMES)
def test_memory_limits_sharing_and_a_raised_request_counts(name):
    node = make_cluster_node("n1", 1, 1, gpu_mem_gib=24.0)
    fits = make_request([busy(1, 0.2, 12.0), busy(2, 0.2, 12.0)], [node])
    assert len(get_policy(name).plan(fits).sharers) == 2
    raised = make_request([busy(1, 0.2, 12.0), busy(2, 0.2, 12.0, gpu_mem_request_gib=18.0)], [node])
    plan = get_policy(name).plan(raised)
    assert [item.job_id for item in plan.sharers] == [1]
    assert "18.0 GiB" in " ".join(str(reason) for reason in plan.waiting[0].reasons)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_nothing_is_known_of_waits_for_a_prediction(name):
    request = make_request([make_job(1, None)], [make_cluster_node("n1")])
    (waits,) = get_policy(name).plan(request).waiting
    assert "profile" in str(waits.reasons[0])
    predicted = make_request([make_job(1, None, gpu_utilization=0.5)], [make_cluster_node("n1")])
    assert [item.job_id for item in get_policy(name).plan(predicted).sharers] == [1]


def test_a_round_looks_at_so_many_jobs_and_says_so():
    jobs = [busy(job_id, 0.1) for job_id in range(1, 6)]
    policy = get_policy("horus", {"horus_jobs_per_round": 2})
    plan = policy.plan(make_request(jobs, [make_cluster_node("n1", 4, gpu_mem_gib=24.0)]))
    assert [item.job_id for item in plan.sharers] == [1, 2]
    assert str(plan.waiting[0].reasons[0]) == "2 jobs of the queues come before it, and a round looks at 2"


def test_three_queues_let_small_jobs_past_a_long_line_of_large_ones():
    large = [busy(job_id, 0.9, 20.0, gpu_count=4) for job_id in range(1, 7)]
    small = [busy(job_id, 0.1, 1.0) for job_id in range(7, 13)]
    request = make_request([*large, *small], [make_cluster_node("n1", 4, gpu_mem_gib=24.0)])
    options = {"horus_jobs_per_round": 4}
    first = {name: {item.job_id for item in get_policy(name, options).plan(request).sharers} for name in NAMES[:2]}
    assert first["horus"] == {1}
    assert first["horus-f"] & set(range(7, 13))


def test_of_equally_cheap_places_the_one_that_leaves_the_fewest_idle_gpus():
    nodes = [make_cluster_node("n1", 4, gpu_mem_gib=24.0), make_cluster_node("n2", 2, gpu_mem_gib=24.0)]
    assert get_policy("horus").plan(make_request([busy(1, 0.1)], nodes)).sharers[0].gpus[0].node == "n2"


@pytest.mark.parametrize("name", NAMES)
def test_who_waited_too_long_is_given_to_slurm_or_goes_first(name):
    node = make_cluster_node("n1", 2, gpu_mem_gib=24.0)
    old, young = busy(1, 1.0, 24.0, gpu_count=2, submit_s=0.0), busy(2, 0.1)
    runs = make_request([busy(9, 1.0, 24.0, gpu_count=1)], [node])
    request = dataclasses.replace(
        feed_back(runs, get_policy(name).plan(runs)), jobs=(old, young), now_s=90_000.0, same_user=True
    )
    young = dataclasses.replace(young, submit_s=89_000.0)
    request = dataclasses.replace(request, jobs=(old, young))
    to_slurm = get_policy(name).plan(request)
    assert [item.job_id for item in to_slurm.solo] == [1]
    assert 2 in {item.job_id for item in to_slurm.sharers}
    no_slurm = get_policy(name).plan(dataclasses.replace(request, larger_than_a_node="whole-nodes"))
    assert {item.job_id for item in no_slurm.waiting} == {1, 2}  # no job passes one that waited too long


def test_a_job_larger_than_a_node_is_slurms_or_gets_idle_nodes():
    nodes = [make_cluster_node(name, 2, gpu_mem_gib=24.0) for name in ("n1", "n2")]
    request = make_request([busy(1, 0.5, gpu_count=4), busy(2, 0.5)], nodes)
    plan = get_policy("horus").plan(request)
    assert [item.job_id for item in plan.solo] == [1]
    assert [item.job_id for item in plan.waiting] == [2]  # its GPUs are left to the job that Slurm places
    spread = get_policy("horus").plan(dataclasses.replace(request, larger_than_a_node="whole-nodes"))
    assert [share.node for share in spread.sharers[0].gpus] == ["n1", "n2"]


@pytest.mark.parametrize("name", NAMES)
def test_several_aged_jobs_without_a_place_all_wait(name):
    """The first of them closes the partition for the others, which must not be lost."""
    jobs = [busy(number, 0.9, gpu_count=2, submit_s=0.0) for number in (1, 2, 3)] + [busy(4, 0.1, submit_s=990.0)]
    request = make_request(jobs, [make_cluster_node("n1", 1, 1)], larger_than_a_node="whole-nodes", max_group_size=1)
    nodes = tuple(dataclasses.replace(node, gpu_count=0) for node in request.nodes)
    plan = get_policy(name, {"max_wait_s": 500.0}).plan(dataclasses.replace(request, nodes=nodes))
    assert sorted(item.job_id for item in plan.waiting) == [1, 2, 3, 4]
    assert not plan.sharers
