"""Waiting jobs that join running groups: before whose reservation all of them end, and how much looking that takes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, GPUS_REMOVABLE, NOW_S, make_job, make_node

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.actions import Join
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.decision import Decision, decide
from muri.slurm_plugin.planning.placement import Places
from muri.slurm_plugin.planning.slurm_requests import longer_limit_change, original_request
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Reservation, Snapshot
from muri.slurm_plugin.records.roles import read_job, view_of

HOUR_S = 3600


def candidate(job_id: int, model: str = "m2", **changes: Any) -> Job:
    return make_job(job_id, admin_comment=f"muri:model={model},batch-size=8,duration=100", **changes)


def group(number: int, own_limit_s: int = 2 * HOUR_S, limit_s: int = 2 * HOUR_S, pilot_s: int = 9000) -> list[Job]:
    """A pilot and its only member on a node of their own; they have run for ten minutes."""
    at_work = {"state": JobState.RUNNING, "held": False, "reason": "", "nodes": f"n{number}", "start_s": NOW_S - 600}
    pilot_id, member_id = 1000 + number, 2000 + number
    original = tags.Original("gres/gpu:1", "", 4, 4, 0, own_limit_s)
    state = tags.STATE_PREFIX + tags.format_state(tags.MemberState(pilot_id, original))
    member = candidate(member_id, "m1", gpu_count=0, gpu_request="", cpu_count=1, time_limit_s=limit_s, **at_work)
    tag = tags.PILOT_PREFIX + tags.format_pilot(f"t{number}", (member_id,))
    return [
        make_job(pilot_id, time_limit_s=pilot_s, admin_comment=tag, **at_work),
        replace(member, admin_comment=f"{member.admin_comment} {state}"),
    ]


def full_nodes(count: int) -> list[Node]:
    return [make_node(f"n{number}", gpu_count=1, gpus_allocated=1, cpus_allocated=6) for number in range(count)]


MURI_S = Config(policy="muri-s")


def decided(jobs: list[Job], nodes: list[Node], *reservations: Reservation, config: Config = MURI_S) -> Decision:
    snapshot = Snapshot(NOW_S, "c", "26.05", tuple(jobs), tuple(nodes), reservations, gpu_removal=GPUS_REMOVABLE)
    knowledge = Knowledge({profile.key: profile for profile in FOUR_KINDS})
    return decide(CycleInput(view_of(snapshot), knowledge, config), policy_of(config))


def joins(decision: Decision) -> dict[int, int]:
    """Pilots by the jobs that join them."""
    return {action.member.job_id: action.pilot for action in decision.actions if isinstance(action, Join)}


def why_waiting(decision: Decision, job_id: int) -> str:
    """The last reason why a job waits."""
    return str(next(item.reasons[-1] for item in decision.plan.waiting if item.job_id == job_id))


def maintenance(in_s: float, nodes: str = "n0") -> Reservation:
    return Reservation("maint", nodes, NOW_S + in_s, NOW_S + in_s + 9 * HOUR_S, ("MAINT",))


def test_a_join_extends_nobody_into_a_reservation():
    """The joiner alone would end in time; the member beside it, and the pilot, would not."""
    jobs, nodes = [candidate(1, time_limit_s=HOUR_S), *group(0)], full_nodes(1)
    assert joins(decided(jobs, nodes)) == {1: 1000}
    refused = decided(jobs, nodes, maintenance(9000))
    assert joins(refused) == {}
    assert why_waiting(refused, 1) == (
        "it cannot join what runs: its group could not take so long: it would not end before reservation maint"
    )
    (join,) = (each for each in decided(jobs, nodes, maintenance(4 * HOUR_S)).actions if isinstance(each, Join))
    assert join.others == ((2000, 4 * HOUR_S),)
    assert join.pilot_limit_s == 4 * HOUR_S + 600


@pytest.mark.parametrize(("end_s", "joined"), [(2 * HOUR_S + 1, True), (2 * HOUR_S - 1, False)])
def test_where_nobody_else_is_extended_the_joiner_itself_has_to_end_in_time(end_s, joined):
    long_group = group(0, limit_s=4 * HOUR_S, pilot_s=5 * HOUR_S)
    found = decided([candidate(1, time_limit_s=HOUR_S), *long_group], full_nodes(1), maintenance(end_s))
    assert bool(joins(found)) is joined


def test_the_pilot_alone_must_not_be_extended_into_a_reservation():
    """All members end before it; the pilot outlives them by ten minutes."""
    jobs = [candidate(1, time_limit_s=HOUR_S), *group(0, own_limit_s=HOUR_S, limit_s=HOUR_S, pilot_s=HOUR_S + 600)]
    assert joins(decided(jobs, full_nodes(1), maintenance(2 * HOUR_S + 500))) == {}
    assert joins(decided(jobs, full_nodes(1), maintenance(2 * HOUR_S + 601))) == {1: 1000}


@pytest.mark.parametrize(("given_s", "joined"), [(2 * HOUR_S, True), (3 * HOUR_S, False), (0, True)])
def test_nobody_joins_a_group_whose_members_time_limit_somebody_has_changed(given_s, joined):
    """To join would make it longer again; 0 is what an older Muri wrote, which nobody can tell anything from."""
    pilot, member = group(0)
    state = tags.parse_state(member.admin_comment)
    told = tags.format_state(replace(state, limit_s=given_s))
    member = replace(member, admin_comment=tags.with_token(member.admin_comment, tags.STATE_PREFIX, told))
    assert bool(joins(decided([candidate(1), pilot, member], full_nodes(1)))) is joined


def test_a_longer_limit_for_a_partner_does_not_look_like_somebody_elses():
    _, member = group(0)
    change = longer_limit_change(read_job(member), 3 * HOUR_S - 30)
    longer = read_job(replace(member, time_limit_s=3 * HOUR_S, admin_comment=change.admin_comment))
    assert change.time_limit_s == 3 * HOUR_S
    assert not longer.has_changed_limit
    assert original_request(longer).time_limit_s == 2 * HOUR_S


def test_reservations_elsewhere_or_of_the_job_itself_do_not_matter():
    jobs = [candidate(1, time_limit_s=HOUR_S), *group(0)]
    assert joins(decided(jobs, full_nodes(2), maintenance(9000, "n1"))) == {1: 1000}
    mine = [replace(job, reservation="course") for job in jobs]
    course = Reservation("course", "n0", NOW_S - 60, NOW_S + 9 * HOUR_S)
    assert joins(decided(mine, full_nodes(1), course)) == {1: 1000}


def test_a_group_that_ends_too_late_leaves_the_job_to_another():
    jobs = [candidate(1, time_limit_s=HOUR_S), *group(0), *group(1)]
    assert joins(decided(jobs, full_nodes(2))) == {1: 1000}
    assert joins(decided(jobs, full_nodes(2), maintenance(9000))) == {1: 1001}


def test_a_job_that_can_join_nobody_takes_no_group_from_others():
    jobs = [candidate(1, time_limit_s=2 * HOUR_S), candidate(2, time_limit_s=HOUR_S)]
    long_group = group(0, limit_s=4 * HOUR_S, pilot_s=5 * HOUR_S)
    found = decided([*jobs, *long_group], full_nodes(1), maintenance(3 * HOUR_S))
    assert joins(found) == {2: 1000}
    assert "maint" in why_waiting(found, 1)


@pytest.mark.parametrize("user", ["alice", "bob"])
def test_the_effort_grows_with_jobs_and_groups_not_with_their_pairs(monkeypatch, user):
    """Each key walks all nodes, and each place all nodes and reservations."""
    count = 30
    waiting = [candidate(n, user=user, uid=1001 if user == "alice" else 1002) for n in range(1, count + 1)]
    calls: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def count_call(*args: Any) -> Any:
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, count_call)

    counted(CycleInput, "key_of")
    counted(Places, "of")
    counted(Places, "_find")
    found = decided([*waiting, *(job for number in range(count) for job in group(number))], full_nodes(count))
    assert len(joins(found)) == (count if user == "alice" else 0)
    assert calls["_find"] <= 3
    assert calls["of"] <= 8 * count
    assert calls["key_of"] <= 8 * count


@pytest.mark.parametrize("isolation", ["process", "auto"])
def test_a_job_of_another_environment_joins_as_a_process(isolation: str) -> None:
    def with_facts(job: Job, digest: str) -> Job:
        return replace(job, admin_comment=f"{job.admin_comment} muri-facts:1.{digest}.{'c' * 16}..YQA")

    pilot, member = group(0)
    jobs = [with_facts(candidate(1, time_limit_s=HOUR_S), "b" * 16), pilot, with_facts(member, "a" * 16)]
    config = Config.model_validate({"policy": "muri-s", "grouping": {"isolation": isolation}})
    (join,) = (each for each in decided(jobs, full_nodes(1), config=config).actions if isinstance(each, Join))
    assert (join.member.isolation, join.member.isolation_why) == (
        "process",
        "it joined later" if isolation == "auto" else "",
    )
