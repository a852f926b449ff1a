"""Cycles with a job array: its tasks get job ids, share a GPU, and no more of them start than may."""

from collections.abc import Sequence

import pytest
from fake_slurm import NOW_S, FakeSlurm, behind_licence, make_job, one_gpu, pilots

from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import Role, read_job

MARK = "muri:model=m1,batch-size=8,duration=100"


def array(tasks: str, limit: int = 0) -> Job:
    """An array behind the licence."""
    job = make_job(1, array=True, array_job_id=1, array_tasks=tasks, array_limit=limit, admin_comment=MARK)
    return behind_licence(job)


def tasks_of(slurm: FakeSlurm) -> dict[str, Job]:
    return {job.array_tasks: job for job in slurm.jobs.values() if job.array_job_id}


def run(make_controller, slurm: FakeSlurm, cycles: int) -> None:
    slurm.extend_lease(NOW_S + 600)
    with make_controller(slurm) as controller:
        for _ in range(cycles):
            controller.cycle()
            slurm.tick()


def test_tasks_get_job_ids_and_are_grouped_in_the_same_cycle(make_controller):
    slurm = FakeSlurm([array("0,1,2,3,4,5")], one_gpu(), gate_license=True)
    run(make_controller, slurm, 1)
    assert slurm.calls.count("split_tasks") == 1
    tasks = tasks_of(slurm)
    assert set(tasks) == {"0", "1", "2", "3", "4,5"}
    assert len({job.job_id for job in tasks.values()}) == 5
    started = [name for name, job in tasks.items() if not read_job(job).gated]
    assert started
    assert all(tasks[name].priority > tasks["4,5"].priority for name in started)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_tasks_start_than_may(make_controller, limit):
    slurm = FakeSlurm([array("0,1,2,3", limit)], one_gpu(), gate_license=True)
    run(make_controller, slurm, 3)
    at_work = [job for job in tasks_of(slurm).values() if job.state is JobState.RUNNING]
    assert {job.array_tasks for job in at_work} == {str(number) for number in range(limit)}


def test_where_slurm_gives_no_job_ids_the_array_starts_as_a_whole(make_controller, monkeypatch):
    def refuse(_job: Job, _tasks: Sequence[int]) -> None:
        raise GatewayError("Job violates accounting/QOS policy")

    slurm = FakeSlurm([array("0,1,2,3")], one_gpu(), gate_license=True)
    monkeypatch.setattr(slurm, "split_tasks", refuse)
    run(make_controller, slurm, 1)
    (job,) = tasks_of(slurm).values()
    assert read_job(job).role is Role.RELEASED
    assert not pilots(slurm)
