"""AntMan in the controller's cycle: which jobs join which, and the speed that a guaranteed job is promised."""

from dataclasses import replace
from typing import Any

import pytest
from at_work import behind_pilot, decided
from fake_slurm import make_job, make_node

from muri.slurm_plugin.planning.actions import Join, StartGroup
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.records.cluster import Job


def of_class(job_id: int, model: str, *, opportunistic: bool = False, **changes: Any) -> Job:
    words = ",opportunistic=1" if opportunistic else ""
    return make_job(job_id, admin_comment=f"muri:model={model},batch-size=8{words}", **changes)


def alone_of_class(job_id: int, model: str, *, opportunistic: bool = False) -> list[Job]:
    """A job that runs behind a pilot of its own, 1001, on n1."""
    job = of_class(job_id, model, opportunistic=opportunistic)
    return behind_pilot(1, job, promise=0.95, time_limit_s=9000)


def decided_on(jobs: list[Job], free: int = 0, **changes: Any) -> Decision:
    return decided(jobs, [make_node("n1", gpu_count=1, gpus_allocated=1 - free)], policy="antman", **changes)


@pytest.mark.parametrize(("waits", "runs"), [(True, False), (False, True)])
def test_one_of_each_class_shares_whoever_runs_first(waits: bool, runs: bool) -> None:
    jobs = [of_class(1, "m1", opportunistic=waits), *alone_of_class(2000, "m3", opportunistic=runs)]
    (join,) = decided_on(jobs).actions
    assert isinstance(join, Join)
    assert (join.pilot, join.member.job_id) == (1001, 1)
    assert join.member.min_speed == (0.0 if waits else 0.95)


def test_a_running_job_is_never_stopped_for_one_that_comes() -> None:
    pilot, job = alone_of_class(2000, "m3", opportunistic=True)
    marked = job.admin_comment.replace("muri:model", "muri:checkpoint=1,model")
    jobs = [of_class(1, "m1"), pilot, replace(job, admin_comment=marked, comment="muri-checkpoint:0")]
    found = decided_on(jobs, preemption={"enabled": True, "least_run_s": 0})
    assert [type(action) for action in found.actions] == [Join]


def test_a_guaranteed_job_is_promised_its_speed_from_the_start_alone_or_in_a_pair() -> None:
    for jobs, promised in (
        ([of_class(1, "m1")], {1: 0.95}),
        ([of_class(1, "m1", opportunistic=True), of_class(2, "m3")], {1: 0.0, 2: 0.95}),
    ):
        (start,) = decided_on(jobs, free=1).actions
        assert isinstance(start, StartGroup)
        assert {member.job_id: member.min_speed for member in start.members} == promised
