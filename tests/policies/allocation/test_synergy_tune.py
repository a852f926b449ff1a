"""Synergy's mechanisms, step by step, on clusters small enough to be checked by hand.

Nodes have 3 CPUs and 60 GiB for each GPU. `HUNGRY` jobs ask for 6 CPUs and 10 GiB per GPU and are then twice as fast as
with the proportional share; `MODEST` ones ask for 1 CPU and 10 GiB.
"""

import dataclasses
import math

import pytest
from host_builders import HUNGRY, MODEST, job, make_host, nodes_by_job, plan_of, request_of, scaling, shares_by_job
from policy_builders import feed_back, make_request

from muri.policies.registry import get_policy
from muri.policies.traits import Demand
from muri.policies.types import CpuMemShare, NodeShare, Running, sentences

FAIR = (3, 60)


def said(plan, job_id):
    (decision,) = [item for item in (*plan.solo, *plan.waiting) if item.job_id == job_id]
    return " / ".join(sentences(decision.reasons))


def kept(plan):
    return {solo.job_id: solo.kept for solo in plan.solo}


def test_step_1_everybody_gets_his_demand():
    plan = plan_of("synergy", [job(1, HUNGRY), job(2, MODEST), job(3, MODEST)], [make_host("a")])
    assert shares_by_job(plan) == {1: (6, 10), 2: (1, 10), 3: (1, 10)}
    assert "it gets 6 CPUs and 10 GiB of memory / that is all it can use: 2.00 × its speed" in said(plan, 1)


def test_step_1_the_server_with_the_least_left_is_the_best_fit():
    nodes = [make_host("a"), make_host("b", 2, cpus=12.0)]
    assert nodes_by_job(plan_of("synergy", [job(1, HUNGRY)], nodes)) == {1: "b"}  # 2 GPUs are tighter than 4
    nodes = [make_host("a"), make_host("b", free_cpus=7.0)]
    assert nodes_by_job(plan_of("synergy", [job(1, HUNGRY)], nodes)) == {1: "b"}  # as many GPUs, fewer CPUs
    nodes = [make_host("a"), make_host("b", free_cpus=5.0)]
    assert nodes_by_job(plan_of("synergy", [job(1, HUNGRY)], nodes)) == {1: "a"}  # b has not 6 CPUs


def test_the_most_demanding_choose_first_whatever_the_order_of_the_queue():
    # By GPUs: 3. It takes b, the tightest. Then by CPUs: 2 takes 6 of the 12 on a. Then by memory: 4, and 1 last.
    jobs = [job(1, MODEST), job(2, HUNGRY), job(3, MODEST, gpu_count=2), job(4, scaling(1, 120.0))]
    plan = plan_of("synergy", jobs, [make_host("a"), make_host("b", 2, cpus=6.0, mem_gib=120.0)])
    assert nodes_by_job(plan) == {1: "a", 2: "a", 3: "b", 4: "a"}
    assert shares_by_job(plan) == {1: (1, 10), 2: (6, 10), 3: (2, 20), 4: (1, 120)}


def test_step_2_what_fits_nowhere_gets_the_proportional_share():
    # Job 1 takes 6 of 9 free CPUs. 3 are left for job 2: not its demand, but its share.
    plan = plan_of("synergy", [job(1, HUNGRY), job(2, HUNGRY)], [make_host("a", free_cpus=9.0)])
    assert shares_by_job(plan) == {1: (6, 10), 2: FAIR}
    assert "it could use 6 CPUs and 10 GiB, 2.00 × as fast" in said(plan, 2)


def test_step_3_those_with_more_than_their_share_make_room():
    # 1 and 2 take 6 of the 12 CPUs each. Nothing is left for 3, so one of them goes back to 3: the less urgent.
    plan = plan_of("synergy", [job(number, HUNGRY) for number in (1, 2, 3)], [make_host("a")])
    assert shares_by_job(plan) == {1: (6, 10), 2: FAIR, 3: FAIR}
    assert "it gave up its surplus above the GPU-proportional share for job 3" in said(plan, 2)
    # 4 needs 3 more: 1 goes back, too.
    plan = plan_of("synergy", [job(number, HUNGRY) for number in (1, 2, 3, 4)], [make_host("a")])
    assert shares_by_job(plan) == dict.fromkeys((1, 2, 3, 4), FAIR)


def test_step_3_takes_from_those_with_the_most_first():
    # 2 takes 12 of the 18 CPUs and 1 takes 6. For 3, it is 2 that gives way; 11 CPUs are left for it then, and its
    # matrix has steps of 3, 6 and 12.
    jobs = [job(1, HUNGRY), job(2, scaling(12)), job(3, MODEST)]
    plan = plan_of("synergy", jobs, [make_host("a", 6, cpus=18.0, mem_gib=360.0)])
    assert shares_by_job(plan) == {1: (6, 10), 2: (6, 10), 3: (1, 10)}


def test_step_3_restarts_nobody_where_a_newcomer_has_enough():
    policy, request = get_policy("synergy"), request_of([job(1, HUNGRY)], [make_host("a")])
    request = feed_back(request, policy.plan(request), new_jobs=(job(2, HUNGRY), job(3, MODEST)))
    plan = policy.plan(request)
    assert shares_by_job(plan) == {1: (6, 10), 2: FAIR, 3: (1, 10)}
    assert kept(plan) == {1: True, 2: False, 3: False}


def test_step_3_takes_nothing_in_vain():
    # 9 holds 10 of the 12 CPUs and cannot be stopped: no job can make room for 1, which must have 3 at least.
    fixed = Running((job(9, HUNGRY, preemptible=False),), (NodeShare("a", 1),), {9: (CpuMemShare("a", 10.0, 10.0),)})
    node = make_host("a", free_gpus=3, free_cpus=2.0, free_mem_gib=230.0)
    plan = plan_of("synergy", [job(1, HUNGRY), job(2, MODEST)], [node], running=(fixed,))
    assert [item.job_id for item in plan.waiting] == [1]
    assert "has 1 GPU free, but not with 6 CPUs and 10 GiB of memory beside" in said(plan, 1)
    assert shares_by_job(plan) == {9: (10, 10), 2: (1, 10)}  # who asks for little passes it
    assert kept(plan) == {9: True, 2: False}


def test_a_job_of_unknown_sensitivity_gets_its_proportional_share():
    plan = plan_of("synergy", [job(1), job(2, MODEST)], [make_host("a")])
    assert shares_by_job(plan) == {1: FAIR, 2: (1, 10)}
    assert "nothing is known of what CPUs and memory do for it" in said(plan, 1)


@pytest.mark.parametrize("cpus", [0.0, 12.0])
def test_what_a_node_does_not_tell_is_not_given_out(cpus):
    plan = plan_of("synergy", [job(1, HUNGRY)], [make_host("a", cpus=cpus, mem_gib=0.0)])
    assert shares_by_job(plan) == ({1: (6, 0)} if cpus else {})
    assert ("neither CPUs nor memory" in said(plan, 1)) == (not cpus)


def test_a_share_of_nothing_is_kept_as_it_is():
    # It needs no memory to speak of, and the node tells nothing else.
    modest = dataclasses.replace(MODEST, demand=Demand(1.0, 0.0))
    request = make_request([job(1, modest)], [make_host("a", cpus=0.0)])
    first = get_policy("synergy", {"mechanism": "greedy"}).plan(request)
    assert shares_by_job(first) == {1: (0.0, 0.0)}
    assert "it gets neither CPUs nor memory" in sentences(first.solo[0].reasons)
    second = get_policy("synergy", {"mechanism": "greedy"}).plan(feed_back(request, first, now_s=1300.0))
    assert [solo.kept for solo in second.solo] == [True]


def test_fair_is_what_a_gpu_of_the_own_node_has():
    # a has 2 CPUs per GPU, b has 6: job 1 demands more than either has.
    wide = scaling(12)
    nodes = [make_host("a", 2, cpus=4.0), make_host("b", 2, cpus=12.0)]
    jobs = [job(number, wide) for number in (1, 2, 3, 4)]
    plan = plan_of("synergy", jobs, nodes)
    by_node = {nodes_by_job(plan)[job_id]: share for job_id, share in shares_by_job(plan).items()}
    assert by_node == {"a": (2, 120), "b": (6, 120)}


def test_a_demand_that_would_be_slower_than_the_share_is_not_believed():
    # The matrix grows up to 6 CPUs, but the demand says 1.
    wrong = scaling(6)
    wrong = type(wrong)(wrong.cpus, wrong.mem_gib, wrong.throughput, type(wrong.demand)(1.0, 10.0))
    plan = plan_of("synergy", [job(1, wrong)], [make_host("a")])
    assert shares_by_job(plan) == {1: (3, 10)}


def test_nodes_of_one_job_give_the_same_for_each_gpu():
    # 6 GPUs: 4 of one node, 2 of the other. With 3 CPUs per GPU on the full one, 3 it is on the other.
    plan = plan_of("synergy", [job(1, HUNGRY, gpu_count=6)], [make_host("a"), make_host("b")])
    assert plan.cpu_mem_shares == {1: (CpuMemShare("a", 12.0, 40.0), CpuMemShare("b", 6.0, 20.0))}
    plan = plan_of("synergy", [job(1, HUNGRY, gpu_count=2, node_count=2)], [make_host("a"), make_host("b")])
    assert plan.cpu_mem_shares == {1: (CpuMemShare("a", 6.0, 10.0), CpuMemShare("b", 6.0, 10.0))}


def test_a_running_job_keeps_its_share_until_somebody_needs_it():
    policy = get_policy("synergy")
    request = request_of([job(number, HUNGRY, restart_s=30.0) for number in (1, 2)], [make_host("a")])
    first = policy.plan(request)
    assert shares_by_job(first) == {1: (6, 10), 2: (6, 10)}
    request = feed_back(request, first)
    assert kept(policy.plan(request)) == {1: True, 2: True}
    request = feed_back(request, first, new_jobs=(job(3, MODEST),))
    squeezed = policy.plan(request)
    assert shares_by_job(squeezed) == {1: (6, 10), 2: FAIR, 3: (1, 10)}
    assert kept(squeezed) == {1: True, 2: False, 3: False}
    assert "its share changes: 6 CPUs and 10 GiB of memory before, 3 CPUs and 60 GiB of memory now" in said(squeezed, 2)


@pytest.mark.parametrize(("restart_s", "grows"), [(30.0, True), (149.0, True), (151.0, False)])
def test_a_running_job_grows_again_if_that_pays_for_its_restart(restart_s, grows):
    # Twice as fast for 300 s less the restart, or as fast as now for 300 s: it pays below 150 s.
    running = Running((job(1, HUNGRY, restart_s=restart_s),), (NodeShare("a", 1),), {1: (CpuMemShare("a", 3.0, 60.0),)})
    node = make_host("a", free_gpus=3, free_cpus=9.0, free_mem_gib=180.0)
    plan = plan_of("synergy", [], [node], running=(running,))
    assert shares_by_job(plan) == {1: (6, 10) if grows else FAIR}
    assert kept(plan) == {1: not grows}


def test_a_job_that_waits_for_cpus_too_long_goes_to_slurm():
    running = Running((job(1, HUNGRY, preemptible=False),), (NodeShare("a", 1),), {1: (CpuMemShare("a", 12.0, 60.0),)})
    node = make_host("a", free_gpus=3, free_cpus=0.0, free_mem_gib=180.0)
    request = make_request([job(2, MODEST)], [node], running=(running,), now_s=1e6)
    (solo,) = [solo for solo in get_policy("synergy", {"max_wait_s": 60.0}).plan(request).solo if solo.job_id == 2]
    assert solo.gpus == ()
    assert "longer than max_wait_s allows" in str(solo.reasons[0])


def test_greedy_skips_what_does_not_fit():
    # 1 and 2 take all CPUs; 3 waits although 2 GPUs are free. By name, not by fit: a goes first.
    jobs = [job(1, HUNGRY), job(2, HUNGRY), job(3, HUNGRY), job(4, HUNGRY)]
    plan = plan_of("synergy", jobs, [make_host("a"), make_host("b", 1, cpus=3.0)], {"mechanism": "greedy"})
    assert shares_by_job(plan) == {1: (6, 10), 2: (6, 10), 3: (3, 10)}  # b has 3 CPUs in all, so 3 asks for no more
    assert [item.job_id for item in plan.waiting] == [4]


def test_greedy_stops_the_least_urgent_for_a_more_urgent_one():
    policy = get_policy("synergy", {"mechanism": "greedy", "order": "srtf"})
    request = request_of([job(1, HUNGRY, remaining_s=50.0), job(2, HUNGRY, remaining_s=90.0)], [make_host("a")])
    request = feed_back(request, policy.plan(request), new_jobs=(job(3, HUNGRY, remaining_s=10.0),))
    plan = policy.plan(request)
    assert kept(plan) == {1: True, 3: False}
    assert [(item.job_id, item.preempted) for item in plan.waiting] == [(2, True)]


@pytest.mark.parametrize("order", ["fifo", "srtf", "las", "ftf"])
def test_the_four_orders(order):
    # One GPU. Submitted first: 1; shortest: 2; least served: 3; worst ρ = (waited + remaining) / whole: 4.
    jobs = [
        job(1, submit_s=0.0, remaining_s=4000.0, attained_gpu_s=900.0),
        job(2, submit_s=500.0, remaining_s=100.0, attained_gpu_s=800.0),
        job(3, submit_s=900.0, remaining_s=900.0, attained_gpu_s=0.0),
        job(4, submit_s=200.0, remaining_s=150.0, attained_gpu_s=10.0),
    ]
    plan = plan_of("synergy", jobs, [make_host("a", 1)], {"order": order}, now_s=1000.0)
    assert [solo.job_id for solo in plan.solo] == [{"fifo": 1, "srtf": 2, "las": 3, "ftf": 4}[order]]
    assert math.isclose(plan.cpu_mem_shares[plan.solo[0].job_id][0].cpus, 12.0)
