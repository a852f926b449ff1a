"""AntMan: opportunistic jobs take what guaranteed ones leave over, and never more."""

import dataclasses

import engine_builders
import pytest
from engine_builders import GPU, ends, run
from hypothesis import given
from hypothesis import strategies as st
from policy_builders import KINDS, decided_ids, make_job, make_node, make_profile, make_request, requests

from muri.policies.registry import get_policy
from muri.policies.speed import Shape
from muri.policies.types import NodeShare, Running
from muri.simulator.model import Cluster
from muri_lab.policies.antman import GUARANTEED_SPEED, leftover_speed

ANTMAN = get_policy("antman")


def plan(jobs, free=0, running=(), gpus=8, **changes):
    """One node; what runs holds GPUs of it already."""
    return ANTMAN.plan(make_request(jobs, [make_node("n1", free, gpu_count=gpus)], running=tuple(running), **changes))


def runs(*jobs):
    return Running(jobs, (NodeShare("n1", jobs[0].gpu_count),))


def opportunistic(number, kind="gpu", **changes):
    return make_job(number, kind, opportunistic=True, **changes)


# Shares of the time alone: storage, CPU, GPU, network.
@pytest.mark.parametrize(
    ("guaranteed", "other", "speed"),
    [
        ((0.0, 0.0, 0.6, 0.0), (0.0, 0.0, 0.8, 0.0), 0.5),  # 40 % of the GPU is left, 80 % would be full speed
        ((0.0, 0.0, 0.6, 0.0), (0.0, 0.0, 0.3, 0.0), 1.0),  # 40 % is more than it needs
        ((0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.1, 0.9), 0.0),  # the GPU is never free
        ((0.0, 0.0, 1.0, 0.0), (0.4, 0.6, 0.0, 0.0), 1.0),  # it needs none
        ((0.5, 0.0, 0.25, 0.0), (1.0, 0.0, 1.0, 0.0), 0.5),  # storage is scarcer than the GPU
    ],
)
def test_what_is_left_over(guaranteed, other, speed):
    assert leftover_speed(Shape(guaranteed, 1.0), Shape(other, 1.0)) == pytest.approx(speed)


def test_guaranteed_jobs_get_gpus_first_in_order_of_submission():
    always = make_profile((0.0, 0.0, 1.0, 0.0))  # all use the GPU all the time: nothing is left over
    jobs = [make_job(number, profile=always, opportunistic=number in (1, 3)) for number in range(1, 6)]
    result = plan(jobs, free=4)
    assert [solo.job_id for solo in result.solo] == [2, 4, 5, 1]
    assert [item.job_id for item in result.waiting] == [3]
    assert "no guaranteed job of the same user" in str(result.waiting[0].reasons[1])


def test_an_opportunistic_job_joins_a_running_one_on_its_gpus():
    first = make_job(1, profile=make_profile((0.0, 0.0, 0.6, 0.4)))
    second = opportunistic(2, profile=make_profile((0.2, 0.0, 0.8, 0.0)))
    (group,) = plan([second], running=[runs(first)]).groups
    assert group.members == (1, 2)
    assert group.speed == {1: 1.0, 2: pytest.approx(0.5)}
    assert group.efficiency == pytest.approx((0.1 + 0.0 + 1.0 + 0.4) / 4)
    assert (group.gpus, group.gpu_count, group.kept) == ((NodeShare("n1", 1),), 1, False)
    assert group.joining == (2,)
    assert "2 joins 1, which runs on 1 GPU of n1 and goes on undisturbed" in str(group.reasons[1])
    picky = get_policy("antman", {"min_speedup": 1.6})
    assert not picky.plan(make_request([second], [make_node("n1", 0, gpu_count=8)], running=(runs(first),))).groups


def test_it_joins_whoever_leaves_it_the_most():
    busy = make_job(1, profile=make_profile((0.0, 0.0, 0.9, 0.1)))
    idle = make_job(2, profile=make_profile((0.5, 0.0, 0.5, 0.0)))
    (group,) = plan([opportunistic(3)], running=[runs(busy), runs(idle)]).groups
    assert group.members == (2, 3)


def test_no_more_than_one_of_each():
    jobs = [opportunistic(2, "gpu"), opportunistic(3, "gpu"), make_job(4, "storage")]
    result = plan(jobs, running=[runs(make_job(1, "cpu"))])
    assert [group.members for group in result.groups] == [(1, 2)]
    assert [item.job_id for item in result.waiting] == [4, 3]


def test_a_guaranteed_job_is_not_kept_out_by_an_opportunistic_one():
    (group,) = plan([make_job(1, "cpu")], running=[runs(opportunistic(2, "gpu"))]).groups
    assert (group.members, group.joining) == ((1, 2), (1,))
    assert group.speed[1] == 1.0


@pytest.mark.parametrize(
    "closed", [{"joinable": False}, {"closed_to": {2: "want of time"}}, {"spare_mem_gib": 1.0}], ids=str
)
def test_it_does_not_join_what_is_closed_to_it(closed):
    unit = dataclasses.replace(runs(make_job(1, "cpu")), **closed)
    result = plan([opportunistic(2, mem_gib=2.0)], running=[unit])
    assert [item.job_id for item in result.waiting] == [2]
    assert plan([opportunistic(2, mem_gib=2.0)], running=[runs(make_job(1, "cpu"))]).groups


def test_guaranteed_jobs_are_promised_their_speed_and_others_nothing():
    jobs = [make_job(1), opportunistic(2, min_speed=0.8), make_job(3, min_speed=0.99)]
    running = [runs(make_job(4)), runs(opportunistic(5))]
    assert plan(jobs, free=1, running=running).promises == {1: GUARANTEED_SPEED, 2: 0.0, 3: 0.99}


@pytest.mark.parametrize(
    "changes",
    [
        {"user": "bob"},
        {"gpu_count": 2},
        {"partition": "debug"},
        {"profile": None},
        {"profile": make_profile((0.0, 0.0, 0.0, 0.0), iteration_s=1.0)},
        {"groupable": False, "alone_reason": "asked to"},
        {"profile": make_profile(KINDS["gpu"], mem_gib=8.0)},
    ],
)
def test_whom_it_may_not_join(changes):
    node = make_node("n1", 0, gpu_count=8, gpu_mem_gib=8.0, partitions=("main", "debug"))
    request = make_request([opportunistic(2, **changes)], [node], running=(runs(make_job(1, "cpu")),))
    result = ANTMAN.plan(request)
    assert result.groups == ()
    assert [item.job_id for item in result.waiting] == [2]


def test_a_running_pair_is_kept():
    pair = runs(make_job(1, "cpu"), opportunistic(2, "gpu"))
    (group,) = plan([], running=[pair]).groups
    assert (group.members, group.kept) == ((1, 2), True)


def test_nothing_is_stopped():
    running = runs(opportunistic(2, "gpu", preemptible=True))
    result = plan([make_job(1, None)], running=[running])
    assert [(solo.job_id, solo.kept) for solo in result.solo] == [(2, True)]
    assert [(item.job_id, item.preempted) for item in result.waiting] == [(1, False)]


@st.composite
def busy_clusters(draw):
    """A request whose nodes also run jobs, alone or in pairs, of all kinds."""
    request = draw(requests())
    waiting, running, nodes = [], [], {node.name: node for node in request.nodes}
    jobs = [dataclasses.replace(job, opportunistic=draw(st.booleans())) for job in request.jobs]
    for job in jobs:
        fitting = [
            node for node in nodes.values() if node.free_gpus >= job.gpu_count and job.partition in node.partitions
        ]
        if not fitting or draw(st.booleans()):
            waiting.append(job)
            continue
        node = fitting[0]
        nodes[node.name] = dataclasses.replace(node, free_gpus=node.free_gpus - job.gpu_count)
        running.append(Running((job,), (NodeShare(node.name, job.gpu_count),)))
    return dataclasses.replace(request, jobs=tuple(waiting), nodes=tuple(nodes.values()), running=tuple(running))


@given(busy_clusters())
def test_no_guaranteed_job_is_ever_slowed_and_whatever_runs_stays_where_it_is(request_):
    jobs = {job.job_id: job for job in request_.jobs}
    jobs |= {job.job_id: job for unit in request_.running for job in unit.members}
    result = ANTMAN.plan(request_)
    assert sorted(decided_ids(result)) == sorted(jobs)
    for group in result.groups:
        guaranteed, other = (jobs[job_id] for job_id in group.members)
        assert (guaranteed.opportunistic, other.opportunistic) == (False, True)
        assert group.speed[guaranteed.job_id] == 1.0
        assert 0 < group.speed[other.job_id] <= 1.0
        used = [
            min(1.0, first / guaranteed.profile.iteration_s)
            + group.speed[other.job_id] * min(1.0, second / other.profile.iteration_s)
            for first, second in zip(guaranteed.profile.stage_s, other.profile.stage_s, strict=True)
        ]
        assert max(used) <= 1 + 1e-9  # so no resource is promised twice
        assert (guaranteed.partition, guaranteed.gpu_count) == (other.partition, other.gpu_count)

    place = {solo.job_id: solo.gpus for solo in result.solo}
    place |= {job_id: group.gpus for group in result.groups for job_id in group.members}
    for unit in request_.running:
        for job in unit.members:
            assert place[job.job_id] == unit.gpus
    started = {solo.job_id for solo in result.solo if not solo.kept and solo.gpus}
    for node in request_.nodes:
        used = sum(share.gpu_count for job_id in started for share in place[job_id] if share.node == node.name)
        assert used <= node.free_gpus


def test_a_job_of_several_nodes_gets_its_share_of_each():
    nodes = [make_node(name, 2, gpu_count=2) for name in ("a", "b")]
    (solo,) = ANTMAN.plan(make_request([make_job(1, gpu_count=2, node_count=2)], nodes)).solo
    assert solo.gpus == (NodeShare("a", 1), NodeShare("b", 1))
    # Two on each of two nodes is not more than a node has, though four would be.
    (solo,) = ANTMAN.plan(make_request([make_job(1, gpu_count=4, node_count=2)], nodes)).solo
    assert solo.gpus == (NodeShare("a", 2), NodeShare("b", 2))


def test_antman_lets_a_guaranteed_job_run_on_undisturbed() -> None:
    jobs = [
        engine_builders.job(1, 0.0, 1000.0, (0.0, 0.5, 0.5, 0.0)),
        engine_builders.job(2, 100.0, 100.0, GPU, opportunistic=True),
    ]
    result = run(jobs, "antman", Cluster(1, 1), restart_s=30.0)
    # Half of the GPU's time is left over for job 2.
    assert ends(result) == {1: 1000.0, 2: pytest.approx(300.0)}
    assert [record.restarts for record in result.records] == [0, 0]
