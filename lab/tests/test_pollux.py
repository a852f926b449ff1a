"""Pollux: GPUs to the jobs that they help most, restarts weighed, and invariants of every plan."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_builders import (
    all_jobs,
    cluster_requests,
    feed_back,
    make_cluster_node,
    make_job,
    make_profile,
    make_request,
)

from muri.policies.cycle.validation import check_request
from muri.policies.types import NodeShare, Running, sentences
from muri_lab.policies.pollux import STARVED, Applicant, Pollux, allocate, fitness, weight

HOUR_S = 3600.0
ELASTIC = {"preemptible": True, "restart_s": 30.0}


def linear(most, **changes):
    return Applicant(**({"weight": 1.0, "speedup": {count: float(count) for count in range(1, most + 1)}} | changes))


def sizes(plan):
    return {sharer.job_id: sum(share.gpu_count for share in sharer.gpus) for sharer in plan.sharers}


def test_fitness_is_the_harmonic_mean_of_speedups():
    two = [linear(4), linear(4)]
    assert fitness(two, (1, 3)) == pytest.approx(2 / (1 + 1 / 3))
    assert fitness([linear(4, weight=3.0), linear(4)], (1, 3)) == pytest.approx(4 / (3 + 1 / 3))
    assert fitness(two, (2, 0)) == pytest.approx(2 / (1 / 2 + 1 / STARVED))


def test_a_case_by_hand():
    """A has no use for a third GPU (gains 0.1 of 2); B gains 1/2 − 1/4 of its cost by two more."""
    stops_scaling = Applicant(1.0, {1: 1.0, 2: 2.0, 3: 2.1})
    scales = Applicant(1.0, {1: 1.0, 2: 2.0, 4: 4.0})
    assert allocate([stops_scaling, scales], 6) == (2, 4)
    assert allocate([stops_scaling, scales], 3) == (2, 1)  # a tie goes to the more urgent one
    assert allocate([stops_scaling, scales], 7) == (3, 4)
    assert allocate([stops_scaling, scales, linear(1)], 2) == (1, 1, 0)
    assert allocate([], 4) == ()


def test_running_jobs_keep_their_gpus_where_restarts_cost_more_than_they_gain():
    def running(held, left):
        return Applicant(1.0, {count: count * (1.0 if count == held else left) for count in (1, 2, 4)}, held)

    new = linear(4)
    assert allocate([running(4, 0.9), new], 4) == (2, 2)  # the new one must have something
    assert allocate([running(2, 0.9)], 4) == (4,)
    assert allocate([running(2, 0.4)], 4) == (2,)


concave = st.builds(
    lambda worth, share, most: Applicant(worth, {n: 1 / ((1 - share) / n + share) for n in range(1, most + 1)}),
    st.sampled_from((0.5, 1.0, 2.0)),
    st.sampled_from((0.0, 0.1, 0.5)),
    st.integers(1, 5),
)


@given(st.lists(concave, min_size=1, max_size=4), st.integers(4, 9))
def test_greedy_is_optimal_where_every_gpu_helps_less_than_the_one_before(applicants, gpu_count):
    ways = itertools.product(*[[0, *applicant.speedup] for applicant in applicants])
    best = max(fitness(applicants, way) for way in ways if sum(way) <= gpu_count)
    assert fitness(applicants, allocate(applicants, gpu_count)) == pytest.approx(best)


def test_weights_fall_after_four_gpu_hours():
    assert weight(make_job(1, attained_gpu_s=4 * HOUR_S)) == 1.0
    assert weight(make_job(1, attained_gpu_s=16 * HOUR_S)) == pytest.approx(0.5)


def test_a_lone_job_grows_and_shrinks_when_others_come():
    first = make_job(1, gpu_count=2, profile=make_profile((0.1, 0.1, 10.0, 0.5)), **ELASTIC)
    request = make_request([first], [make_cluster_node("n1", 8)])
    plan = Pollux().plan(request)
    assert sizes(plan) == {1: 8}
    assert plan.sharers[0].speed > 2
    assert "8 GPUs instead of the 2" in sentences(plan.sharers[0].reasons)[0]
    others = tuple(make_job(number, **ELASTIC) for number in range(2, 6))
    crowded = dataclasses.replace(feed_back(request, plan), jobs=others)
    shared = Pollux().plan(crowded)
    assert sorted(sizes(shared)) == [1, 2, 3, 4, 5] and sum(sizes(shared).values()) == 8
    assert sizes(shared)[1] < 8
    assert "restarted on" in sentences(next(one for one in shared.sharers if one.job_id == 1).reasons)[0]


def test_those_who_have_received_most_wait_when_gpus_are_fewer_than_jobs():
    jobs = [make_job(number, attained_gpu_s=hours * HOUR_S, **ELASTIC) for number, hours in ((1, 90), (2, 5), (3, 0))]
    plan = Pollux().plan(make_request(jobs, [make_cluster_node("n1", 2)]))
    assert sizes(plan) == {2: 1, 3: 1}
    assert "no GPU of partition main is left" in sentences(plan.waiting[0].reasons)[0]


def test_jobs_that_cannot_be_resized_get_what_they_asked_for_and_are_not_stopped():
    fixed = make_job(1, gpu_count=2)
    unknown = make_job(2, None, gpu_count=4, **ELASTIC)
    request = make_request([fixed, unknown], [make_cluster_node("n1", 8)])
    plan = Pollux().plan(request)
    assert sizes(plan) == {1: 2, 2: 4}
    urgent = tuple(make_job(number, **ELASTIC) for number in range(3, 20))
    later = Pollux().plan(dataclasses.replace(feed_back(request, plan), jobs=urgent))
    assert sizes(later)[1] == 2


def test_a_restart_that_does_not_pay_before_the_next_plan_is_not_made():
    held = Running((make_job(1, gpu_count=2, **ELASTIC | {"restart_s": 350.0}),), (NodeShare("n1", 2, (0, 1)),))
    node = dataclasses.replace(make_cluster_node("n1", 4), free_gpus=2, islands=((2, 3),))
    assert sizes(Pollux().plan(make_request([], [node], running=(held,)))) == {1: 2}
    assert sizes(Pollux().plan(make_request([], [node], running=(held,), interval_s=36_000.0))) == {1: 4}


@settings(max_examples=60)
@given(cluster_requests(preemptible=None), st.integers(1, 3))
def test_every_plan_gives_each_gpu_to_one_job_and_decides_on_every_job(request_, cycles):
    for _ in range(cycles):
        plan = Pollux().plan(request_)
        turned = dataclasses.replace(request_, jobs=request_.jobs[::-1], nodes=request_.nodes[::-1])
        assert Pollux().plan(turned) == plan
        decided = [item.job_id for item in (*plan.sharers, *plan.waiting, *plan.solo)]
        assert sorted(decided) == sorted(job.job_id for job in all_jobs(request_))
        assert not plan.groups and not plan.solo
        given_out = [(share.node, gpu) for sharer in plan.sharers for share in sharer.gpus for gpu in share.gpu_ids]
        assert len(given_out) == len(set(given_out))
        nodes = {node.name: node for node in request_.nodes}
        jobs = {job.job_id: job for job in all_jobs(request_)}
        held = {unit.members[0].job_id: unit.gpus for unit in request_.running}
        for sharer in plan.sharers:
            job = jobs[sharer.job_id]
            assert all(job.partition in nodes[share.node].partitions for share in sharer.gpus)
            assert sharer.kept == (held.get(job.job_id) == sharer.gpus)
            assert job.preemptible or sum(share.gpu_count for share in sharer.gpus) == job.gpu_count
            assert sharer.reasons
        fixed = {job_id for job_id in held if not jobs[job_id].preemptible}
        assert fixed <= {sharer.job_id for sharer in plan.sharers if sharer.kept}
        assert {item.job_id for item in plan.waiting if item.preempted} == set(held) - set(sizes(plan))
        request_ = feed_back(request_, plan, now_s=request_.now_s + 360)
        check_request(request_, packed=True, elastic=True)


@settings(max_examples=40)
@given(cluster_requests(preemptible=None))
def test_on_an_unchanged_cluster_plans_come_to_rest(request_):
    """The first plans may still find places that a restart had to free; then nothing moves any more."""
    plans = []
    for _ in range(8):
        plans.append(Pollux().plan(request_))
        request_ = feed_back(request_, plans[-1])
    assert all(sharer.kept for plan in plans[4:] for sharer in plan.sharers)
    assert not any(item.preempted for plan in plans[4:] for item in plan.waiting)


def test_a_job_that_must_span_nodes_is_as_large_as_its_share_of_one():
    nodes = [make_cluster_node(name, 4) for name in ("n1", "n2")]
    plan = Pollux().plan(make_request([make_job(1, gpu_count=8, node_count=2)], nodes))
    assert sizes(plan) == {1: 8}
    assert not plan.solo
