"""PAB in the controller: who gets on too slowly, as the runtime has measured, returns to the queue and is not lost."""

from typing import Any

import pytest
from fake_slurm import FakeSlurm, Killed, make_job, make_node, one_cycle, pilots, speeds_report

from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job

pytestmark = pytest.mark.configuration(tuning={"restart_s": 0})
PREEMPTION = {"enabled": True, "least_run_s": 0}
PAB = {"policy": "pab", "gpu_mem_gib": {"gpu": 40.0}, "grouping": {"min_speed": 0.0}, "preemption": PREEMPTION}


def profile(model: str) -> StageProfile:
    times = (0.0, 0.2, 0.8, 0.0)
    detail = ProfileDetail(gpu_utilization=0.3)
    return StageProfile(
        ProfileKey(model, 8, 1, "gpu"), *times, iteration_s=1.0, iterations=20, gpu_mem_gib=4.0, detail=detail
    )


KNOWN = (profile("a"), profile("b"))


def job(job_id: int, model: str, *, checkpoint: bool = True):
    mark = f"muri:model={model},batch-size=8,duration=10000" + (",checkpoint=1" if checkpoint else "")
    return make_job(job_id, admin_comment=mark)


def cycle(slurm: FakeSlurm, make_controller: Any, **changes: Any):
    return one_cycle(make_controller, slurm, KNOWN, **{**PAB, **changes})


def report(slurm: FakeSlurm, speeds: dict[int, float], steady: tuple[str, ...] = ("1", "2")) -> None:
    """What the pilot tells of members whose iteration takes 1 s alone."""
    (pilot,) = pilots(slurm)
    slurm._update(pilot.job_id, comment=speeds_report(speeds, steady=steady))


def two_at_work(make_controller: Any, *, checkpoint: bool = True) -> FakeSlurm:
    slurm = FakeSlurm([job(1, "a", checkpoint=checkpoint)], [make_node("n1", gpu_count=1)])
    for job_id in (1, 2):
        cycle(slurm, make_controller)
        slurm.tick()
        slurm.tick()
        slurm._update(job_id, comment=f"{tags.CHECKPOINT_PREFIX}0")
        slurm.jobs.setdefault(2, job(2, "b", checkpoint=checkpoint))
    cycle(slurm, make_controller)
    assert {slurm.jobs[each].state for each in (1, 2)} == {JobState.RUNNING}
    slurm.now_s += 600
    return slurm


def test_a_job_that_company_slows_down_to_less_than_half_goes_back_and_waits_for_a_gpu_of_its_own(make_controller):
    slurm = two_at_work(make_controller)
    report(slurm, {1: 0.8, 2: 0.4})
    cycle(slurm, make_controller)
    assert slurm.calls[-1] == "requeue_hold"
    for _ in range(3):
        slurm.tick()
        status = cycle(slurm, make_controller)
    assert (slurm.jobs[1].state, slurm.jobs[2].state) == (JobState.RUNNING, JobState.PENDING)
    assert any("waits for GPUs of its own" in reason for reason in status[2].reasons)
    assert slurm.jobs[2].gpu_request == "gres/gpu:1"  # its own request again
    (pilot,) = pilots(slurm)
    slurm.end(1)
    slurm.end(pilot.job_id)
    for _ in range(2):
        cycle(slurm, make_controller)
        slurm.tick()
    assert (slurm.jobs[2].state, slurm.starts[2]) == (JobState.RUNNING, 2)


FAST, SLOW = {1: 0.8, 2: 0.55}, {1: 0.4, 2: 0.4}


@pytest.mark.parametrize(
    ("speeds", "steady"),
    [(FAST, ("1", "2")), ({1: 0.8}, ("1", "2")), (SLOW, ()), (SLOW, ("1",)), (SLOW, ("1", "2", "3"))],
)
def test_nobody_is_put_back_who_is_fast_enough_or_was_not_measured_in_this_company(make_controller, speeds, steady):
    slurm = two_at_work(make_controller)
    report(slurm, speeds, steady)
    cycle(slurm, make_controller)
    assert "requeue_hold" not in slurm.calls


@pytest.mark.parametrize(
    ("checkpoint", "run", "preemption"),
    [(False, 0, PREEMPTION), (True, 0, {"enabled": False}), (True, 0, {"enabled": True}), (True, 7, PREEMPTION)],
)
def test_nobody_is_stopped_who_must_not_be(make_controller, checkpoint, run, preemption):
    """The third case is that of a job that runs for less than `least_run_s`, the last that of another run's word."""
    slurm = two_at_work(make_controller, checkpoint=checkpoint)
    for job_id in (1, 2):
        slurm._update(job_id, comment=f"{tags.CHECKPOINT_PREFIX}{run}")
    slurm.now_s -= 300
    report(slurm, {1: 0.3, 2: 0.3})
    cycle(slurm, make_controller, preemption=preemption)
    assert "requeue_hold" not in slurm.calls


def test_nobody_joins_gpus_of_which_a_member_is_about_to_stop(make_controller):
    slurm = two_at_work(make_controller)
    report(slurm, {1: 0.8, 2: 0.4})
    slurm.jobs[3] = job(3, "a")
    status = cycle(slurm, make_controller)
    assert read_job(slurm.jobs[3]).role is Role.CANDIDATE
    assert any("a member of the group is about to stop" in reason for reason in status[3].reasons)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_killed_at_any_call_nobody_is_lost(make_controller, side, nth):
    slurm = two_at_work(make_controller)
    report(slurm, {1: 0.8, 2: 0.4})
    with pytest.raises(Killed), slurm.killing(side, nth):
        for _ in range(3):
            cycle(slurm, make_controller)
            slurm.tick()
    for _ in range(4):
        cycle(slurm, make_controller)
        slurm.tick()
    assert (slurm.jobs[1].state, slurm.jobs[2].state) == (JobState.RUNNING, JobState.PENDING)
    assert slurm.jobs[2].gpu_request == "gres/gpu:1"
