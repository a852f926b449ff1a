"""A group that an error of the GPU ended: its culprits run alone, the others are candidates again."""

from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm, four_jobs, make_node, one_gpu, pilots

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import Fault, fault_token, parse_fault
from muri.slurm_plugin.records.roles import Role, read_job

CAUSE = "CUDA error: an illegal memory access was encountered"


def test_token_survives_the_way_through_a_comment():
    token = fault_token({"fault": {"cause": CAUSE, "culprits": ["3", "4"]}, "members": {}})
    assert " " not in token
    assert parse_fault(f"others {token} text") == Fault(CAUSE, (3, 4))
    long = fault_token({"fault": {"cause": "x" * 5000, "culprits": ["3", None, "4_x"]}})
    assert len(long) < 1024
    assert parse_fault(long).culprits == (3,)


@pytest.mark.parametrize("status", [{}, {"fault": None}, {"fault": "text"}])
def test_no_fault_no_token(status):
    assert fault_token(status) is None


@pytest.mark.parametrize("text", ["", "muri-fault:{", 'muri-fault:["x"]', "muri-speed:{}"])
def test_what_is_no_token_is_no_fault(text):
    assert parse_fault(text) is None


def test_culprit_runs_alone_and_the_others_share_again(make_controller):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.tick()
        slurm.tick()
        (pilot,) = pilots(slurm)
        token = fault_token({"fault": {"cause": CAUSE, "culprits": ["3"]}})
        slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=token)
        for i in (1, 2, 3, 4):
            slurm.requeue_hold(i)
        slurm.end(pilot.job_id, JobState.FAILED)
        told: set[str] = set()
        for _ in range(4):
            status = controller.cycle()
            told |= {reason for job in status.jobs if job.job_id == 3 for reason in job.reasons}
            slurm.tick()
            if slurm.jobs[3].state is JobState.RUNNING:
                assert read_job(slurm.jobs[3]).role is not Role.MEMBER
                assert slurm.jobs[3].gpu_count == 1
                slurm.end(3, JobState.FAILED)
    second = [job for job in pilots(slurm) if job.job_id != pilot.job_id]
    assert [set(tags.parse_pilot(job.admin_comment)[1]) for job in second] == [{1, 2, 4}]
    assert slurm.jobs[3].state is JobState.FAILED
    assert any("may have caused" in reason for reason in told)


def test_pilot_that_slurm_has_forgotten_leaves_its_members_alone(make_controller):
    slurm = FakeSlurm(four_jobs(), [make_node("n1", gpu_count=1)])
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.tick()
        slurm.tick()
        (pilot,) = pilots(slurm)
        for i in (1, 2, 3, 4):
            slurm.requeue_hold(i)
        del slurm.jobs[pilot.job_id]
        controller.cycle()
        controller.cycle()
    assert pilots(slurm) == []
    assert not any(slurm.jobs[i].held for i in (1, 2, 3, 4))
