"""Promised speeds in the controller: what a plan carries, whom it keeps apart, when a group takes no more members."""

import dataclasses
from dataclasses import replace
from typing import Any

import at_work
import pytest
from at_work import behind_pilot, of_kind
from fake_slurm import FakeSlurm, make_node

from muri.slurm_plugin.cli.look import explanation, show_queue
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.status import JobStatus, Status, status_of
from muri.slurm_plugin.planning.actions import Join, StartGroup, members_in
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.decision import Decision, why_too_slow
from muri.slurm_plugin.planning.joins import why_no_room
from muri.slurm_plugin.planning.placement import Places
from muri.slurm_plugin.planning.request import known_job, plan_job
from muri.slurm_plugin.planning.slurm_requests import group_spec
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.comment_reports import speeds_token
from muri.slurm_plugin.records.roles import read_job

BROKEN = "a member does not get the speed that it was promised"


def candidate(job_id: int, model: str, promise: str = "") -> Job:
    return at_work.candidate(job_id, model, f",min-speed={promise}" if promise else "")


def report(speeds: dict[int, float], broken: tuple[int, ...]) -> str:
    """What a pilot tells of members whose iteration takes 1 s alone."""
    times = dict.fromkeys(("load", "preprocess", "propagate", "synchronize"), 0.1)
    members = {
        str(job_id): {
            "iterations": 9, "iteration_s": 1 / speed, "stage_s": times, "wait_s": times,
            "promise_broken": job_id in broken,
        }
        for job_id, speed in speeds.items()
    }  # fmt: skip
    return speeds_token({"members": members, "discipline": "fair"}) or ""


def group(*models: str, promise: float = 0.8, comment: str = "") -> list[Job]:
    """Pilot 1001 on n1 and its members 2000, 2001, …, which were promised a speed."""
    members = [candidate(job_id, model) for job_id, model in enumerate(models, 2000)]
    return behind_pilot(1, *members, promise=promise, comment=comment, time_limit_s=9000)


def cycle_of(jobs: list[Job], nodes: list[Node] | None = None, **changes: Any) -> CycleInput:
    taken = int(jobs[-1].state is JobState.RUNNING)
    return at_work.cycle_of(jobs, nodes or [make_node("n1", gpu_count=1, gpus_allocated=taken)], **changes)


def decided(jobs: list[Job], nodes: list[Node] | None = None, policy: str = "muri-jct") -> Decision:
    cycle = cycle_of(jobs, nodes, policy=policy)
    return at_work.decided(jobs, cycle.nodes, policy=policy)


def joiners(decision: Decision) -> set[int]:
    return {action.member.job_id for action in of_kind(decision, Join)}


@pytest.mark.parametrize(
    ("site", "own", "promised"), [(0.5, "0.3", 0.5), (0.5, "", 0.5), (0.5, "0.7", 0.7), (0.0, "", 0.0)]
)
def test_a_group_is_told_the_larger_of_both_promises(make_controller, site, own, promised):
    slurm = FakeSlurm([candidate(1, "m1", own), candidate(2, "m3")], [make_node("n1", gpu_count=1)])
    with make_controller(slurm, grouping={"min_speed": site}, policy="muri-jct") as controller:
        jobs = {job.job_id: job for job in controller.cycle().jobs}
    assert read_job(slurm.jobs[1]).membership.min_speed == promised
    assert jobs[1].promised_speed == (promised or None)


def test_the_runtime_is_told_too():
    jobs = [candidate(1, "m1", "0.7"), candidate(2, "m3")]
    (start,) = of_kind(decided(jobs), StartGroup)
    assert {each.job_id: each.min_speed for each in group_spec(start, Config()).members} == {"1": 0.7, "2": 0.5}


def test_a_joiner_takes_its_promise_along():
    (join,) = of_kind(decided([candidate(1, "m3", "0.7"), *group("m1", promise=0.5)]), Join)
    assert join.member.min_speed == 0.7
    assert join.member.speed >= 0.7


@pytest.mark.parametrize("policy", ["muri-s", "muri-l", "muri-jct", "muri-slurm", "muri-hybrid", "horus", "sjf-bsbf"])
@pytest.mark.parametrize("promise", ["0", "0.6", "0.75", "0.9", "0.999"])
def test_no_decision_goes_below_a_promise(policy, promise):
    jobs = [candidate(number, f"m{1 + number % 4}", promise if number % 2 else "") for number in range(1, 7)]
    found = decided([*jobs, *group("m1", promise=0.5)], [make_node("n1", gpus_allocated=1)], policy=policy)
    members = [member for start in of_kind(found, StartGroup) if len(start.members) > 1 for member in start.members]
    members += [join.member for join in of_kind(found, Join)]
    assert all(member.speed >= member.min_speed - 1e-6 for member in members)
    assert all(member.min_speed >= 0.5 for member in members)


def test_a_promise_can_keep_a_job_alone():
    jobs = [candidate(1, "m1"), candidate(2, "m1")]
    assert any(len(start.members) > 1 for start in of_kind(decided(jobs), StartGroup))
    jobs[1] = candidate(2, "m1", "0.95")
    assert not any(len(start.members) > 1 for start in of_kind(decided(jobs), StartGroup))


@pytest.mark.parametrize(("broken", "joined"), [((), {1}), ((2000,), set()), ((77,), {1})])
def test_nobody_joins_a_group_that_breaks_a_promise(broken, joined):
    """Whoever is not, or no longer, a member of the group does not count."""
    speeds = {2000: 0.71} | dict.fromkeys(broken, 0.71)
    jobs = [candidate(1, "m3"), *group("m1", comment=report(speeds, broken))]
    assert joiners(decided(jobs)) == joined
    cycle = cycle_of(jobs)
    (running,) = cycle.view.running_groups
    why = why_no_room(cycle.view.jobs[1], running, cycle, Places(cycle.view.snapshot))
    assert why == ("" if joined else BROKEN)


def test_what_was_promised_stays_so_when_the_site_promises_less():
    cycle = cycle_of(group("m1", promise=0.7), grouping={"min_speed": 0.0})
    member = cycle.view.jobs[2000]
    assert plan_job(known_job(member, cycle), "main", cycle).min_speed == 0.7


def test_a_journal_from_before_promises_can_be_read():
    slow = {"job_id": 1, "solo_iteration_s": 1.0, "speed": 0.9, "time_limit_s": 60}
    original = dataclasses.asdict(tags.Original("gres/gpu:1", "", 4, 4, 0, 3600))
    (member,) = members_in({"members": [{**slow, "original": original}]})
    assert member.min_speed == 0.0


def test_what_a_policy_of_the_site_plans_too_slow_is_refused():
    (start,) = of_kind(decided([candidate(1, "m1"), candidate(2, "m3")]), StartGroup)
    assert why_too_slow(start.members) == ""
    slow = replace(start.members[1], speed=0.41)
    assert why_too_slow((start.members[0], slow)) == (
        f"job {slow.job_id} would get 0.41 of its speed alone there, and is promised 0.50"
    )


def shown(jobs: list[Job]) -> dict[int, JobStatus]:
    return {each.job_id: each for each in status_of(cycle_of(jobs).view, None, {}, {})}


def test_members_are_told_that_their_group_breaks_a_promise():
    found = shown(group("m1", "m3", comment=report({2000: 0.71, 2001: 0.95}, (2000,))))
    assert found[2000].is_promise_broken
    assert found[2001].promises_broken == (2000,)
    assert "It was promised 0.80 and gets 0.71: nobody joins its group any more." in explanation(found[2000])
    others = explanation(found[2001])
    assert "It was promised at least 0.80 of its speed alone." in others
    assert "Job 2000 beside it does not get the speed that it was promised: nobody joins the group any more." in others


def test_a_waiting_job_tells_what_it_asks_for():
    found = shown([candidate(1, "m1", "0.75"), candidate(2, "m1")])
    assert (found[1].promised_speed, found[2].promised_speed) == (0.75, None)
    assert "It asks for at least 0.75 of its speed alone." in explanation(found[1])
    assert not any("speed" in line for line in explanation(found[2]))


def test_the_queue_shows_promised_planned_and_measured_speed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    jobs = [candidate(1, "m1", "0.75"), *group("m1", "m3", comment=report({2000: 0.71, 2001: 0.95}, (2000,)))]
    show_queue(Status(0.0, "muri-s", "fake", tuple(shown(jobs).values())))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["JOB", "USER", "MODEL", "STATE", "GROUP", "PARTNERS", "MIN", "PLAN", "SPEED"],
        ["1", "alice", "m1", "waiting", "-", "-", "0.75", "-", "-"],
        ["2000", "alice", "m1", "interleaved", "1001", "2001", "0.80!", "0.90", "0.71!"],
        ["2001", "alice", "m3", "interleaved", "1001", "2000", "0.80", "0.90", "0.95"],
    ]
    assert max(map(len, lines[:4])) <= 80
