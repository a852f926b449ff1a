"""A member that ran out of GPU memory beside others is a candidate again and asks for more; not for ever."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fake_slurm import FOUR_KINDS, NOW_S, FakeSlurm, four_jobs, group_at_work, make_job, one_gpu, pilots

from muri.policies.siblings.horus_cost import MAX_RAISES
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.node import membership as member
from muri.slurm_plugin.node.slurm_calls import JobRecord
from muri.slurm_plugin.planning.actions import AskForMore, Restore, ReturnToQueue
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.gathered import gather
from muri.slurm_plugin.planning.repairs import reconcile
from muri.slurm_plugin.planning.slurm_requests import asked_by, with_memory_retry
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import may_try_again, out_of_memory_runs, out_of_memory_text
from muri.slurm_plugin.records.comment_tags import MemoryRetry, memory_retry
from muri.slurm_plugin.records.roles import Role, read_job, view_of


def comment(run, times):
    return f"words {tags.OUT_OF_MEMORY_PREFIX}{out_of_memory_text(run, times)}"


@pytest.mark.parametrize(
    "text", ["", "muri-out-of-memory:", "muri-out-of-memory:1", "muri-out-of-memory:x.2", "muri-out-of-memory:².1"]
)
def test_what_is_no_token_tells_of_nothing(text):
    assert out_of_memory_runs(text) == (-1, 0)
    assert may_try_again(text)


def test_tries_are_counted_and_a_comment_says_what_becomes_of_the_next():
    assert may_try_again(comment(0, MAX_RAISES - 1))
    assert not may_try_again(comment(0, MAX_RAISES))
    for retry in MemoryRetry:
        assert memory_retry(with_memory_retry("muri:model=m muri-retry-memory:1", retry)) is retry
    assert memory_retry("muri:model=m muri-retry-memory:perhaps") is MemoryRetry.ALONE


def test_ranks_of_one_job_count_as_one_try(monkeypatch, capsys):
    text = {"comment": "words", "admin_comment": with_memory_retry("muri:model=m", MemoryRetry.WITH_MORE)}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(member, "job_record", lambda job_id: JobRecord(str(job_id), "RUNNING", **text))
    monkeypatch.setattr(member, "set_comment", lambda name, comment: text.update(comment=comment))
    requeued = []
    monkeypatch.setattr(member, "requeue", lambda name, held: requeued.append((name, held)))
    assert [member.SlurmMembership().requeue_for_memory("7") for _ in range(4)] == [True] * 4
    assert out_of_memory_runs(text["comment"]) == (2, 1)
    assert requeued == [("7", True)]
    assert "out of GPU memory beside others" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["auto", "horus"])
def test_after_a_drain_members_fail_as_they_would_alone(make_controller, policy, monkeypatch):
    slurm = group_at_work(make_controller, policy=policy, gpu_mem_gib={"gpu": 24.0})
    at_work = [job.job_id for job in slurm.jobs.values() if read_job(job).role is Role.MEMBER]
    assert at_work
    drained = drain(slurm, slurm.snapshot)
    assert set(drained.running) == set(at_work)
    assert not drained.failed
    assert {memory_retry(slurm.jobs[each].admin_comment) for each in at_work} == {MemoryRetry.NONE}
    told = {each: JobRecord(str(each), "RUNNING", "", slurm.jobs[each].admin_comment) for each in at_work}
    monkeypatch.setattr(member, "job_record", told.__getitem__)
    assert not any(member.SlurmMembership().requeue_for_memory(str(each)) for each in at_work)
    assert all(read_job(slurm.jobs[each]).role is Role.MEMBER for each in at_work)


@contextmanager
def without_memory(
    make_controller, times: int, run: int = -1, retry: MemoryRetry = MemoryRetry.WITH_MORE, **changes
) -> Iterator[tuple[FakeSlurm, Controller]]:
    """A group of four at work, of which job 3 is back: its last run (-1), or an earlier one, ran out of memory."""
    slurm = FakeSlurm(four_jobs(), one_gpu())
    known = tuple(replace(item, gpu_mem_gib=4.0) for item in FOUR_KINDS)
    with make_controller(slurm, known, **changes) as controller:
        controller.cycle()
        come_back(slurm, times, run, retry)
        yield slurm, controller


def come_back(slurm: FakeSlurm, times: int, run: int = -1, retry: MemoryRetry = MemoryRetry.WITH_MORE) -> None:
    for _ in range(2):
        slurm.tick()
    slurm.requeue_hold(3)
    job, tag = slurm.jobs[3], with_memory_retry(slurm.jobs[3].admin_comment, retry)
    slurm.jobs[3] = replace(job, comment=comment(job.restart_count + run, times), admin_comment=tag)


def test_a_member_out_of_memory_is_a_candidate_again_with_a_higher_request(make_controller):
    settings = {"grouping": {"join": False}, "gpu_mem_gib": {"gpu": 24.0}}
    with without_memory(make_controller, 1, **settings) as (slurm, controller):
        (pilot,) = pilots(slurm)
        again = [action for action in controller.decision().repairs if getattr(action, "job_id", 0) == 3]
        assert [type(action) for action in again] == [AskForMore]
        controller.cycle()
        after = controller.decision()
    assert read_job(slurm.jobs[3]).role is Role.CANDIDATE
    assert (slurm.jobs[3].held, slurm.jobs[3].gpu_count) == (True, 1)
    asked = {job.job_id: job.gpu_mem_request_gib for job in after.preparation.request.jobs}
    assert asked == {3: 6.0}
    assert all(read_job(slurm.jobs[i]).role is Role.MEMBER for i in (1, 2, 4))
    assert slurm.jobs[pilot.job_id].state.is_active


def test_who_joins_again_asks_for_more_each_time(make_controller):
    with without_memory(make_controller, 1, gpu_mem_gib={"gpu": 24.0}) as (slurm, controller):
        asked = []
        for times in (2, 3, 4):
            asked += [action.gpu_mem_gib for action in controller.decision().repairs]
            slurm.now_s += 10
            controller.cycle()
            assert read_job(slurm.jobs[3]).role is Role.MEMBER
            come_back(slurm, times)
    assert asked == [6.0, 9.0, 24.0]


def test_where_the_policy_does_not_plan_by_memory_it_runs_alone_next_time(make_controller):
    with without_memory(make_controller, 1, retry=MemoryRetry.ALONE) as (slurm, controller):
        controller.cycle()
        after = controller.cycle()
    assert read_job(slurm.jobs[3]).role is Role.RELEASED
    assert slurm.jobs[3].gpu_count == 1
    (why,) = [job.reasons for job in after.jobs if job.job_id == 3]
    assert "it ran out of GPU memory beside others" in str(why)


@pytest.mark.parametrize(
    ("gpu_mem_gib", "times", "run", "expected", "asked_gib"),
    [
        ({"gpu": 24.0}, MAX_RAISES, -1, AskForMore, 24.0),
        ({}, MAX_RAISES - 1, -1, AskForMore, 6.0),
        ({}, MAX_RAISES, -1, Restore, None),
        ({}, 1, -2, Restore, None),  # requeued for another reason
    ],
)
def test_the_last_try_is_one_without_company(make_controller, gpu_mem_gib, times, run, expected, asked_gib):
    with without_memory(make_controller, times, run, gpu_mem_gib=gpu_mem_gib) as (_, controller):
        (action,) = controller.decision().repairs
    assert type(action) is expected
    assert getattr(action, "gpu_mem_gib", None) == asked_gib


ORIGINAL = asked_by(make_job(1))
MEMBER_TAG = tags.STATE_PREFIX + tags.format_state(tags.MemberState(9, ORIGINAL, 1)) + f" {tags.GRANT_PREFIX}9"


@pytest.mark.parametrize(
    ("changes", "is_back"),
    [
        ({"licenses": "muri_gate:1"}, True),
        ({"begin_s": NOW_S + 60}, True),
        ({"begin_s": NOW_S + 2}, False),
        ({}, False),
        ({"licenses": "muri_gate:1", "held": True, "reason": "JobHeldAdmin"}, False),
    ],
    ids=["behind its gate", "in Slurm's delay", "about to start", "given to a group again", "held by an administrator"],
)
@pytest.mark.parametrize("word", [comment(0, 1), f"{tags.STOPPED_PREFIX}0"], ids=["out of memory", "stopped"])
def test_a_returned_member_is_put_back_once_and_not_out_of_its_next_group(word, changes, is_back):
    tag = f"muri:on muri-gate:licence {MEMBER_TAG}"
    base = {"held": False, "comment": word, "restart_count": 1, "admin_comment": tag}
    pilot = make_job(9, held=False, admin_comment=tags.PILOT_PREFIX + tags.format_pilot("token", (1,)))
    view = view_of(FakeSlurm([make_job(1, **(base | changes)), pilot], one_gpu()).snapshot())
    repairs = reconcile(gather(CycleInput(view, Knowledge({}), Config())))
    found = [each for each in repairs if isinstance(each, AskForMore | ReturnToQueue | Restore) and each.job_id == 1]
    others = {"it was held; it waits until it is released"}
    assert len([each for each in found if each.why not in others]) == is_back
