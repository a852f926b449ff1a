"""AntMan's classes in the controller: from `--muri=opportunistic=1` to who joins whom, with which promise."""

from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, GPUS_REMOVABLE, NOW_S, FakeSlurm, make_job, make_node

from muri.slurm_plugin.cli.look import explanation, show_queue
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.controller.status import Status, status_of
from muri.slurm_plugin.planning.actions import Join, ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.decision import Decision, decide
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Snapshot
from muri.slurm_plugin.records.roles import read_job, view_of


def candidate(job_id: int, model: str, *, opportunistic: bool = False, **changes: Any) -> Job:
    of_class = ",opportunistic=1" if opportunistic else ""
    return make_job(job_id, admin_comment=f"muri:model={model},batch-size=8{of_class}", **changes)


def at_work(job_id: int, model: str, *, opportunistic: bool = False) -> list[Job]:
    """A job that runs behind a pilot of its own, 1000, on n1."""
    runs = {"state": JobState.RUNNING, "held": False, "reason": "", "nodes": "n1", "start_s": NOW_S - 600}
    pilot = make_job(
        1000, time_limit_s=9000, admin_comment=tags.PILOT_PREFIX + tags.format_pilot("t", (job_id,)), **runs
    )
    state = tags.MemberState(1000, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600), limit_s=7200, min_speed=0.95)
    changes = {"gpu_count": 0, "gpu_request": "", "cpu_count": 1, "time_limit_s": 7200}
    member = candidate(job_id, model, opportunistic=opportunistic, **changes, **runs)
    comment = f"{member.admin_comment} {tags.STATE_PREFIX}{tags.format_state(state)}"
    planned = tags.Planned(("it runs",), 1.0, 1.0)
    return [pilot, replace(member, admin_comment=tags.with_plan(comment, planned))]


def decided(jobs: list[Job], policy: str = "antman", free: int = 0, **grouping: Any) -> Decision:
    config = Config(policy=policy, grouping=grouping)
    nodes = (make_node("n1", gpu_count=1, gpus_allocated=1 - free),)
    snapshot = Snapshot(NOW_S, "c", "26.05", tuple(jobs), nodes, gpu_removal=GPUS_REMOVABLE)
    knowledge = Knowledge({profile.key: profile for profile in FOUR_KINDS})
    return decide(CycleInput(view_of(snapshot), knowledge, config), policy_of(config))


@pytest.mark.parametrize(("waits", "runs"), [(True, False), (False, True)])
def test_one_of_each_class_shares_whoever_runs_first(waits: bool, runs: bool) -> None:
    jobs = [candidate(1, "m1", opportunistic=waits), *at_work(2000, "m3", opportunistic=runs)]
    (join,) = decided(jobs).actions
    assert isinstance(join, Join)
    assert (join.pilot, join.member.job_id) == (1000, 1)
    assert join.member.min_speed == (0.0 if waits else 0.95)


@pytest.mark.parametrize("both", [True, False])
def test_two_of_a_class_do_not_share(both: bool) -> None:
    jobs = [candidate(1, "m1", opportunistic=both), *at_work(2000, "m3", opportunistic=both)]
    assert decided(jobs).actions == ()


def test_a_running_job_is_never_stopped_for_one_that_comes() -> None:
    config = {"policy": "antman", "preemption": {"enabled": True, "least_run_s": 0}}
    jobs = at_work(2000, "m3", opportunistic=True)
    jobs[1] = replace(jobs[1], admin_comment=jobs[1].admin_comment.replace("muri:model", "muri:checkpoint=1,model"))
    jobs[1] = replace(jobs[1], comment="muri-checkpoint:0")
    snapshot = Snapshot(
        NOW_S, "c", "26.05", (candidate(1, "m1"), *jobs), (make_node("n1", gpu_count=1, gpus_allocated=1),),
        gpu_removal=GPUS_REMOVABLE,
    )  # fmt: skip
    knowledge = Knowledge({profile.key: profile for profile in FOUR_KINDS})
    cycle = CycleInput(view_of(snapshot), knowledge, Config(**config))
    assert [type(action) for action in decide(cycle, policy_of(cycle.config)).actions] == [Join]


def test_a_guaranteed_job_that_starts_alone_is_promised_its_speed_from_the_start() -> None:
    (start,) = decided([candidate(1, "m1")], free=1).actions
    assert isinstance(start, StartGroup)
    assert [member.min_speed for member in start.members] == [0.95]


def test_a_pair_that_starts_together_is_promised_the_same() -> None:
    jobs = [candidate(1, "m1", opportunistic=True), candidate(2, "m3")]
    (start,) = decided(jobs, free=1).actions
    assert isinstance(start, StartGroup)
    assert {member.job_id: member.min_speed for member in start.members} == {1: 0.0, 2: 0.95}


def test_the_site_still_says_how_slow_an_opportunistic_job_may_be_planned() -> None:
    # Both use the same resource for most of their time: what is left over is less than half.
    jobs = [candidate(1, "m3", opportunistic=True), *at_work(2000, "m3")]
    assert decided(jobs, min_speed=0.5).actions == ()
    assert len(decided(jobs, min_speed=0.0).actions) == 1


@pytest.mark.parametrize("policy", ["muri-l", "fifo"])
def test_other_policies_know_no_classes(policy: str) -> None:
    def actions(*, opportunistic: bool) -> list[Any]:
        return list(decided([candidate(1, "m1", opportunistic=opportunistic)], policy, free=1).actions)

    assert actions(opportunistic=True) == actions(opportunistic=False)
    assert isinstance(actions(opportunistic=True)[0], StartGroup | ReleaseSolo)


def test_what_is_promised_reaches_the_jobs_record(make_controller: Any) -> None:
    slurm = FakeSlurm([candidate(1, "m1"), candidate(2, "m3", opportunistic=True)], [make_node("n1", gpu_count=1)])
    with make_controller(slurm, policy="antman") as controller:
        jobs = {job.job_id: job for job in controller.cycle().jobs}
    assert [read_job(slurm.jobs[job_id]).membership.min_speed for job_id in (1, 2)] == [0.95, 0.0]
    assert [(jobs[each].promised_speed, jobs[each].opportunistic) for each in (1, 2)] == [(0.95, False), (None, True)]


def test_the_queue_and_explain_show_the_class(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    jobs = (candidate(1, "m1"), *at_work(2000, "m3", opportunistic=True))
    snapshot = Snapshot(NOW_S, "c", "26.05", jobs, (make_node("n1"),), gpu_removal=GPUS_REMOVABLE)
    found = status_of(view_of(snapshot), None, {}, {})
    show_queue(Status(0.0, "antman", "fake", found))
    lines = capsys.readouterr().out.splitlines()[:3]
    assert [line.split()[3:5] for line in lines] == [["STATE", "CLASS"], ["waiting", "-"], ["alone", "opp"]]
    assert max(map(len, lines)) <= 80
    said = "It only asks for what others leave over (opportunistic), which counts under the policy antman."
    assert [said in explanation(job) for job in found] == [False, True]
