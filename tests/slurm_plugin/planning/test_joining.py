"""Jobs that join running groups: who would get too little time, what is done when, and who is told to move."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from at_work import HOUR_S, behind_pilot, candidate, cycle_of, decided, of_kind
from fake_slurm import NOW_S, FakeSlurm, make_node

from muri.policies.types import FreeNode, Group, NodeShare, Plan, PlanJob, PlanRequest, Policy, Running
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.actions import Join, ReleaseSolo
from muri.slurm_plugin.planning.asking import ASK_AGAIN_S, Proposals, proposed_moves, settle
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.planning.plan_actions import idle_gpus_first
from muri.slurm_plugin.planning.repairs import groups_by_pilot
from muri.slurm_plugin.planning.slurm_requests import longer_limit_change, original_request
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, Node, Reservation
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.limits import PartitionLimits, SiteLimits
from muri.slurm_plugin.records.roles import read_job


def joiner(job_id: int = 1, **changes: Any) -> Job:
    return candidate(job_id, "m2", **{"time_limit_s": HOUR_S, **changes})


def group(number: int, own_s: int = 2 * HOUR_S, limit_s: int = 2 * HOUR_S, pilot_s: int = 9000) -> list[Job]:
    """A pilot and its only member on a node of their own."""
    return behind_pilot(number, candidate(2000 + number, time_limit_s=limit_s), own_s=own_s, time_limit_s=pilot_s)


def full_nodes(count: int) -> list[Node]:
    return [make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=6) for number in range(count)]


def joins(decision: Decision) -> dict[int, int]:
    """Pilots by the jobs that join them."""
    return {action.member.job_id: action.pilot for action in of_kind(decision, Join)}


def why_waiting(decision: Decision, job_id: int) -> str:
    """The last reason why a job waits."""
    return str(next(item.reasons[-1] for item in decision.plan.waiting if item.job_id == job_id))


def maintenance(in_s: float, nodes: str = "n0") -> Reservation:
    return Reservation("maint", nodes, NOW_S + in_s, NOW_S + in_s + 9 * HOUR_S, ("MAINT",))


def test_a_join_extends_nobody_into_a_reservation():
    """The joiner alone would end in time; the member beside it, and the pilot, would not."""
    jobs, nodes = [joiner(), *group(0)], full_nodes(1)
    assert joins(decided(jobs, nodes)) == {1: 1000}
    refused = decided(jobs, nodes, maintenance(9000))
    assert joins(refused) == {}
    assert why_waiting(refused, 1) == (
        "it cannot join what runs: its group could not take so long: it would not end before reservation maint"
    )
    (join,) = of_kind(decided(jobs, nodes, maintenance(4 * HOUR_S)), Join)
    assert join.others == ((2000, 4 * HOUR_S),)
    assert join.pilot_limit_s == 4 * HOUR_S + 600


@pytest.mark.parametrize(("end_s", "joined"), [(2 * HOUR_S + 1, True), (2 * HOUR_S - 1, False)])
def test_where_nobody_else_is_extended_the_joiner_itself_has_to_end_in_time(end_s, joined):
    long_group = group(0, limit_s=4 * HOUR_S, pilot_s=5 * HOUR_S)
    found = decided([joiner(), *long_group], full_nodes(1), maintenance(end_s))
    assert bool(joins(found)) is joined


def test_the_pilot_alone_must_not_be_extended_into_a_reservation():
    """All members end before it; the pilot outlives them by ten minutes."""
    jobs = [joiner(), *group(0, own_s=HOUR_S, limit_s=HOUR_S, pilot_s=HOUR_S + 600)]
    assert joins(decided(jobs, full_nodes(1), maintenance(2 * HOUR_S + 500))) == {}
    assert joins(decided(jobs, full_nodes(1), maintenance(2 * HOUR_S + 601))) == {1: 1000}


@pytest.mark.parametrize(("allowed_h", "joined"), [(4, False), (5, True)])
def test_nobody_joins_where_a_partner_could_not_get_twice_its_time(allowed_h, joined):
    limits = SiteLimits(partitions=(PartitionLimits("main", max_time_s=allowed_h * HOUR_S),))
    assert bool(joins(decided([joiner(time_limit_s=600), *group(0)], full_nodes(1), limits=limits))) is joined


@pytest.mark.parametrize(("state", "members"), [("done", [1, 2]), ("abandoned", [1])])
def test_who_did_not_come_in_the_end_is_no_member(state, members):
    start = Intent("g", GROUP, {"members": [{"job_id": 1}]}, "done", 1000, 0.0)
    join = Intent("j", JOIN, {"pilot": 1000, "member": {"job_id": 2}}, state, None, 1.0)
    assert [each["job_id"] for each in groups_by_pilot((start, join))[1000].payload["members"]] == members


@pytest.mark.parametrize(("given_s", "joined"), [(2 * HOUR_S, True), (3 * HOUR_S, False), (HOUR_S, False), (0, True)])
def test_nobody_joins_a_group_whose_members_time_limit_somebody_has_changed(given_s, joined):
    """To join would make it longer again; an older Muri wrote 0, which tells nothing."""
    pilot, member = group(0)
    state = tags.parse_state(member.admin_comment)
    told = tags.format_state(replace(state, limit_s=given_s))
    member = replace(member, admin_comment=tags.with_token(member.admin_comment, tags.STATE_PREFIX, told))
    assert bool(joins(decided([joiner(), pilot, member], full_nodes(1)))) is joined


def test_a_longer_limit_for_a_partner_does_not_look_like_somebody_elses():
    _, member = group(0)
    change = longer_limit_change(read_job(member), 3 * HOUR_S - 30)
    longer = read_job(replace(member, time_limit_s=3 * HOUR_S, admin_comment=change.admin_comment))
    assert change.time_limit_s == 3 * HOUR_S
    assert not longer.has_changed_limit
    assert original_request(longer).time_limit_s == 2 * HOUR_S
    pilot = longer.membership.pilot
    waits = {"": "", f"after:{pilot}": "", "afterok:7": None, f"after:{pilot},afterok:7": None}
    assert {text: original_request(replace(longer, dependency=text)).dependency for text in waits} == waits


def test_reservations_elsewhere_or_of_the_job_itself_do_not_matter():
    jobs = [joiner(), *group(0)]
    assert joins(decided(jobs, full_nodes(2), maintenance(9000, "n1"))) == {1: 1000}
    mine = [replace(job, reservation="course") for job in jobs]
    course = Reservation("course", "n0", NOW_S - 60, NOW_S + 9 * HOUR_S)
    assert joins(decided(mine, full_nodes(1), course)) == {1: 1000}


def test_a_group_that_ends_too_late_leaves_the_job_to_another():
    jobs = [joiner(), *group(0), *group(1)]
    assert joins(decided(jobs, full_nodes(2))) == {1: 1000}
    assert joins(decided(jobs, full_nodes(2), maintenance(9000))) == {1: 1001}


def test_a_job_that_can_join_nobody_takes_no_group_from_others():
    jobs = [joiner(time_limit_s=2 * HOUR_S), joiner(2)]
    long_group = group(0, limit_s=4 * HOUR_S, pilot_s=5 * HOUR_S)
    found = decided([*jobs, *long_group], full_nodes(1), maintenance(3 * HOUR_S))
    assert joins(found) == {2: 1000}
    assert "maint" in why_waiting(found, 1)


@pytest.mark.parametrize("isolation", ["process", "auto"])
def test_a_job_of_another_environment_joins_as_a_process(isolation: str) -> None:
    def with_facts(job: Job, digest: str) -> Job:
        return replace(job, admin_comment=f"{job.admin_comment} muri-facts:1.{digest}.{'c' * 16}..YQA")

    pilot, member = group(0)
    jobs = [with_facts(joiner(), "b" * 16), pilot, with_facts(member, "a" * 16)]
    (join,) = of_kind(decided(jobs, full_nodes(1), grouping={"isolation": isolation}), Join)
    assert (join.member.isolation, join.member.isolation_why) == (
        "process",
        "it joined later" if isolation == "auto" else "",
    )


# What of a plan's joins can be done now, and in which order

SHARES = (NodeShare("n1", 1),)


def planned(job_id: int, *, preemptible: bool = True) -> PlanJob:
    return PlanJob(job_id, "ann", "main", 1, 0.0, preemptible=preemptible)


def settled(joining: tuple[int, ...], *, preemptible: bool = True):
    running = (
        Running((planned(1),), SHARES),
        Running((planned(2, preemptible=preemptible),), (NodeShare("n2", 1),)),
    )
    nodes = (FreeNode("n1", ("main",), 0, gpu_count=1), FreeNode("n2", ("main",), 0, gpu_count=1))
    members = (1, *joining)
    group = Group(members, SHARES, 1, 0.0, 0.5, dict.fromkeys(members, 0.9), joining=joining)
    return settle(Plan("test", groups=(group,)), PlanRequest((planned(3),), nodes, 0.0, running=running))


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


def test_idle_gpus_are_filled_before_jobs_join_those_at_work() -> None:
    first, second = (Join(pilot, "n1", cast(Any, None), (), 0, ()) for pilot in (8, 9))
    alone, other = ReleaseSolo(1, ()), ReleaseSolo(2, ())
    assert idle_gpus_first((first, alone, second, other)) == (alone, other, first, second)


# Who is told that it could move to another group if running jobs were stopped

NODES = [make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=5) for number in (1, 2)]


def movable(number: int, comment: str = f"{tags.CHECKPOINT_PREFIX}0") -> list[Job]:
    """A pilot and its only member on a node of their own; the member has declared a checkpoint."""
    member = candidate(2000 + number, f"m{number}", ",checkpoint=1", comment=comment)
    member = replace(member, admin_comment=member.admin_comment.replace("duration=100", "duration=3000"))
    return behind_pilot(number, member, time_limit_s=20 * HOUR_S)


def told(jobs: list[Job], stopping: Callable[[], Policy] | None = None) -> dict[int, str]:
    cycle, found = (each(jobs, NODES, policy="muri-jct") for each in (cycle_of, decided))
    assert not found.actions
    stopping = stopping or (lambda: policy_of(cycle.config, stopping=True))
    return Proposals(cycle.now_s, proposed_moves(found.preparation.request, found.view, 30.0, stopping)).notes(
        found.view
    )


ANOTHERS = candidate(1, "m3", user="bob", uid=1002)


def test_a_job_with_a_checkpoint_is_told_whom_it_could_join_so_that_another_starts():
    ((job_id, why),) = told([*movable(1), *movable(2), ANOTHERS]).items()
    assert job_id in {2001, 2002}
    assert f"could move to the GPUs of job {4003 - job_id}" in why
    assert "preemption.enabled" in why


@pytest.mark.parametrize(
    "jobs",
    [
        [*movable(1), *movable(2)],  # no job waits
        [*movable(1, ""), *movable(2, ""), ANOTHERS],  # no checkpoint in this run
        [*movable(1), ANOTHERS],  # no group to join
    ],
)
def test_otherwise_nobody_is_told_anything(jobs):
    assert told(jobs) == {}


def test_the_policy_is_not_asked_where_nobody_could_meet_anybody():
    carols = [replace(job, user="carol", uid=1003) for job in movable(2)]
    assert told([*movable(1), *carols, ANOTHERS], stopping=lambda: pytest.fail("it was asked")) == {}


def test_explain_tells_it_and_a_policy_that_fails_there_costs_no_cycle(make_controller, caplog):
    slurm = FakeSlurm([*movable(1), *movable(2), ANOTHERS], NODES)
    with make_controller(slurm, policy="muri-jct") as controller:
        told = [why for job in controller.cycle().jobs for why in job.reasons if "could move" in why]
        assert len(told) == 1
        policy_for = controller._policy_for

        def fails(priority_type: str, *, stopping: bool = False) -> Any:
            return policy_for("no such thing") if not stopping else 1 // 0

        controller._policy_for = fails
        status = controller.cycle()  # not asked again so soon
        assert [why for job in status.jobs for why in job.reasons if "could move" in why] == told
        slurm.now_s += ASK_AGAIN_S
        status = controller.cycle()
    assert not [why for job in status.jobs for why in job.reasons if "could move" in why]
    assert "proposals to move jobs are left out" in caplog.text
