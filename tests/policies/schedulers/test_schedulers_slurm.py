"""The order of Slurm: priority decides who goes first, Muri who shares."""

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_builders import KINDS, cluster_requests, feed_back, make_job, make_node, make_request, requests

from muri.policies.registry import get_policy
from muri.policies.schedulers import slurm
from muri.policies.types import NodeShare, Running, sentences

SLURM = get_policy("muri-slurm")


def started(plan):
    return {job_id for group in plan.groups for job_id in group.members} | {solo.job_id for solo in plan.solo}


def test_a_job_that_no_group_takes_in_keeps_its_turn():
    """Jobs 1 and 2 are not worth sharing; without groups job 2 would have had the second GPU, so it still has."""
    jobs = [make_job(1, "gpu", priority=9), make_job(2, "gpu", priority=8), make_job(3, "cpu", user="bob", priority=7)]
    picky, request = {"min_speedup": 2.0}, make_request(jobs, [make_node("n1", 2)])
    assert started(get_policy("muri-slurm", picky).plan(request)) == {1, 2}
    assert started(get_policy("auto", picky).plan(request)) == {1, 3}


def test_a_job_whose_group_finds_no_memory_keeps_its_turn():
    """Both groups need the large node; the second one's leader gets the small node alone, ahead of bob's job."""
    pairs = [make_job(number, kind, gpu_count=2, priority=9 - number) for number, kind in enumerate([*KINDS, *KINDS])]
    bob = make_job(20, "cpu", user="bob", gpu_count=2, priority=0, groupable=False)
    nodes = [make_node("a", 2, gpu_mem_gib=80.0), make_node("b", 2, gpu_mem_gib=1.5)]
    plan = SLURM.plan(make_request([*pairs, bob], nodes))
    assert 20 not in started(plan)
    assert [group.node for group in plan.groups] == ["a"] and [solo.node for solo in plan.solo] == ["b"]


def test_a_running_job_keeps_its_gpus_from_less_urgent_ones():
    """Job 1 may run on both nodes: its place is counted where job 2 runs, who then seems to have none."""
    jobs = [
        make_job(1, partition="debug", priority=7, preemptible=True, groupable=False),
        make_job(2, priority=7, submit_s=1.0, preemptible=True, groupable=False),
    ]
    nodes = [make_node("n0", 0, partitions=("main", "debug")), make_node("n1", 1, partitions=("debug",))]
    running = [Running((job,), (NodeShare(node, 1),)) for job, node in zip(jobs, ("n1", "n0"), strict=True)]
    request = make_request([make_job(3, groupable=False)], nodes, running=tuple(running))
    plan = SLURM.plan(request)
    assert {solo.job_id: solo.kept for solo in plan.solo} == {1: True, 2: True}
    assert [item.job_id for item in plan.waiting] == [3]


def in_order(job):
    return (*slurm(job), job.submit_s, job.job_id)


@st.composite
def crowded(draw):
    """Jobs of two users that are hardly worth grouping, on few nodes, some with too little memory for groups."""
    jobs = [
        make_job(
            number,
            draw(st.sampled_from(("gpu", "gpu", "cpu"))),
            user=draw(st.sampled_from(("alice", "bob"))),
            gpu_count=draw(st.sampled_from((1, 1, 2))),
            largest_group=draw(st.sampled_from((4, 2, 1))),
            priority=draw(st.integers(0, 5)),
        )
        for number in range(1, draw(st.integers(2, 10)))
    ]
    memory_gib = st.sampled_from((0.0, 1.5, 80.0))
    free = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    nodes = [
        make_node(f"n{index}", count, gpu_mem_gib=draw(memory_gib), gpu_count=4) for index, count in enumerate(free)
    ]
    return make_request(jobs, nodes)


@settings(max_examples=150)
@given(requests() | crowded(), st.sampled_from((SLURM, get_policy("muri-slurm", {"min_speedup": 1.7}))))
def test_no_job_loses_its_turn(request_, policy):
    """Waiting jobs would not fit beside those alone that are more urgent, or that share with one that is."""
    plan = policy.plan(request_)
    if any(not solo.gpus for solo in plan.solo):
        return  # GPUs are set aside for a job that Slurm places
    jobs = {job.job_id: job for job in request_.jobs}
    units = [(min(in_order(jobs[number]) for number in group.members), group.gpus) for group in plan.groups]
    units += [(in_order(jobs[solo.job_id]), solo.gpus) for solo in plan.solo]
    for item in plan.waiting:
        job = jobs[item.job_id]
        if sentences(item.reasons) == ("waits for a profile of its model",):
            continue
        for node in request_.nodes:
            ahead = [share for leader, gpus in units if leader < in_order(job) for share in gpus]
            taken = sum(share.gpu_count for share in ahead if share.node == node.name)
            assert job.partition not in node.partitions or node.free_gpus - taken < job.gpu_count


@settings(max_examples=50)
@given(cluster_requests(preemptible=None, restart_s=False))
def test_another_cycle_on_the_same_cluster_stops_nothing(request_):
    plan = SLURM.plan(request_)
    for _ in range(3):
        request_ = feed_back(request_, plan)
        plan = SLURM.plan(request_)
    after = SLURM.plan(feed_back(request_, plan))
    assert not [item.job_id for item in after.waiting if item.preempted]
