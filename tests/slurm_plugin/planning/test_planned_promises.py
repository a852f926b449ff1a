"""Promised speeds in the controller: values in a plan, jobs kept apart, messages."""

from dataclasses import replace
from typing import Any

import at_work
import pytest
from at_work import Changed, behind_pilot, of_kind
from fake_slurm import FakeSlurm, make_node, one_cycle, speeds_report

from muri.policies.types import Plan, PlanRequest
from muri.slurm_plugin.cli.look import explanation, show_queue
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.controller.status import JobStatus, Status, status_of
from muri.slurm_plugin.planning.actions import Join, ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.decision import Decision, decide
from muri.slurm_plugin.planning.gathered import gather
from muri.slurm_plugin.planning.request import plan_job
from muri.slurm_plugin.planning.running import why_no_room
from muri.slurm_plugin.planning.slurm_requests import group_spec
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.roles import read_job

BROKEN = "a member does not get the speed that it was promised"


def candidate(job_id: int, model: str, promise: str = "") -> Job:
    return at_work.candidate(job_id, model, f",min-speed={promise}" if promise else "")


def group(*models: str, promise: float = 0.8, comment: str = "") -> list[Job]:
    """Pilot 1001 on n1 and its members 2000, 2001, …, which were promised a speed."""
    members = [candidate(job_id, model) for job_id, model in enumerate(models, 2000)]
    return behind_pilot(1, *members, promise=promise, comment=comment, time_limit_s=9000)


def cycle_of(jobs: list[Job], nodes: list[Node] | None = None, **changes: Any) -> CycleInput:
    taken = int(jobs[-1].state is JobState.RUNNING)
    return at_work.cycle_of(jobs, nodes or [make_node("n1", gpu_count=1, gpus_allocated=taken)], **changes)


def decided(jobs: list[Job], nodes: list[Node] | None = None, policy: str = "muri-jct") -> Decision:
    cycle = cycle_of(jobs, nodes, policy=policy)
    return at_work.decided(jobs, cycle.view.snapshot.nodes, policy=policy)


def joiners(decision: Decision) -> set[int]:
    return {action.member.job_id for action in of_kind(decision, Join)}


@pytest.mark.parametrize(
    ("site", "own", "promised"), [(0.5, "0.3", 0.5), (0.5, "", 0.5), (0.5, "0.7", 0.7), (0.0, "", 0.0)]
)
def test_a_group_is_told_the_larger_of_both_promises(make_controller, site, own, promised):
    slurm = FakeSlurm([candidate(1, "m1", own), candidate(2, "m3")], [make_node("n1", gpu_count=1)])
    jobs = one_cycle(make_controller, slurm, grouping={"min_speed": site}, policy="muri-jct")
    assert read_job(slurm.jobs[1]).membership.min_speed == promised
    assert jobs[1].promised_speed == (promised or None)


def test_the_runtime_is_told_too():
    jobs = [candidate(1, "m1", "0.7"), candidate(2, "m3")]
    (start,) = of_kind(decided(jobs), StartGroup)
    assert {each.job_id: each.min_speed for each in group_spec(start, Config()).members} == {"1": 0.7, "2": 0.5}


@pytest.mark.parametrize("policy", ["muri-s", "muri-l", "muri-jct", "muri-slurm", "muri-hybrid", "horus", "sjf-bsbf"])
@pytest.mark.parametrize("promise", ["0", "0.6", "0.75", "0.9", "0.999"])
def test_no_decision_goes_below_a_promise(policy, promise):
    jobs = [candidate(number, f"m{1 + number % 4}", promise if number % 2 else "") for number in range(1, 7)]
    found = decided([*jobs, *group("m1", promise=0.5)], [make_node("n1", gpus_allocated=1)], policy=policy)
    members = [member for start in of_kind(found, StartGroup) if len(start.members) > 1 for member in start.members]
    members += [join.member for join in of_kind(found, Join)]
    assert all(member.speed >= member.min_speed - 1e-6 for member in members)
    assert all(member.min_speed >= 0.5 for member in members)


@pytest.mark.parametrize(("broken", "joined"), [((), {1}), ((2000,), set()), ((77,), {1})])
def test_nobody_joins_a_group_that_breaks_a_promise(broken, joined):
    """A job that is not, or no longer, a member of the group does not count."""
    speeds = {2000: 0.71} | dict.fromkeys(broken, 0.71)
    jobs = [candidate(1, "m3"), *group("m1", comment=speeds_report(speeds, broken=broken))]
    assert joiners(decided(jobs)) == joined
    cycle = gather(cycle_of(jobs))
    (running,) = cycle.view.running_groups
    why = why_no_room(cycle.view.jobs[1], running, cycle)
    assert why == ("" if joined else BROKEN)


def test_what_was_promised_stays_so_when_the_site_promises_less():
    cycle = gather(cycle_of(group("m1", promise=0.7), grouping={"min_speed": 0.0}))
    assert plan_job(cycle.known[2000], "main", cycle).min_speed == 0.7


def test_what_a_policy_of_the_site_plans_too_slow_is_refused():
    def careless(request: PlanRequest, plan: Plan) -> Plan:
        groups = (replace(group, speed=dict.fromkeys(group.members, 0.41)) for group in plan.groups)
        return replace(plan, groups=tuple(groups))

    cycle = cycle_of([candidate(1, "m1"), candidate(2, "m3")], policy="muri-jct")
    (start,) = decide(cycle, Changed(policy_of(cycle.config), careless)).actions
    assert (type(start), start.job_id) == (ReleaseSolo, 1)
    assert "would get 0.41 of its speed alone there, and is promised 0.50" in start.reasons[0]


def shown(jobs: list[Job]) -> dict[int, JobStatus]:
    return {each.job_id: each for each in status_of(cycle_of(jobs).view, None, {}, {})}


def test_members_are_told_that_their_group_breaks_a_promise():
    found = shown(group("m1", "m3", comment=speeds_report({2000: 0.71, 2001: 0.95}, broken=(2000,))))
    assert found[2000].is_promise_broken
    assert found[2001].promises_broken == (2000,)
    assert "It was promised 0.80 and gets 0.71: its group is closed to new members." in explanation(found[2000])
    others = explanation(found[2001])
    assert "It was promised at least 0.80 of its speed alone." in others
    broken = "Job 2000 in its group does not get the speed that it was promised: the group is closed to new members."
    assert broken in others


def test_the_queue_shows_promised_planned_and_measured_speed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    jobs = [
        candidate(1, "m1", "0.75"),
        *group("m1", "m3", comment=speeds_report({2000: 0.71, 2001: 0.95}, broken=(2000,))),
    ]
    show_queue(Status(0.0, "muri-s", "fake", tuple(shown(jobs).values())))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["JOB", "USER", "MODEL", "STATE", "GROUP", "PARTNERS", "MIN", "PLAN", "SPEED"],
        ["1", "alice", "m1", "waiting", "-", "-", "0.75", "-", "-"],
        ["2000", "alice", "m1", "interleaved", "1001", "2001", "0.80!", "0.90", "0.71!"],
        ["2001", "alice", "m3", "interleaved", "1001", "2000", "0.80", "0.90", "0.95"],
    ]
    assert max(map(len, lines[:4])) <= 80
