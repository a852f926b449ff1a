"""What of a plan's joins can be done now: a member that moves to another group has to stop first."""

from muri.policies.types import FreeNode, Group, NodeShare, Plan, PlanJob, PlanRequest, Running
from muri.slurm_plugin.planning.running import settle

SHARES = (NodeShare("n1", 1),)


def job(job_id: int, *, preemptible: bool = True) -> PlanJob:
    return PlanJob(job_id, "ann", "main", 1, 0.0, preemptible=preemptible)


def settled(joining: tuple[int, ...], *, preemptible: bool = True):
    running = (
        Running((job(1),), SHARES),
        Running((job(2, preemptible=preemptible),), (NodeShare("n2", 1),)),
    )
    nodes = (FreeNode("n1", ("main",), 0, gpu_count=1), FreeNode("n2", ("main",), 0, gpu_count=1))
    members = (1, *joining)
    group = Group(members, SHARES, 1, 0.0, 0.5, dict.fromkeys(members, 0.9), joining=joining)
    return settle(Plan("test", groups=(group,)), PlanRequest((job(3),), nodes, 0.0, running=running))


def test_a_waiting_job_joins_at_once():
    found = settled((3,))
    assert [(group.members, group.joining) for group in found.plan.groups] == [((1, 3), (3,))]
    assert not found.stops


def test_a_member_that_moves_stops_first_and_others_join_meanwhile():
    found = settled((2, 3))
    assert [(group.members, group.joining) for group in found.plan.groups] == [((1, 3), (3,))]
    assert [item.job_id for item in found.stops] == [2]
    found = settled((2,))
    assert not found.plan.groups
    assert [item.job_id for item in found.stops] == [2]


def test_nobody_is_moved_who_must_not_be_stopped():
    found = settled((2,), preemptible=False)
    assert not found.plan.groups
    assert not found.stops
