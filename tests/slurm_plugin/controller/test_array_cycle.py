"""Cycles with a job array: its tasks get job ids, share a GPU, and no more of them start than may."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from fake_slurm import NOW_S, FakeSlurm, behind_license, make_job, one_gpu, pilots, run_cycles

from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import Role, read_job

MARK = "muri:model=m1,batch-size=8,duration=100"


def array(tasks: str, limit: int = 0) -> Job:
    """An array behind the license."""
    job = make_job(1, array=True, array_job_id=1, array_tasks=tasks, array_limit=limit, admin_comment=MARK)
    return behind_license(job)


def tasks_of(slurm: FakeSlurm) -> dict[str, Job]:
    return {job.array_tasks: job for job in slurm.jobs.values() if job.array_job_id}


def run(make_controller, slurm: FakeSlurm, cycles: int) -> None:
    slurm.extend_lease(NOW_S + 600)
    run_cycles(make_controller, slurm, cycles)


def test_tasks_get_job_ids_and_are_grouped_in_the_same_cycle(make_controller):
    slurm = FakeSlurm([array("0,1,2,3,4,5")], one_gpu(), gate_license=True)
    run(make_controller, slurm, 1)
    assert slurm.calls.count("split_tasks") == 1
    tasks = tasks_of(slurm)
    assert set(tasks) == {"0", "1", "2", "3", "4,5"}
    assert len({job.job_id for job in tasks.values()}) == 5
    started = [name for name, job in tasks.items() if not read_job(job).gated]
    assert started
    assert {job.priority for job in tasks.values()} == {7517}  # as Slurm had it


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_tasks_start_than_may(make_controller, limit):
    slurm = FakeSlurm([array("0,1,2,3", limit)], one_gpu(), gate_license=True)
    run(make_controller, slurm, 3)
    at_work = [job for job in tasks_of(slurm).values() if job.state is JobState.RUNNING]
    assert {job.array_tasks for job in at_work} == {str(number) for number in range(limit)}


def test_where_slurm_gives_no_job_ids_the_array_starts_as_a_whole(make_controller, monkeypatch):
    slurm = FakeSlurm([array("0,1,2,3")], one_gpu(), gate_license=True)
    monkeypatch.setattr(slurm, "split_tasks", Mock(side_effect=GatewayError("Job violates accounting/QOS policy")))
    run(make_controller, slurm, 1)
    (job,) = tasks_of(slurm).values()
    assert read_job(job).role is Role.RELEASED
    assert not pilots(slurm)


def stood_back(make_controller) -> FakeSlurm:
    """A task of a nice user waits in Slurm's queue; three siblings of higher priority stand behind it."""
    slurm = FakeSlurm([replace(array("0,1,2,3"), nice=7)], one_gpu(), gate_license=True)
    slurm._split_tasks(slurm.jobs[1], [0, 1, 2])
    first, *others = slurm.jobs.values()
    slurm.jobs[first.job_id] = replace(first, licenses="", priority=7000)
    slurm.jobs[99] = make_job(99, admin_comment="", user="bob", state=JobState.RUNNING, held=False, nodes="n1")
    run(make_controller, slurm, 1)
    assert [(job.nice, job.priority) for job in map(slurm.jobs.get, [job.job_id for job in others])] == [
        (525, 6999)
    ] * 3
    return slurm


def test_a_task_that_is_let_go_has_its_users_nice_value_again(make_controller):
    slurm = stood_back(make_controller)
    for job_id in (99, 1):
        slurm.end(job_id)
    run(make_controller, slurm, 3)
    at_work = [job for job in tasks_of(slurm).values() if job.state is JobState.RUNNING]
    assert at_work
    assert {job.nice for job in at_work} == {7}
    assert all("muri-place" not in job.admin_comment for job in at_work)


def test_a_drain_takes_back_nice_values_and_dependencies(make_controller):
    slurm = stood_back(make_controller)
    waits = next(job for job in tasks_of(slurm).values() if job.nice == 525)
    place = waits.admin_comment.replace('"dependency":""', '"dependency":"after:1_9"')
    slurm.jobs[waits.job_id] = replace(waits, admin_comment=place, dependency="after:1_9")
    drain(slurm, slurm.snapshot)
    assert {(job.nice, job.dependency) for job in tasks_of(slurm).values()} == {(7, "")}
    assert {job.priority for job in tasks_of(slurm).values()} == {7000, 7517}
