"""Faults that stories told on the twin found (docs/testing.md), each in a cycle or two of its own."""

import sqlite3
from dataclasses import replace

import pytest
from fake_slurm import (
    NOW_S,
    FakeSlurm,
    Killed,
    behind_lease,
    behind_license,
    four_jobs,
    group_at_work,
    make_node,
    one_cycle,
    one_gpu,
    pilots,
    run_cycles,
)

from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records import journal
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.journal import JournalError
from muri.slurm_plugin.records.roles import Role, read_job

FACTS = (
    journal.CLAIMS, journal.COUNTERS, journal.DRY_RUN_FAILED, journal.EXCLUSION, journal.FIRST_SUBMIT, journal.GPU_MEM,
    journal.GROUP_RUN, journal.LARGEST_GROUP, journal.PAIR, journal.PYTHON, journal.RELEASE_REFUSED, journal.SERVICE,
)  # fmt: skip


def members_of(slurm):
    return [number for number, job in slurm.jobs.items() if read_job(job).role is Role.MEMBER]


def test_a_journal_that_cannot_be_written_lets_the_lease_end(make_controller):
    slurm = behind_lease(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        controller._journal._connection.execute("PRAGMA query_only=1")
        with pytest.raises(JournalError):
            controller.cycle()
    assert slurm.lease_end_s == NOW_S + 600


def test_a_damaged_journal_is_set_aside_and_the_cycle_goes_on(make_controller, tmp_path):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm):
        pass
    path = tmp_path / "journal.db"
    path.write_bytes(path.read_bytes()[:4096] + bytes(range(256)) * 64)
    one_cycle(make_controller, slurm)
    assert pilots(slurm)
    assert list(tmp_path.glob("journal.db.damaged-*"))


def test_a_journal_that_is_damaged_while_it_is_open_costs_no_cycle(make_controller):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        connection = controller._journal._connection
        connection.execute("INSERT INTO facts VALUES ('bar', '1', 'no JSON')")
        controller.cycle()
        assert pilots(slurm)
        assert not isinstance(connection, type(None))
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")


@pytest.mark.parametrize("name", FACTS)
def test_damaged_notes_in_the_journal_cost_no_cycle(make_controller, name):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        for value in (None, 3, "x", [], {}, [{}], [[1]], [1, 2, 3, 4], {"runs": [[1]]}):
            for subject in ("1", "x"):
                controller._journal.set_fact(name, subject, value)
            assert controller.cycle().errors == ()
    assert not slurm.jobs[1].held


@pytest.mark.parametrize(("start", "end"), [(0.0, 0.3), (0.0, 0.9), (0.01, 1.0)])
def test_a_member_whose_comment_was_cut_off_gets_its_own_request_back(make_controller, start, end):
    slurm = behind_lease(four_jobs(), one_gpu())
    one_cycle(make_controller, slurm)
    members = members_of(slurm)
    for number in members:
        comment = slurm.jobs[number].admin_comment
        slurm._update(number, admin_comment=comment[int(start * len(comment)) : int(end * len(comment))])
    slurm.end(pilots(slurm)[0].job_id, state=JobState.CANCELLED)
    one_cycle(make_controller, slurm)
    assert {(slurm.jobs[each].gpu_request, slurm.jobs[each].gpu_count) for each in members} == {("gres/gpu:1", 1)}


def test_a_job_that_has_started_meanwhile_may_be_grouped_later(make_controller):
    slurm = FakeSlurm(four_jobs(), one_gpu())

    def starts(name):
        if name == "modify":
            raise GatewayError("cannot change job: Job is no longer pending execution")

    slurm.before_call = starts
    with make_controller(slurm) as controller:
        controller.cycle()
        assert controller._journal.facts(journal.EXCLUSION) == {}


NO_GPUS = {"gpu_count": 0, "gpu_request": "gres/gpu:0", "held": False, "reason": "", "licenses": ""}


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        pytest.param(
            {**NO_GPUS, "admin_comment": f"muri:model=m1 {tags.STATE_PREFIX}damaged"}, {"gpu_request": "gres/gpu:0"},
            id="an unknown member is left alone",
        ),
        pytest.param({"admin_comment": ""}, {"licenses": ""}, id="a gate whose job lost its tags is opened"),
        pytest.param(
            {"held": True, "reason": "JobHeldUser", "admin_comment": "muri:model=m1"}, {"held": True},
            id="a user's hold stays when its tags were cut off",
        ),
    ],
)  # fmt: skip
def test_of_a_job_with_damaged_tags(make_controller, changes, after):
    slurm = FakeSlurm([replace(behind_license(four_jobs()[0]), **changes)], one_gpu(), gate_license=True)
    one_cycle(make_controller, slurm)
    assert {name: getattr(slurm.jobs[1], name) for name in after} == after
    assert slurm.starts == {}


def test_a_restore_that_is_cut_off_before_the_release_is_finished_later(make_controller):
    slurm = group_at_work(make_controller)
    member = members_of(slurm)[0]
    slurm.requeue_hold(member)
    slurm.end(pilots(slurm)[0].job_id, state=JobState.CANCELLED)

    def no_answer(name):
        if name == "release":
            raise SlurmUnreachableError("Socket timed out")

    slurm.before_call = no_answer
    with pytest.raises(SlurmUnreachableError):
        one_cycle(make_controller, slurm)
    slurm.before_call = lambda name: None
    assert slurm.jobs[member].held
    run_cycles(make_controller, slurm, 3)
    assert not slurm.jobs[member].held


def test_a_resumed_start_spares_a_job_whose_request_was_changed_meanwhile(make_controller):
    slurm = FakeSlurm(four_jobs(), [make_node("n1", gpu_count=1)])
    with slurm.killing("after", 1), pytest.raises(Killed):
        one_cycle(make_controller, slurm)
    assert pilots(slurm)
    slurm._update(2, time_limit_s=600)
    one_cycle(make_controller, slurm)
    assert slurm.jobs[2].time_limit_s == 600
    state = tags.parse_state(slurm.jobs[2].admin_comment)
    assert state is None or state.original.time_limit_s == 600


@pytest.mark.parametrize("limit_s", [None, 7 * 3600])
def test_a_member_that_returns_keeps_the_time_limit_that_an_administrator_gave_it(make_controller, limit_s):
    slurm = group_at_work(make_controller)
    member, own_s = members_of(slurm)[0], four_jobs()[0].time_limit_s
    assert slurm.jobs[member].time_limit_s > own_s
    if limit_s is not None:
        slurm._update(member, time_limit_s=limit_s)
    slurm.requeue_hold(member)
    slurm.end(pilots(slurm)[0].job_id, state=JobState.CANCELLED)
    one_cycle(make_controller, slurm)
    assert slurm.jobs[member].gpu_count == 1
    assert slurm.jobs[member].time_limit_s == (limit_s or own_s)


@pytest.mark.parametrize("limit_s", [0, 60, 9 * 3600])
def test_a_pilot_outlives_a_member_that_an_administrator_gave_more_time(make_controller, limit_s):
    slurm = group_at_work(make_controller)
    before_s, members = pilots(slurm)[0].time_limit_s, members_of(slurm)
    assert before_s < 9 * 3600
    slurm._update(members[0], time_limit_s=limit_s)
    one_cycle(make_controller, slurm)
    assert pilots(slurm)[0].time_limit_s == {0: 0, 60: before_s, 9 * 3600: 9 * 3600 + 600}[limit_s]
    assert slurm.jobs[members[0]].time_limit_s == limit_s


def failing_once_after_a_release(jobs: list[Job], error: Exception) -> tuple[FakeSlurm, list[str]]:
    """One GPU's Slurm, where the change that notes the first release fails, and the calls until then."""
    slurm, calls = FakeSlurm(jobs, one_gpu()), []

    def fail(name: str) -> None:
        calls.append(name)
        if calls[-2:] == ["release", "modify"]:
            slurm.before_call = lambda name: None
            raise error

    slurm.before_call = fail
    return slurm, calls


def test_a_users_hold_stays_where_slurm_had_refused_to_note_a_release(make_controller):
    refused = GatewayError("Slurm temporarily unable to accept job, sleeping and retrying")
    slurm, calls = failing_once_after_a_release(four_jobs()[:1], refused)
    with make_controller(slurm) as controller:
        controller.cycle()
        assert (calls[-2:], slurm.jobs[1].held) == (["release", "modify"], False)
        slurm.hold(1)
        controller.cycle()
    assert slurm.jobs[1].held


def test_a_members_own_requeue_with_a_hold_loses_no_request_when_its_tags_were_cut_off(make_controller):
    slurm = behind_lease(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.tick()
        member = members_of(slurm)[0]
        controller.cycle()  # its gate is closed again while it runs
        slurm.requeue_hold(member)
        slurm.jobs[member] = replace(slurm.jobs[member], admin_comment="muri:model=m1,ba")
        slurm.end(pilots(slurm)[0].job_id, state=JobState.CANCELLED)
        assert (slurm.jobs[member].gpu_count, slurm.jobs[member].held) == (0, True)
        for _ in range(2):
            controller.cycle()
    assert (slurm.jobs[member].gpu_count, slurm.jobs[member].held) == (1, False)


def test_a_users_hold_stays_where_no_answer_had_come_to_a_members_release(make_controller):
    jobs = [replace(job, admin_comment=f"{job.admin_comment} muri-gate:hold") for job in four_jobs()]
    slurm, _ = failing_once_after_a_release(jobs, SlurmUnreachableError("Zero Bytes were transmitted or received"))
    with pytest.raises(SlurmUnreachableError):
        one_cycle(make_controller, slurm)
    (member,) = (number for number in members_of(slurm) if not slurm.jobs[number].held)
    one_cycle(make_controller, slurm)  # the start is resumed
    slurm.hold(member)
    slurm.cancel(pilots(slurm)[0].job_id)
    run_cycles(make_controller, slurm, 2, 0)
    assert slurm.jobs[member].held


@pytest.mark.parametrize("word", ["hold", "requeued"])
def test_a_users_hold_stays_where_the_release_of_a_job_alone_was_not_noted(make_controller, word):
    """The second word is that of a job which was put back before, as after an unanswered release."""
    job = replace(four_jobs()[0], admin_comment=f"muri:model=m1,batch-size=8 muri-gate:{word}", held=False, reason="")
    slurm = FakeSlurm([job], one_gpu())
    one_cycle(make_controller, slurm)
    slurm.hold(1)
    one_cycle(make_controller, slurm)
    assert slurm.jobs[1].held
