"""What every plan must keep, and the decisions that people will ask about."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_builders import (
    KINDS,
    MERGING,
    check_plan,
    feed_back,
    make_job,
    make_node,
    make_request,
    requests,
    shared_requests,
    shuffled,
)

from muri.policies.cycle.validation import broken_laws
from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy, policy_names
from muri.policies.schedulers import Fifo, MuriL, MuriS
from muri.policies.traits import InterferenceTable, PairSpeed
from muri.policies.types import sentences

GROUPING = [name for name in policy_names() if not get_policy(name).supports_packing]
"""Policies that put jobs into groups. Those that give out GPUs one by one have tests of their own."""

policies = st.sampled_from(GROUPING).map(get_policy) | st.builds(
    MuriS,
    st.builds(
        PolicyOptions,
        max_group_size=st.integers(1, 4),
        ordering=st.sampled_from(("best", "worst")),
        matching=st.sampled_from(("rustworkx", "networkx", "priority-order")),
        max_wait_s=st.sampled_from((100.0, 86_400.0)),
    ),
)


def check_nothing_waits_in_vain(request, plan):
    """No job that fits is left waiting, but for a profile."""
    jobs = {job.job_id: job for job in request.jobs}
    used = Counter()
    for share in (share for item in (*plan.groups, *plan.solo) for share in item.gpus):
        used[share.node] += share.gpu_count
    spanning = any(not solo.node for solo in plan.solo)
    for item in plan.waiting:
        job = jobs[item.job_id]
        if sentences(item.reasons) == ("waits for a profile of its model",) or spanning:
            continue
        for node in request.nodes:
            if job.partition in node.partitions:
                assert node.free_gpus - used[node.name] < job.gpu_count


@settings(max_examples=150)
@given(requests(), policies, st.randoms(use_true_random=False))
def test_every_plan_keeps_the_laws_and_the_order_of_the_input_does_not_matter(request_, policy, rng):
    """All laws look at the same plans: to make these takes longer than to check them."""
    plan = policy.plan(request_)
    check_plan(request_, plan)
    check_nothing_waits_in_vain(request_, plan)
    assert policy.plan(shuffled(request_, rng)) == plan


POLICIES = [
    *((name, {}) for name in policy_names()),
    *(("synergy", {"mechanism": way}) for way in ("proportional", "greedy")),
    *(("auto", options) for options in MERGING),
    ("auto", {"grouping": "optimal", "objective": "throughput"}),
    ("muri-jct", {"grouping": "rounds"}),
]
PAIRS_AT_MOST = ("sjf-bsbf", "sjf-ffs")


@pytest.mark.parametrize(("name", "options"), POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    first=shared_requests(),
    min_speed=st.sampled_from((0.0, 0.0, 0.5, 0.9)),
    rng=st.randoms(use_true_random=False),
)
def test_two_cycles_of_every_policy_keep_the_laws(name, options, first, min_speed, rng):
    policy = get_policy(name, {"min_speed": min_speed, **options})
    plan = policy.plan(first)
    arrivals = [make_job(100 + number, kind, largest_group=2) for number, kind in enumerate(KINDS)]
    # All come once more: a full cluster is where jobs share.
    arrivals += [dataclasses.replace(job, job_id=200 + job.job_id) for job in first.jobs]
    second = feed_back(first, plan, new_jobs=arrivals, now_s=first.now_s + 360)
    later = policy.plan(second)
    for request, found in ((first, plan), (second, later)):
        assert not broken_laws(request, found)
        assert not policy.supports_packing or not (found.groups or any(solo.gpus for solo in found.solo))
        if not policy.elastic:
            most = 2 if name in PAIRS_AT_MOST else 4
            check_plan(request, found, most=most, preemption=policy.rules.preemption, min_speed=min_speed)
    assert policy.plan(shuffled(second, rng)) == later


def test_a_group_takes_as_many_gpus_as_one_member():
    jobs = [make_job(number, kind, gpu_count=2) for number, kind in enumerate(KINDS, start=1)]
    plan = MuriL().plan(make_request(jobs, [make_node("n1", 3, gpu_count=4)]))
    assert [(group.gpu_count, len(group.members)) for group in plan.groups] == [(2, 4)]


def test_a_group_that_finds_no_memory_is_dissolved():
    jobs = [make_job(number, kind, gpu_count=2) for number, kind in enumerate([*KINDS, *KINDS], start=1)]
    nodes = [make_node("a", 2, gpu_mem_gib=80.0), make_node("b", 2, gpu_mem_gib=1.5)]
    plan = MuriL().plan(make_request(jobs, nodes))
    assert [group.node for group in plan.groups] == ["a"]
    assert [solo.node for solo in plan.solo] == ["b"]


def test_reasons_for_running_alone_tell_why():
    nodes = [make_node("n1", 2)]
    roomy = MuriL().plan(make_request([make_job(1), make_job(2, "cpu")], nodes))
    assert "there is room for every job" in str(roomy.solo[0].reasons[1])
    lonely = MuriL().plan(make_request([make_job(1), make_job(2), make_job(3, user="bob"), make_job(4)], nodes))
    assert "no other job that may share with it waits (user bob" in str(lonely.solo[0].reasons[1])


def test_a_job_without_a_profile_waits_for_one_where_it_could_share_and_not_without_end():
    request = make_request([make_job(1, None, submit_s=0)], [make_node("n1", 2)], now_s=61)
    (item,) = MuriL().plan(request).waiting
    assert sentences(item.reasons) == ("waits for a profile of its model",)
    for policy in (Fifo(), MuriL(PolicyOptions(max_wait_s=60))):
        assert [solo.job_id for solo in policy.plan(request).solo] == [1]


def test_a_job_that_must_run_alone_says_why():
    job = make_job(1, "gpu", groupable=False, alone_reason="it was submitted with alone=1")
    (solo,) = MuriL().plan(make_request([job, make_job(2, "cpu")], [make_node("n1", 1)])).solo
    assert (solo.job_id, solo.node) == (1, "n1")
    assert "it was submitted with alone=1" in sentences(solo.reasons)


def test_a_job_larger_than_a_node_is_left_to_slurm():
    jobs = [make_job(1, "gpu", gpu_count=4), make_job(2, "cpu")]
    nodes = [make_node("n1", 2), make_node("n2", 2)]
    plan = MuriL().plan(make_request(jobs, nodes))
    assert "larger than a node" in str(plan.solo[0].reasons[0])
    assert [item.job_id for item in plan.waiting] == [2]  # the four free GPUs are spoken for


def test_a_job_larger_than_a_node_holds_nothing_while_it_cannot_start():
    jobs = [make_job(1, "gpu", gpu_count=8), make_job(2, "cpu")]
    plan = MuriL().plan(make_request(jobs, [make_node("n1", 2), make_node("n2", 2)]))
    assert [(solo.job_id, solo.node) for solo in plan.solo] == [(1, ""), (2, "n1")]


def test_nodes_of_unknown_size_hold_no_large_job_forever():
    nodes = [make_node("n1", 2, gpu_count=0), make_node("n2", 2, gpu_count=0)]
    alone = make_job(1, None, gpu_count=4, groupable=False, alone_reason="it asks for two nodes")
    assert [solo.job_id for solo in MuriL().plan(make_request([alone], nodes)).solo] == [1]


def test_smaller_jobs_pass_a_large_one_until_it_has_waited_too_long():
    jobs = [make_job(1, "gpu", gpu_count=2, submit_s=0), make_job(2, "cpu", submit_s=10)]
    nodes = [make_node("n1", 1)]
    plan = Fifo().plan(make_request(jobs, nodes, now_s=100))
    assert [solo.job_id for solo in plan.solo] == [2]
    assert "it needs 2 GPUs" in str(plan.waiting[0].reasons[0]) or "no GPU is free" in str(plan.waiting[0].reasons[0])
    late = Fifo(PolicyOptions(max_wait_s=3600)).plan(make_request(jobs, nodes, now_s=3601))
    aged = next(solo for solo in late.solo if solo.job_id == 1)
    assert aged.node == ""
    assert str(aged.reasons[0]) == "it has waited 1.0 h, longer than max_wait_s allows (1.0 h)"


@pytest.mark.parametrize(("speed", "grouped"), [(0.9, True), (0.4, False)])
def test_measured_interference_decides_where_there_is_some(speed, grouped):
    table = InterferenceTable((PairSpeed("storage", "gpu", speed, speed),))
    request = make_request([make_job(1, "storage"), make_job(2, "gpu")], [make_node("n1", 1)], interference=table)
    plan = get_policy("auto", {"speed_model": "measured"}).plan(request)
    assert bool(plan.groups) is grouped
    if grouped:
        assert plan.groups[0].speed == {1: speed, 2: speed}


def test_the_garbage_collector_is_left_as_it_was():
    import gc

    request = make_request([make_job(1, "gpu")], [make_node("n1", 1)])
    MuriS().plan(request)
    assert gc.isenabled()
    gc.disable()
    try:
        MuriS().plan(request)
        assert not gc.isenabled()
    finally:
        gc.enable()
