"""AntMan's classes in the controller: from `--muri=opportunistic=1` to who joins whom, with which promise."""

from dataclasses import replace
from typing import Any

import at_work
import pytest
from fake_slurm import FakeSlurm, make_job, make_node

from muri.slurm_plugin.cli.look import explanation, show_queue
from muri.slurm_plugin.controller.status import Status, status_of
from muri.slurm_plugin.planning.actions import Join, ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.records.cluster import Job
from muri.slurm_plugin.records.roles import read_job


def candidate(job_id: int, model: str, *, opportunistic: bool = False, **changes: Any) -> Job:
    of_class = ",opportunistic=1" if opportunistic else ""
    return make_job(job_id, admin_comment=f"muri:model={model},batch-size=8{of_class}", **changes)


def behind_pilot(job_id: int, model: str, *, opportunistic: bool = False) -> list[Job]:
    """A job that runs behind a pilot of its own, 1001, on n1."""
    job = candidate(job_id, model, opportunistic=opportunistic)
    return at_work.behind_pilot(1, job, promise=0.95, time_limit_s=9000)


def decided(jobs: list[Job], policy: str = "antman", free: int = 0, **changes: Any) -> Decision:
    nodes = [make_node("n1", gpu_count=1, gpus_allocated=1 - free)]
    return at_work.decided(jobs, nodes, policy=policy, **changes)


@pytest.mark.parametrize(("waits", "runs"), [(True, False), (False, True)])
def test_one_of_each_class_shares_whoever_runs_first(waits: bool, runs: bool) -> None:
    jobs = [candidate(1, "m1", opportunistic=waits), *behind_pilot(2000, "m3", opportunistic=runs)]
    (join,) = decided(jobs).actions
    assert isinstance(join, Join)
    assert (join.pilot, join.member.job_id) == (1001, 1)
    assert join.member.min_speed == (0.0 if waits else 0.95)


@pytest.mark.parametrize("both", [True, False])
def test_two_of_a_class_do_not_share(both: bool) -> None:
    jobs = [candidate(1, "m1", opportunistic=both), *behind_pilot(2000, "m3", opportunistic=both)]
    assert decided(jobs).actions == ()


def test_a_running_job_is_never_stopped_for_one_that_comes() -> None:
    pilot, job = behind_pilot(2000, "m3", opportunistic=True)
    marked = job.admin_comment.replace("muri:model", "muri:checkpoint=1,model")
    jobs = [candidate(1, "m1"), pilot, replace(job, admin_comment=marked, comment="muri-checkpoint:0")]
    found = decided(jobs, preemption={"enabled": True, "least_run_s": 0})
    assert [type(action) for action in found.actions] == [Join]


def test_a_guaranteed_job_is_promised_its_speed_from_the_start_alone_or_in_a_pair() -> None:
    for jobs, promised in (
        ([candidate(1, "m1")], {1: 0.95}),
        ([candidate(1, "m1", opportunistic=True), candidate(2, "m3")], {1: 0.0, 2: 0.95}),
    ):
        (start,) = decided(jobs, free=1).actions
        assert isinstance(start, StartGroup)
        assert {member.job_id: member.min_speed for member in start.members} == promised


def test_the_site_still_says_how_slow_an_opportunistic_job_may_be_planned() -> None:
    # Both use the same resource for most of their time: what is left over is less than half.
    jobs = [candidate(1, "m3", opportunistic=True), *behind_pilot(2000, "m3")]
    assert decided(jobs, grouping={"min_speed": 0.5}).actions == ()
    assert len(decided(jobs, grouping={"min_speed": 0.0}).actions) == 1


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
    jobs = [candidate(1, "m1"), *behind_pilot(2000, "m3", opportunistic=True)]
    found = status_of(at_work.cycle_of(jobs, [make_node("n1")]).view, None, {}, {})
    show_queue(Status(0.0, "antman", "fake", found))
    lines = capsys.readouterr().out.splitlines()[:3]
    assert [line.split()[3:5] for line in lines] == [["STATE", "CLASS"], ["waiting", "-"], ["alone", "opp"]]
    assert max(map(len, lines)) <= 80
    said = "It only asks for what others leave over (opportunistic), which counts under the policy antman."
    assert [said in explanation(job) for job in found] == [False, True]
