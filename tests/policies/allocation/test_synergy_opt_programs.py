"""Synergy-OPT's two programs, and what they do for jobs on several nodes."""

import dataclasses
import random

import numpy as np
import pytest
from host_builders import HUNGRY, MODEST, job, make_host, scaling, speed_ratios
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from policy_builders import make_request

from muri.policies.allocation.ideal import Need, Room, map_to_nodes, split_jobs
from muri.policies.registry import get_policy
from muri.policies.traits import Demand

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
    request = make_request(jobs, nodes, larger_than_a_node="whole-nodes", **({"interval_s": 300.0} | changes))
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
    request = make_request(jobs, nodes, larger_than_a_node="refuse", interval_s=300.0)
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
