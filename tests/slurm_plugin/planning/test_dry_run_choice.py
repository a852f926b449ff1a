"""Whose models are measured under which policy: no GPU is paid for twice, no job waits for what nobody reads."""

import pytest
from fake_slurm import FakeSlurm, make_job, make_node

from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import Role, read_job


def new_model(job_id: int, mark: str = "", **changes) -> Job:
    return make_job(job_id, admin_comment=f"muri:model=new,batch-size=8,duration=100{mark}", **changes)


def one_gpu(*jobs: Job) -> FakeSlurm:
    return FakeSlurm(list(jobs), [make_node("n1", gpu_count=1)])


def cycle(slurm: FakeSlurm, make_controller, policy: str):
    with make_controller(slurm, policy=policy) as controller:
        return {job.job_id: job for job in controller.cycle().jobs}


def dry_runs(slurm: FakeSlurm, *, active: bool = True) -> list[Job]:
    return [
        job for job in slurm.jobs.values() if read_job(job).role is Role.DRY_RUN and (job.state.is_active or not active)
    ]


@pytest.mark.parametrize("policy", ["fifo", "srtf", "las", "tiresias", "themis"])
def test_who_reads_no_profiles_measures_nobody(make_controller, policy):
    slurm = one_gpu(new_model(1), new_model(2))
    for _ in range(3):
        cycle(slurm, make_controller, policy)
        slurm.tick()
    assert (slurm.jobs[1].state, slurm.jobs[2].state) == (JobState.RUNNING, JobState.PENDING)
    assert dry_runs(slurm, active=False) == []


@pytest.mark.parametrize("policy", ["synergy-tune-srtf", "drf", "tetris", "antman"])
def test_a_job_that_starts_without_a_profile_is_not_measured_beside_itself(make_controller, policy):
    slurm = one_gpu(new_model(1))
    cycle(slurm, make_controller, policy)
    slurm.tick()
    assert slurm.jobs[1].state is JobState.RUNNING
    assert dry_runs(slurm, active=False) == []


@pytest.mark.parametrize("policy", ["synergy-tune-fifo", "antman"])
def test_a_job_that_has_to_wait_is_measured_and_starts_after_its_dry_run(make_controller, policy):
    slurm = one_gpu(make_job(1, held=False, state=JobState.RUNNING, nodes="n1", admin_comment=""), new_model(2))
    cycle(slurm, make_controller, policy)
    (run,) = dry_runs(slurm)
    slurm.end(1)
    status = cycle(slurm, make_controller, policy)
    assert slurm.jobs[2].held
    assert "being measured with its script" in status[2].reasons[0]
    slurm.tick()
    assert slurm.jobs[run.job_id].state is JobState.RUNNING
    slurm.end(run.job_id, JobState.FAILED)
    for _ in range(8):
        cycle(slurm, make_controller, policy)
        slurm.tick()
        for left in dry_runs(slurm):
            assert slurm.jobs[2].state is not JobState.RUNNING
            slurm.end(left.job_id, JobState.FAILED)
    assert (slurm.jobs[2].state, slurm.starts[2]) == (JobState.RUNNING, 1)


def test_alone_by_wish_is_measured_first(make_controller):
    slurm = one_gpu(new_model(1, ",alone=1"))
    status = cycle(slurm, make_controller, "muri-s")
    assert len(dry_runs(slurm)) == 1
    assert slurm.jobs[1].held
    assert "being measured" in status[1].reasons[0]


def test_alone_by_need_is_not_measured(make_controller):
    slurm = one_gpu(new_model(1, can_requeue=False))
    cycle(slurm, make_controller, "muri-s")
    assert not slurm.jobs[1].held
    assert dry_runs(slurm, active=False) == []


def test_a_job_that_its_user_releases_ends_its_dry_run(make_controller):
    slurm = one_gpu(new_model(1))
    cycle(slurm, make_controller, "muri-s")
    slurm.tick()
    (run,) = dry_runs(slurm)
    slurm.release(1)
    cycle(slurm, make_controller, "muri-s")
    assert slurm.jobs[run.job_id].state is JobState.CANCELLED
    slurm.tick()
    cycle(slurm, make_controller, "muri-s")
    assert slurm.jobs[1].state is JobState.RUNNING
    assert dry_runs(slurm) == []


def test_a_job_that_waited_too_long_starts_though_its_dry_run_never_did(make_controller):
    slurm = one_gpu(make_job(1, held=False, state=JobState.RUNNING, nodes="n1", admin_comment=""), new_model(2))
    cycle(slurm, make_controller, "muri-s")
    assert len(dry_runs(slurm)) == 1
    slurm.now_s += 2 * 86400
    for _ in range(2):
        cycle(slurm, make_controller, "muri-s")
    assert not slurm.jobs[2].held
    assert dry_runs(slurm) == []
