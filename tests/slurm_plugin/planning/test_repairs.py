"""A cycle repairs jobs that Slurm set aside, submissions cut off, groups that an error of the GPU ended."""

from dataclasses import replace

import pytest
from fake_slurm import NOW_S, FakeSlurm, four_jobs, group_at_work, make_job, make_node, one_cycle, one_gpu, pilots

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.cycle import cycle_input
from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.planning.actions import Cancel, Regroup, Restore, ReturnToQueue
from muri.slurm_plugin.planning.gathered import gather
from muri.slurm_plugin.planning.repairs import reconcile
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import SPECIAL_EXIT, JobState
from muri.slurm_plugin.records.comment_reports import Fault, fault_token, parse_fault
from muri.slurm_plugin.records.journal import GROUP, Intent
from muri.slurm_plugin.records.roles import Role, read_job


def set_aside(slurm: FakeSlurm, job_id: int) -> None:
    slurm.requeue_hold(job_id)
    slurm._update(job_id, reason=SPECIAL_EXIT)


def test_the_state_that_both_gateways_read():
    assert text_fields.reason_text("JobHeldUser", ["PENDING", "SPECIAL_EXIT"]) == SPECIAL_EXIT
    assert text_fields.reason_text("JobHeldUser", ["PENDING"]) == "JobHeldUser"


@pytest.mark.parametrize("reason", [SPECIAL_EXIT, "JobHoldMaxRequeue"])
def test_a_job_alone_is_left_held_by_cycles_and_by_a_drain(make_controller, reason):
    slurm = FakeSlurm([make_job(1, reason=reason, restart_count=1, exit_code=7)], [make_node("n1")])
    one_cycle(make_controller, slurm)
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
            one_cycle(make_controller, slurm)
    assert (slurm.jobs[1].held, slurm.jobs[1].gpu_count, read_job(slurm.jobs[1]).role) == (True, 1, Role.USER_HELD)
    slurm.release(1)
    for job_id in (2, 3, 4, max(slurm.jobs)):
        slurm.end(job_id)
    slurm.tick()
    assert slurm.starts[1] == 2


HELD = {"admin_comment": "", "submit_s": NOW_S - 100, "job_id": 9}
OWN = {**HELD, "name": "muri:1+2", "comment": "muri-pilot:abc:1,2"}
KNOWN = (Intent("abc", GROUP, {}, "abandoned", None, NOW_S - 100),)


def repairs(*jobs):
    slurm = FakeSlurm([make_job(**job) for job in jobs], [make_node("n1")])
    return reconcile(gather(replace(cycle_input(slurm.snapshot(), None, Config()), intents=KNOWN)))


@pytest.mark.parametrize("fields", [{}, {"name": "muri-pilot"}, {"comment": "muri-dryrun:abc"}])
def test_a_job_of_muris_that_was_never_tagged_is_cancelled(fields):
    assert repairs({**OWN, **fields}) == (Cancel(9, "its submission was cut off"),)


@pytest.mark.parametrize(
    "fields",
    [
        {"comment": "muri-pilot:mine:1,2"},
        {"comment": "muri-pilots are fine"},
        {"held": False, "reason": ""},
        {"submit_s": NOW_S - 30},
        {"restart_count": 1},
    ],
)
def test_others_are_left_alone(fields):
    assert repairs({**OWN, **fields}) == ()


def test_a_job_that_may_start_in_a_moment_is_not_delayed_anew_in_each_cycle():
    """Muri lets a requeued job start two seconds later; a cycle each half second would put that off for ever."""
    gated = {"admin_comment": "muri:on muri-gate:licence", "licenses": "muri_gate:1", "held": False}
    requeued = {"job_id": 1, "restart_count": 1, **gated}
    assert [type(action) for action in repairs({**requeued, "begin_s": NOW_S + 60})] == [ReturnToQueue]
    assert repairs({**requeued, "begin_s": NOW_S + 2}) == ()


CAUSE = "CUDA error: an illegal memory access was encountered"


def test_token_survives_the_way_through_a_comment():
    token = fault_token({"fault": {"cause": CAUSE, "culprits": ["3", "4"]}, "members": {}})
    assert " " not in token
    assert parse_fault(f"others {token} text") == Fault(CAUSE, (3, 4))
    long = fault_token({"fault": {"cause": "x" * 5000, "culprits": ["3", None, "4_x", "9" * 500]}})
    assert len(long) < 1024
    assert parse_fault(long).culprits == (3,)
    assert [fault_token(each) for each in ({}, {"fault": None}, {"fault": "text"})] == [None] * 3


@pytest.mark.parametrize("text", ["", "muri-fault:{", 'muri-fault:["x"]', "muri-speed:{}"])
def test_what_is_no_token_is_no_fault(text):
    assert parse_fault(text) is None


def test_members_of_a_node_that_opens_no_gpus_for_them_run_alone(make_controller):
    slurm = group_at_work(make_controller)
    with make_controller(slurm) as controller:
        (pilot,) = pilots(slurm)
        token = fault_token({"fault": {"cause": "the SPANK plugin is not loaded on node n1", "culprits": []}})
        slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=token)
        for i in (1, 2, 3, 4):
            slurm.requeue_hold(i)
        slurm.end(pilot.job_id, state=JobState.FAILED)
        told = {job.job_id: " ".join(job.reasons) for job in controller.cycle().jobs}
    assert all("could not run: the SPANK plugin is not loaded on node n1" in told[i] for i in (1, 2, 3, 4))


def test_culprit_runs_alone_and_the_others_share_again(make_controller):
    slurm = group_at_work(make_controller)
    with make_controller(slurm) as controller:
        (pilot,) = pilots(slurm)
        token = fault_token({"fault": {"cause": CAUSE, "culprits": ["3"]}})
        slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=token)
        for i in (1, 2, 3, 4):
            slurm.requeue_hold(i)
        slurm.end(pilot.job_id, state=JobState.FAILED)
        told: set[str] = set()
        for _ in range(4):
            status = controller.cycle()
            told |= {reason for job in status.jobs if job.job_id == 3 for reason in job.reasons}
            slurm.tick()
            if slurm.jobs[3].state is JobState.RUNNING:
                assert read_job(slurm.jobs[3]).role is not Role.MEMBER
                assert slurm.jobs[3].gpu_count == 1
                slurm.end(3, state=JobState.FAILED)
    second = [job for job in pilots(slurm) if job.job_id != pilot.job_id]
    assert [set(tags.parse_pilot(job.admin_comment)[1]) for job in second] == [{1, 2, 4}]
    assert slurm.jobs[3].state is JobState.FAILED
    assert any("may have caused" in reason for reason in told)


@pytest.mark.parametrize(
    ("pilot", "member", "after_s", "gives_up"),
    [
        ({"reason": "BadConstraints"}, {}, 1, True),
        ({"reason": "QOSMaxGRESPerUser"}, {}, 1, True),
        ({"reason": "Resources"}, {}, 100, False),
        ({"reason": "Resources"}, {}, 200, True),
        ({"reason": "InvalidAccount"}, {}, 100, False),
        ({"reason": "InvalidAccount"}, {}, 200, True),
        ({"state": JobState.RUNNING}, {"reason": "Resources"}, 20, False),
        ({"state": JobState.RUNNING}, {"reason": "Resources"}, 40, True),
        ({"state": JobState.RUNNING}, {"reason": "Priority"}, 200, False),
        ({"state": JobState.RUNNING}, {"reason": "Priority"}, 400, True),
    ],
)
def test_a_pilot_that_does_not_start_or_stays_empty_ends_and_its_jobs_wait_with_their_own_request(
    make_controller, pilot, member, after_s, gives_up
):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    one_cycle(make_controller, slurm)
    (started,) = pilots(slurm)
    slurm._update(started.job_id, start_s=NOW_S, nodes="n1" if "state" in pilot else "", **pilot)
    for number in (1, 2, 3, 4):
        slurm._update(number, **{"reason": "Dependency", **member})
    slurm.now_s += after_s
    actions = reconcile(gather(cycle_input(slurm.snapshot(), None, Config())))
    left = {action.job_id for action in actions if isinstance(action, Regroup | Restore)}
    assert left == ({1, 2, 3, 4} if gives_up else set())
    ended = [action.job_id for action in actions if isinstance(action, Cancel)]
    assert ended == ([started.job_id] if gives_up else [])


@pytest.mark.parametrize(("after_s", "is_cancelled"), [(50.0, False), (70.0, True)])
def test_a_pilot_has_time_to_tell_of_its_last_member_however_long_it_has_run(make_controller, after_s, is_cancelled):
    slurm = group_at_work(make_controller)
    (pilot,) = pilots(slurm)
    slurm.now_s += 1000
    for number in (1, 2, 3, 4):
        slurm.end(number)
    slurm.now_s += after_s
    with make_controller(slurm, ()) as controller:
        actions = controller.decision().repairs
    assert [action.job_id for action in actions if isinstance(action, Cancel)] == [pilot.job_id] * is_cancelled


def test_pilot_that_slurm_has_forgotten_leaves_its_members_alone(make_controller):
    slurm = group_at_work(make_controller)
    (pilot,) = pilots(slurm)
    for i in (1, 2, 3, 4):
        slurm.requeue_hold(i)
    del slurm.jobs[pilot.job_id]
    for _ in range(2):
        one_cycle(make_controller, slurm)
    assert pilots(slurm) == []
    assert not any(slurm.jobs[i].held for i in (1, 2, 3, 4))
