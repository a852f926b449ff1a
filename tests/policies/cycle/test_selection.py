"""How far down the queue a cycle looks."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from policy_builders import make_job, make_node, make_request, requests

from muri.policies import priority
from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.cycle.queue import line_up, pools, select
from muri.policies.options import PolicyOptions


def choose(jobs, nodes, group_size=4, **changes):
    queue = line_up(make_request(jobs, nodes, **changes), priority.fifo, PolicyOptions())
    return select(queue.contenders, FreeGpus(nodes), group_size)


def chosen_ids(selection):
    return {
        (bucket.partition, bucket.gpu_count): ([member.job.job_id for member in choice.members], choice.slots)
        for bucket, choice in selection.buckets.items()
    }


def test_a_reservation_opens_seats_for_the_next_of_its_bucket():
    jobs = [make_job(number) for number in range(1, 10)]
    selection = choose(jobs, [make_node("n1", 2)])
    assert chosen_ids(selection) == {("main", 1): ([1, 2, 3, 4, 5, 6, 7, 8], 2)}
    assert not selection.complete


def test_smaller_jobs_pass_what_finds_no_room():
    jobs = [make_job(1, gpu_count=2), make_job(2, gpu_count=4), make_job(3), make_job(4, gpu_count=2)]
    selection = choose(jobs, [make_node("n1", 3, gpu_count=4)])
    assert chosen_ids(selection) == {("main", 2): ([1, 4], 1), ("main", 1): ([3], 1)}


@given(requests(), st.integers(1, 4))
def test_no_more_is_reserved_than_is_free_and_no_more_selected_than_has_seats(request_, group_size):
    queue = line_up(request_, priority.fifo, PolicyOptions())
    selection = select(queue.contenders, FreeGpus(request_.nodes), group_size)
    reserved = sum(contender.bucket.gpu_count for contender in selection.alone)
    for bucket, choice in selection.buckets.items():
        reserved += bucket.gpu_count * choice.slots
        assert choice.slots <= len(choice.members) <= group_size * choice.slots
        assert [member.rank for member in choice.members] == sorted(member.rank for member in choice.members)
        assert {member.bucket for member in choice.members} == {bucket}
    assert reserved <= sum(node.free_gpus for node in request_.nodes)


def test_pools_share_no_node():
    nodes = [make_node("a", 1, partitions=("p", "q")), make_node("b", 1, partitions=("q", "r")), make_node("c", 1)]
    request = make_request([make_job(1, partition="lonely")], nodes)
    assert pools(request) == (frozenset({"lonely"}), frozenset({"main"}), frozenset({"p", "q", "r"}))
    assert pools(dataclasses.replace(request, jobs=(), nodes=())) == ()
