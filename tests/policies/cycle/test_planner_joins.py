"""Waiting jobs join what runs and is not stopped."""

from dataclasses import replace

import pytest
from policy_builders import make_job, make_node, make_profile, make_request

from muri.policies import schedulers as priority
from muri.policies.cycle.planner import plan_queue
from muri.policies.cycle.validation import broken_laws
from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy
from muri.policies.types import NodeShare, Running, sentences

JCT = PolicyOptions(grouping="optimal", objective="jct", speed_model="fair")


def plan_of(request, rules=JCT):
    return plan_queue(request, "test", priority.srsf, rules)


def runs(*jobs, node="n1", gpu_count=1, **how):
    return Running(tuple(jobs), (NodeShare(node, gpu_count),), **how)


def of(job_id, resource, **how):
    return make_job(job_id, resource, remaining_s=how.pop("remaining_s", 1000.0), **how)


def full(*units, **how):
    """A node whose GPUs all are held by units."""
    return make_request(how.pop("jobs"), [make_node("n1", 0, gpu_count=len(units))], running=units, **how)


def test_a_waiting_job_joins_the_unit_that_has_what_it_needs():
    plan = plan_of(full(runs(of(1, "gpu")), runs(of(2, "cpu")), jobs=[of(3, "gpu")]))
    (group,) = plan.groups
    assert sorted(group.members) == [2, 3]
    assert group.joining == (3,)
    assert group.gpus == (NodeShare("n1", 1),)
    assert group.speed[3] == pytest.approx(1.0, abs=0.1)
    assert [(solo.job_id, solo.kept) for solo in plan.solo] == [(1, True)]
    assert any("3 joins 2, which runs on" in text for text in sentences(group.reasons))


def test_several_jobs_join_one_unit_in_one_plan():
    plan = plan_of(full(runs(of(1, "gpu")), jobs=[of(2, "cpu"), of(3, "storage"), of(4, "network")]))
    (group,) = plan.groups
    assert sorted(group.members) == [1, 2, 3, 4]
    assert group.joining == (2, 3, 4)
    assert not plan.waiting


def test_joins_and_new_groups_are_chosen_together():
    # Alone on the free GPU job 2 would leave nothing for job 3, which no running job could take in.
    nodes = [make_node("n1", 1, gpu_count=2)]
    plan = plan_of(make_request([of(2, "cpu"), of(3, "gpu", remaining_s=2000.0)], nodes, running=[runs(of(1, "gpu"))]))
    started = {solo.job_id: solo.kept for solo in plan.solo} | {
        job: group.kept for group in plan.groups for job in group.members
    }
    assert set(started) == {1, 2, 3}
    assert not plan.waiting


@pytest.mark.parametrize(
    "closed",
    [{"joinable": False}, {"mode": "plain"}, {"spare_mem_gib": 1.0}, {"closed_to": {2: "it would not end in time"}}],
)
def test_nobody_joins_a_closed_unit(closed):
    plan = plan_of(full(runs(of(1, "gpu"), **closed), jobs=[of(2, "cpu", mem_gib=4.0)]))
    assert not plan.groups
    assert [item.job_id for item in plan.waiting] == [2]


def test_nobody_joins_where_gpu_memory_is_short():
    big = make_profile([0.0, 0.0, 1.0, 0.0], mem_gib=30.0)
    small = make_profile([0.0, 1.0, 0.0, 0.0], mem_gib=30.0)
    nodes = [make_node("n1", 0, gpu_count=1, gpu_mem_gib=40.0)]
    jobs = [make_job(2, profile=small, remaining_s=10.0)]
    running = [runs(make_job(1, profile=big, remaining_s=10.0))]
    assert not plan_of(make_request(jobs, nodes, running=running)).groups
    roomy = [make_node("n1", 0, gpu_count=1, gpu_mem_gib=80.0)]
    assert plan_of(make_request(jobs, roomy, running=running)).groups


def test_nobody_joins_jobs_of_another_user_or_domain():
    unit = runs(of(1, "gpu", user="ann"))
    assert not plan_of(full(unit, jobs=[of(2, "cpu", user="bob")])).groups
    assert plan_of(full(unit, jobs=[of(2, "cpu", user="bob")], same_user=False)).groups
    assert not plan_of(full(unit, jobs=[of(2, "cpu", user="ann", domain="account hep")])).groups


def test_of_two_that_will_share_the_one_with_the_costlier_restart_goes_on():
    cheap, dear = (runs(of(number, kind, preemptible=True, restart_s=restart_s))
                   for number, kind, restart_s in ((1, "gpu", 1.0), (2, "cpu", 60.0)))  # fmt: skip
    plan = plan_of(full(cheap, dear, jobs=[of(3, "gpu", user="bob", remaining_s=10.0)]))
    (group,) = plan.groups
    assert (sorted(group.members), group.joining) == ([1, 2], (1,))


def test_a_full_unit_takes_nobody():
    unit = runs(of(1, "gpu"), of(2, "cpu"))
    assert plan_of(full(unit, jobs=[of(3, "storage")])).groups[0].joining == (3,)
    assert not plan_of(full(unit, jobs=[of(3, "storage")]), replace(JCT, max_group_size=2)).groups[0].joining
    limited = runs(of(1, "gpu", largest_group=2), of(2, "cpu"))
    assert not plan_of(full(limited, jobs=[of(3, "storage")])).groups[0].joining


@pytest.mark.parametrize(("cpu_s", "joins"), [(0.1, False), (0.5, True)])
def test_nobody_joins_where_it_would_mostly_take_from_others(cpu_s, joins):
    # Both use the GPU for 1 s of each iteration; together they get 1.1 or 1.5 times as much done as one of them. The
    # second must add at least 0.2.
    jobs = [make_job(number, profile=make_profile([0.0, cpu_s, 1.0, 0.0]), remaining_s=100.0) for number in (1, 2)]
    assert bool(plan_of(full(runs(jobs[0]), jobs=jobs[1:])).groups) is joins


def test_no_plan_goes_below_a_promised_speed():
    half = make_profile([0.0, 0.5, 1.0, 0.0])
    jobs = [make_job(2, profile=half, remaining_s=100.0)]

    def joined(promise, **rules):
        unit = runs(make_job(1, profile=make_profile([0.5, 0.0, 1.0, 0.0]), remaining_s=100.0, min_speed=promise))
        return bool(plan_of(full(unit, jobs=jobs), replace(JCT, **rules)).groups)

    # Both use the GPU for 2/3 of their time: together each has 3/4 of its speed alone.
    assert joined(0.0)
    assert joined(0.74)
    assert not joined(0.8)
    assert joined(0.0, min_speed=0.7)
    assert not joined(0.0, min_speed=0.8)


def test_profiles_that_are_guesses_are_of_different_models_in_a_group():
    def guessed(job_id, resource, model="new"):
        profile = of(job_id, resource).profile
        key = replace(profile.key, model=model)
        return replace(of(job_id, resource), profile=replace(profile, key=key, source="predicted"))

    both = [guessed(1, "cpu"), guessed(2, "gpu")]
    assert both[0].profile.is_unmeasured
    assert not plan_of(make_request(both, [make_node("n1", 1)])).groups
    assert plan_of(make_request([both[0], of(2, "gpu")], [make_node("n1", 1)])).groups
    assert not plan_of(full(runs(both[0]), jobs=[both[1]])).groups
    assert plan_of(make_request([both[0], guessed(2, "gpu", "newer")], [make_node("n1", 1)])).groups
    assert plan_of(full(runs(both[0]), jobs=[guessed(2, "gpu", "newer")])).groups
    assert plan_of(full(runs(both[0]), jobs=[of(2, "gpu")])).groups


@pytest.mark.parametrize("name", ["muri-s", "muri-l", "auto", "muri-jct", "muri-slurm", "muri-hybrid"])
def test_every_sharing_policy_plans_joins(name):
    request = full(runs(of(1, "gpu")), jobs=[of(2, "cpu")])
    plan = get_policy(name).plan(request)
    assert [(group.joining, group.kept) for group in plan.groups] == [((2,), False)]
    assert not broken_laws(request, plan)
    assert plan.certificate.upper_bound >= plan.certificate.value > 0


def test_a_node_is_kept_for_a_size_of_which_nothing_runs():
    """Small jobs that come and go must not keep a large one out for ever."""
    nodes = [make_node("n1", 1, gpu_count=2), make_node("n2", 0, gpu_count=2)]
    busy = [
        runs(of(1, "gpu", remaining_s=100.0), joinable=False),
        runs(of(2, "gpu", remaining_s=9000.0), node="n2", joinable=False),
        runs(of(3, "gpu", remaining_s=9000.0), node="n2", joinable=False),
    ]
    large = of(10, "gpu", gpu_count=2, remaining_s=50_000.0)
    small = of(11, "gpu", remaining_s=10.0)
    plan = plan_of(make_request([large, small], nodes, running=busy))
    assert {item.job_id for item in plan.waiting} == {10, 11}
    why = {item.job_id: sentences(item.reasons) for item in plan.waiting}
    assert "node n1 takes no other jobs until it has room for this one" in why[10]
    # Once it fits it goes before the more urgent small job; in_order policies keep their order.
    free = [make_node("n1", 2, gpu_count=2), nodes[1]]
    plan = plan_of(make_request([large, small], free, running=busy[1:]))
    assert [solo.job_id for solo in plan.solo if not solo.kept] == [10]
    plan = plan_queue(make_request([large, small], free, running=busy[1:]), "test", priority.srsf, JCT, in_order=True)
    assert [solo.job_id for solo in plan.solo if not solo.kept] == [11]
