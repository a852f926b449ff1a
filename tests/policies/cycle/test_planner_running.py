"""Planning cycle after cycle: what runs stays, moves only for a reason, and never flaps."""

import dataclasses
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_builders import (
    check_plan,
    cluster_requests,
    feed_back,
    make_cluster_node,
    make_job,
    make_node,
    make_profile,
    make_request,
    pending_jobs,
    shuffled,
)

from muri.policies import schedulers as priority
from muri.policies.cycle.planner import plan_queue
from muri.policies.options import PolicyOptions
from muri.policies.types import NodeShare, Running, sentences

keys = st.sampled_from((priority.fifo, priority.srsf, priority.two_dimensional_las))
options = st.builds(
    PolicyOptions,
    max_group_size=st.integers(1, 4),
    objective=st.sampled_from(("efficiency", "throughput", "jct")),
    merge=st.sampled_from(("as-needed", "whole-rounds")),
    preemption=st.sampled_from((True, True, False)),
)


one_or_two, arrivals = st.sampled_from((1, 2)), st.integers(0, 4)


def plan_of(request, key=priority.fifo, rules=None):
    return plan_queue(request, "test", key, rules or PolicyOptions())


@st.composite
def second_cycles(draw):
    """A request in which jobs run and others have arrived since they started, with key and options."""
    first = draw(cluster_requests(preemptible=None))
    key, rules = draw(keys), draw(options)
    arrived = [
        dataclasses.replace(job, partition="main", gpu_count=draw(one_or_two), submit_s=job.submit_s / 2)
        for job in (draw(pending_jobs(number)) for number in range(100, 100 + draw(arrivals)))
    ]
    return feed_back(first, plan_of(first, key, rules), new_jobs=arrived), key, rules


def check_moves(request, plan):
    """Running jobs change places only for a reason."""
    running = {job.job_id for unit in request.running for job in unit.members}
    told = ("regrouped although it runs", "moved:", "split up", "a more urgent job needs", "not all of its members")
    for item in (*plan.groups, *plan.solo):
        members = item.members if hasattr(item, "members") else (item.job_id,)
        moving = getattr(item, "joining", ()) or members
        if running & set(moving) and not item.kept:
            assert any(words in sentence for sentence in sentences(item.reasons) for words in told)


@settings(max_examples=120)
@given(second_cycles(), st.randoms(use_true_random=False))
def test_every_plan_keeps_the_laws_and_the_order_of_what_runs_does_not_matter(cycle, rng):
    """All laws look at the same plans: to make these takes longer than to check them."""
    request, key, rules = cycle
    plan = plan_of(request, key, rules)
    check_plan(request, plan, preemption=rules.preemption)
    check_moves(request, plan)
    assert plan_of(shuffled(request, rng), key, rules) == plan


@given(st.one_of(cluster_requests(preemptible=True), cluster_requests(preemptible=False)), keys, options)
def test_five_more_rounds_on_an_unchanged_cluster_change_nothing(request_, key, rules):
    # In order of submission a job of little worth may be seated alone where a group would have been worth more; what
    # is left then joins it in the next cycle. The orders that policies use with this objective seat the worthiest.
    assume(rules.objective != "jct" or key is not priority.fifo)
    plan = plan_of(request_, key, rules)
    for _ in range(5):
        request_ = feed_back(request_, plan)
        plan = plan_of(request_, key, rules)
        assert all(group.kept for group in plan.groups)
        assert all(solo.kept for solo in plan.solo)
        assert not any(item.preempted for item in plan.waiting)


def _running(jobs, *shares):
    return Running(tuple(jobs), shares)


def _pair_or_better(restart_s):
    """Two jobs of one kind share badly; now a complementary one has come, and there is still one GPU."""
    first, second = (make_job(number, "gpu", preemptible=True, restart_s=restart_s) for number in (1, 2))
    other = make_job(3, "cpu")
    nodes = [make_node("n1", 0, gpu_count=2)]
    running = (_running([first], NodeShare("n1", 1)), _running([second], NodeShare("n1", 1)))
    return make_request([other], nodes, running=running, max_group_size=2)


def test_running_jobs_share_with_a_newcomer_when_that_pays():
    plan = plan_of(_pair_or_better(0.0), rules=PolicyOptions(objective="throughput", join=False))
    (group,) = plan.groups
    assert 3 in group.members
    assert not group.kept
    assert any(str(reason).startswith("regrouped although it runs: until the next plan") for reason in group.reasons)
    assert [solo.kept for solo in plan.solo] == [True]


def test_running_jobs_stay_apart_when_a_restart_would_not_pay():
    plan = plan_of(_pair_or_better(4000.0), rules=PolicyOptions(objective="throughput", join=False))
    assert plan.groups == ()
    assert [(solo.job_id, solo.kept) for solo in plan.solo] == [(1, True), (2, True)]
    assert any(str(reason).startswith("not regrouped: until the next plan") for reason in plan.solo[0].reasons)
    (left,) = plan.waiting
    assert str(left.reasons[-1]) == "it was considered for sharing with 2 jobs, and no group with it is worth its place"


@pytest.mark.parametrize("restart_s", [0.0, 4000.0])
def test_a_newcomer_joins_a_running_job_and_nobody_restarts(restart_s):
    plan = plan_of(_pair_or_better(restart_s), rules=PolicyOptions(objective="throughput"))
    (group,) = plan.groups
    assert group.joining == (3,)
    assert not group.kept
    assert [solo.kept for solo in plan.solo] == [True]
    assert any("joins" in str(reason) and "undisturbed" in str(reason) for reason in group.reasons)


def test_a_running_job_makes_room_for_a_large_urgent_one():
    large = make_job(1, gpu_count=2, groupable=False)
    small = [make_job(number, preemptible=True, groupable=False) for number in (2, 3)]
    running = tuple(_running([job], NodeShare(node, 1)) for job, node in zip(small, ("a", "b"), strict=True))
    nodes = [make_node("a", 1, gpu_count=2), make_node("b", 1, gpu_count=2)]
    plan = plan_of(make_request([large], nodes, running=running))
    where = {solo.job_id: (solo.node, solo.kept) for solo in plan.solo}
    assert where == {1: ("a", False), 2: ("b", False), 3: ("b", True)}
    (moved,) = (solo for solo in plan.solo if solo.job_id == 2)
    assert "a more urgent job needs 2 GPUs on a, where it ran" in sentences(moved.reasons)


def test_jobs_larger_than_a_node_get_whole_idle_nodes():
    jobs = [make_job(1, gpu_count=6, groupable=False), make_job(2, groupable=False)]
    nodes = [make_cluster_node(name) for name in ("a", "b", "c")]
    request = make_request(jobs, nodes, larger_than_a_node="whole-nodes")
    plan = plan_of(request)
    assert plan.solo[0].gpus == (NodeShare("a", 4, (0, 1, 2, 3)), NodeShare("b", 2, (0, 1)))
    assert plan.solo[1].gpus == (NodeShare("b", 1, (2,)),)
    assert sentences(plan.solo[0].reasons)[0] == "6 GPUs of a and b can be given to it"
    again = plan_of(feed_back(request, plan, new_jobs=[make_job(3, gpu_count=8, groupable=False)]))
    (waits,) = again.waiting
    expected = "it is next in line; it needs 8 GPUs on idle nodes, and the idle nodes of partition main have 4 GPUs"
    assert str(waits.reasons[0]) == expected


def test_an_aged_job_goes_first_where_slurm_is_not_behind_the_plan():
    jobs = [make_job(1, submit_s=0.0, remaining_s=9e5), make_job(2, submit_s=900.0, remaining_s=1.0)]
    request = make_request(jobs, [make_node("n1", 1)], larger_than_a_node="whole-nodes", max_group_size=1)
    assert [solo.job_id for solo in plan_of(request, priority.srsf).solo] == [2]
    rules = PolicyOptions(max_wait_s=500.0)
    assert [solo.job_id for solo in plan_of(request, priority.srsf, rules).solo] == [1]
    served = dataclasses.replace(request, jobs=(dataclasses.replace(jobs[0], waiting_since_s=950.0), jobs[1]))
    assert [solo.job_id for solo in plan_of(served, priority.srsf, rules).solo] == [2]


def test_a_group_of_unknown_profiles_that_runs_is_still_reported():
    members = [make_job(number, None) for number in (1, 2)]
    running = (_running(members, NodeShare("n1", 1)),)
    (group,) = plan_of(make_request([], [make_node("n1", 0, gpu_count=1)], running=running)).groups
    assert group.kept
    assert group.speed == {1: 0.5, 2: 0.5}


def test_the_plan_adds_up_the_proofs_of_its_buckets():
    jobs = [make_job(number, kind) for number, kind in enumerate(("gpu", "cpu", "network"), start=1)]
    jobs += [make_job(number, "gpu", gpu_count=2) for number in (4, 5)]
    plan = plan_of(make_request(jobs, [make_node("n1", 3)]), rules=PolicyOptions(objective="throughput"))
    speeds = sum(sum(group.speed.values()) for group in plan.groups) + len(plan.solo)
    assert plan.certificate.value == pytest.approx(speeds)
    assert plan.certificate.upper_bound >= plan.certificate.value - 1e-9


@pytest.mark.parametrize(
    "seed", [65, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (3, 11, 35, 118, 129))]
)
def test_a_crowded_cluster_of_mixed_memory_settles_at_once(seed):
    rng = random.Random(seed)
    jobs = [
        make_job(
            number,
            profile=make_profile(
                [rng.choice((0.01, 0.1, 0.5, 1.0)) for _ in range(4)], mem_gib=rng.choice((1.0, 4.0, 9.0))
            ),
            gpu_count=rng.choice((1, 1, 1, 2, 2, 4, 8)),
            partition=rng.choice(("main", "debug")),
            remaining_s=rng.uniform(10, 1e5),
            groupable=rng.random() < 0.9,
            preemptible=True,
            restart_s=rng.choice((0.0, 30.0, 300.0)),
        )
        for number in range(1, 60)
    ]
    nodes = [
        make_cluster_node(
            f"n{index}",
            8,
            partitions=rng.choice((("main", "debug"), ("main",))),
            gpu_mem_gib=rng.choice((0.0, 8.0, 40.0)),
        )
        for index in range(5)
    ]
    rules = PolicyOptions(objective=rng.choice(("efficiency", "throughput", "jct")), max_group_size=rng.randint(2, 4))
    request = make_request(jobs, nodes, larger_than_a_node="whole-nodes")
    plan = plan_of(request, priority.srsf, rules)
    assert plan.groups
    for _ in range(3):
        request = feed_back(request, plan)
        plan = plan_of(request, priority.srsf, rules)
        assert all(item.kept for item in (*plan.groups, *plan.solo))
        assert not any(item.preempted for item in plan.waiting)
