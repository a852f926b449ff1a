"""Synergy-OPT beside TUNE, its two programs, and jobs on several nodes."""

import dataclasses
import random
from functools import partial

import numpy as np
import pytest
from host_builders import HUNGRY, MODEST, job, make_host, plan_of, request_of, scaling, shares_by_job, speed_ratios
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from policy_builders import feed_back, make_request

from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy
from muri.policies.schedulers import fifo
from muri.policies.siblings.mechanisms import tune
from muri.policies.siblings.synergy import Way, plan_allocation
from muri.policies.traits import Demand
from muri.policies.types import CpuMemShare
from muri_lab.policies.ideal import Need, Room, map_to_nodes, split_jobs
from muri_lab.policies.synergy_opt import optimal

FAIR = (3, 60)
ROOM = Room(8, 24.0, 500.0)


def crowd(seed, servers, room=ROOM):
    """Jobs of 1 to 16 GPUs whose GPUs fill the servers and whose CPUs and memory nearly do."""
    draw = random.Random(seed)
    sizes, left = [], int(servers * room.gpus)
    while left:
        sizes.append(min(left, draw.choice((1, 1, 2, 3, 5, 6, 8, 16))))
        left -= sizes[-1]
    weights = np.array([[draw.uniform(0.1, 3.0) * size for _ in range(2)] for size in sizes])
    amounts = weights / weights.sum(axis=0) * servers * np.array(room[1:]) * draw.choice((0.9, 1.0))
    everywhere = range(servers)
    return [Need(size, Demand(*pair), everywhere) for size, pair in zip(sizes, amounts.tolist(), strict=True)]


@examples(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), servers=st.integers(1, 16))
def test_at_most_three_jobs_for_each_server_are_split(seed, servers):
    needs, rooms = crowd(seed, servers), [ROOM] * servers
    laid = map_to_nodes(needs, rooms)
    assert laid is not None
    assert laid.sum(axis=1) == pytest.approx(np.ones(len(needs)))
    amounts = np.array([(need.gpus, *need.cpu_mem) for need in needs])
    assert (laid.T @ amounts <= np.array(rooms) * (1 + 1e-6)).all()
    assert split_jobs(laid) <= 3 * servers
    # What the proof says: no more parts than rows of the program.
    assert int((laid > 0).sum()) <= len(needs) + 3 * servers


def plans(jobs, nodes, **changes):
    request = request_of(jobs, nodes, **changes)
    return [get_policy(name).plan(request) for name in ("synergy", "synergy-opt")]


def total_cpus(plan, job_id):
    return sum(share.cpus for share in plan.cpu_mem_shares[job_id])


def test_jobs_on_several_nodes_get_part_of_what_they_demand():
    # TUNE serves 1 first, with all 12 CPUs of each node; for 2 it goes back to its share, and 2 gets no more than that.
    slow = dataclasses.replace(scaling(12), throughput=tuple((1.0 + index * 0.1,) * 3 for index in range(5)))
    jobs = [job(1, slow, gpu_count=2, node_count=2), job(2, HUNGRY, gpu_count=2, node_count=2)]
    tuned, best = plans(jobs, [make_host("a", 4), make_host("b", 4)])
    assert [total_cpus(tuned, number) for number in (1, 2)] == [6, 6]
    assert [total_cpus(best, number) for number in (1, 2)] == [12, 12]
    assert best.certificate.gap < 1e-6


def test_the_second_program_finds_nodes_with_more_cpus():
    # Best fit by GPUs takes a and b, whose CPUs are nearly gone; on c and d there are enough.
    nodes = [make_host(name, 4, free_gpus=2, free_cpus=6.0) for name in "ab"] + [make_host(name, 4) for name in "cd"]
    tuned, best = plans([job(1, HUNGRY, gpu_count=4, node_count=2)], nodes)
    assert [share.node for share in tuned.solo[0].gpus] == ["a", "b"]
    assert total_cpus(tuned, 1) == 12
    assert total_cpus(best, 1) == 24
    assert [share.node for share in best.solo[0].gpus] == ["c", "d"]


@examples(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_opt_is_never_worse_than_tune_and_below_its_bound(seed):
    draw = random.Random(seed)
    jobs = []
    for number in range(1, 9):
        node_count = draw.choice((1, 1, 2))
        sensitivity = draw.choice((HUNGRY, MODEST, scaling(12), scaling(3, 120.0), None))
        jobs.append(job(number, sensitivity, gpu_count=node_count * draw.choice((1, 2)), node_count=node_count))
    nodes = [make_host(name, 4) for name in "abc"]
    request = make_request(jobs, nodes, larger_than_a_node="whole-nodes", interval_s=300.0)
    best = get_policy("synergy-opt").plan(request)
    tuned = get_policy("synergy").plan(request)
    assert {solo.job_id for solo in tuned.solo if solo.gpus} == {solo.job_id for solo in best.solo if solo.gpus}
    worth = [worth_of(request, plan) for plan in (tuned, best)]
    assert worth[1] >= worth[0] * (1 - 1e-6)
    assert best.certificate.value == pytest.approx(worth[1])
    assert best.certificate.value <= best.certificate.upper_bound * (1 + 1e-9)


def worth_of(request, plan):
    """The speeds of all jobs relative to 3 CPUs and 60 GiB for each GPU."""
    slowest = {}
    for (job_id, _), (reached, usual) in speed_ratios(request, plan).items():
        slowest[job_id] = min(slowest.get(job_id, float("inf")), reached / usual)
    return sum(slowest.get(solo.job_id, 1.0) for solo in plan.solo if solo.gpus)


@pytest.mark.parametrize("sensitivity", [None, HUNGRY])
def test_a_running_job_may_be_on_a_node_that_tells_nothing_and_on_one_that_does(sensitivity):
    nodes = [make_host("a", cpus=0.0, mem_gib=0.0), make_host("b")]
    jobs = [job(1, sensitivity, gpu_count=2, node_count=2), job(2, HUNGRY)]
    request = make_request(jobs, nodes, larger_than_a_node="whole-nodes")
    policy = get_policy("synergy-opt")
    first = policy.plan(request)
    assert first.cpu_mem_shares[1] == (CpuMemShare("b", *((6, 10) if sensitivity else FAIR)),)
    second = policy.plan(feed_back(request, first, now_s=1300.0))
    assert [solo.kept for solo in second.solo] == [True, True]


def test_opt_gives_out_in_part_what_tune_gives_whole_or_not_at_all():
    # 16 CPUs, 4 per GPU. TUNE: 6, 6 and the share of 4, which is all. With 15 (3.75 per GPU) 1 and 2 take 6 each, 3 are
    # left for job 3, too few: one goes back to 3.75, and 1.5 are left over. OPT gives out 6 + 6 (or 3.75) in the steps
    # of the matrix, 3 and 6, and the share.
    jobs = [job(number, HUNGRY) for number in (1, 2, 3)]
    tuned, best = (plan_of(name, jobs, [make_host("a", cpus=15.0)]) for name in ("synergy", "synergy-opt"))
    assert shares_by_job(tuned) == {1: (6, 10), 2: (3.75, 60), 3: (3.75, 60)}
    # Speeds are min(CPUs, 6) / 3.75. 6 + 3.75 + 3.75 is the best choice, and no plan is worth more than 15 / 3.75.
    assert best.certificate.value == pytest.approx(13.5 / 3.75)
    assert best.certificate.value <= best.certificate.upper_bound <= 4.0


def test_opt_looks_at_what_cpus_are_worth_not_at_who_asks_for_most():
    # TUNE serves 3 first, which asks for 12 CPUs and makes little of them; then it has to give way to the others.
    slow = scaling(12)
    slow = type(slow)(slow.cpus, slow.mem_gib, tuple((1.0 + index * 0.1,) * 3 for index in range(5)), slow.demand)
    jobs = [job(1, HUNGRY), job(2, HUNGRY), job(3, slow), job(4, MODEST)]
    nodes = [make_host("a", 6, cpus=18.0, mem_gib=360.0)]
    tuned, best = (plan_of(name, jobs, nodes) for name in ("synergy", "synergy-opt"))
    assert shares_by_job(tuned)[3] == (3, 60)
    assert {job_id: shares_by_job(best)[job_id][0] for job_id in (1, 2, 4)} == {1: 6, 2: 6, 4: 1}
    assert shares_by_job(best)[3][0] == 3  # 5 CPUs are left, and the matrix has no step between 3 and 6


def test_opt_out_of_time_is_tune_with_a_bound():
    request = request_of([job(number, HUNGRY) for number in (1, 2, 3)], [make_host("a", cpus=15.0)])
    rules = PolicyOptions(max_group_size=1)
    tuned, stopped = (
        plan_allocation(request, "any", fifo, rules, Way(mechanism))
        for mechanism in (tune, partial(optimal, time_limit_s=0.0))
    )
    assert stopped.solo == tuned.solo
    assert stopped.cpu_mem_shares == tuned.cpu_mem_shares
    # 13.5 of 15 CPUs are in use, and the first program proves that no plan is worth more than all 15.
    assert (stopped.certificate.value, stopped.certificate.upper_bound) == pytest.approx((13.5 / 3.75, 15 / 3.75))
