"""A job that Slurm set aside after it failed (RequeueExitHold) stays held: released unseen, it fails again for ever."""

import pytest
from fake_slurm import FakeSlurm, make_job, make_node

from muri.slurm_plugin.execute.drain import drain
from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.records.cluster import SPECIAL_EXIT
from muri.slurm_plugin.records.roles import Role, read_job


def set_aside(slurm: FakeSlurm, job_id: int) -> None:
    slurm.requeue_hold(job_id)
    slurm._update(job_id, reason=SPECIAL_EXIT)


def group_at_work(make_controller) -> FakeSlurm:
    jobs = [make_job(n, admin_comment=f"muri:model=m{n},batch-size=8,duration=100") for n in (1, 2)]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1)])
    with make_controller(slurm) as controller:
        controller.cycle()
    slurm.tick()
    assert slurm.jobs[1].gpu_count == 0
    return slurm


def test_the_state_that_both_gateways_read():
    assert text_fields.reason_text("JobHeldUser", ["PENDING", "SPECIAL_EXIT"]) == SPECIAL_EXIT
    assert text_fields.reason_text("JobHeldUser", ["PENDING"]) == "JobHeldUser"


@pytest.mark.parametrize("reason", [SPECIAL_EXIT, "JobHoldMaxRequeue"])
def test_a_job_alone_is_left_held_by_cycles_and_by_a_drain(make_controller, reason):
    slurm = FakeSlurm([make_job(1, reason=reason, restart_count=1, exit_code=7)], [make_node("n1")])
    with make_controller(slurm) as controller:
        controller.cycle()
    drain(slurm, slurm.snapshot)
    assert (read_job(slurm.jobs[1]).role, slurm.jobs[1].held) == (Role.USER_HELD, True)


@pytest.mark.parametrize("drained", [False, True])
def test_a_member_gets_its_own_request_back_and_stays_held(make_controller, drained):
    slurm = group_at_work(make_controller)
    set_aside(slurm, 1)
    if drained:
        drain(slurm, slurm.snapshot)
    else:
        for _ in range(2):
            with make_controller(slurm) as controller:
                controller.cycle()
    assert (slurm.jobs[1].held, slurm.jobs[1].gpu_count, read_job(slurm.jobs[1]).role) == (True, 1, Role.USER_HELD)
    slurm.release(1)
    slurm.end(2)
    slurm.end(max(slurm.jobs))
    slurm.tick()
    assert slurm.starts[1] == 2
