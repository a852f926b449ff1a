"""Job arrays in a plan: which tasks get records, how many start, and where they stand in Slurm's queue."""

from dataclasses import replace

import at_work
import pytest
from fake_slurm import NOW_S, behind_licence, make_job, make_node

from muri.slurm_plugin.planning.actions import Overtake, SplitTasks
from muri.slurm_plugin.planning.arrays import Siblings, overtakes, priority_ahead, task_numbers, throttled
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.request import prepare
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState

MEMBER = tags.STATE_PREFIX + tags.format_state(tags.MemberState(99, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))


def task(job_id: int, tasks: str, limit: int = 0, **changes: object) -> Job:
    """A record of array 10, behind the licence."""
    return replace(
        behind_licence(make_job(job_id, array=True, array_job_id=10, array_tasks=tasks, array_limit=limit)),
        **changes,  # type: ignore[arg-type]
    )


def let_go(job: Job, **changes: object) -> Job:
    """The same task, which Muri has let start."""
    return replace(job, licenses="", **changes)  # type: ignore[arg-type]


def cycle_of(*jobs: Job, gpus: int = 2) -> CycleInput:
    return at_work.cycle_of(jobs, [make_node("n1", gpu_count=gpus)])


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", [3]), ("0-3,9", [0, 1, 2, 3, 9]), ("0-4:2,7", [0, 2, 4, 7]), ("1,5", [1, 5])]
)
def test_slurms_lists_of_tasks_are_read(text: str, numbers: list[int]) -> None:
    assert list(task_numbers(text)) == numbers


@pytest.mark.parametrize(
    ("tasks", "name", "several", "unknown"),
    [("3", "10_3", False, False), ("4-9,12", "10_[4-9,12]", True, True), ("", "10", False, True)],
)
def test_a_record_has_a_name_of_its_own(tasks: str, name: str, several: bool, unknown: bool) -> None:
    job = task(10, tasks)
    assert (job.name_in_slurm, job.several_tasks, job.unknown_task) == (name, several, unknown)


def test_as_many_tasks_get_records_as_could_start_and_never_more_than_some_dozen() -> None:
    prepared = prepare(cycle_of(task(10, "0-9999"), gpus=2))
    assert prepared.splits == (SplitTasks(10, tuple(range(8))),)  # four in a group
    assert not prepared.request.jobs
    assert "come after those that have job ids of their own" in prepared.waiting[10]
    ready = [task(20 + number, str(number)) for number in range(8)]
    assert prepare(cycle_of(task(10, "8-9999"), *ready)).splits == ()
    (split,) = prepare(cycle_of(task(10, "0-9999"), gpus=1000)).splits
    assert len(split.tasks) == 64
    # The last task keeps the array's record.
    assert prepare(cycle_of(task(10, "4,7"))).splits == (SplitTasks(10, (4,)),)
    assert prepare(cycle_of(task(10, "7"))).splits == ()


@pytest.mark.parametrize(
    "changes", [{"dependency": "afterok:3"}, {"begin_s": NOW_S + 60}, {"held": True, "reason": "JobHeldUser"}]
)
def test_tasks_that_cannot_start_anyway_stay_one_record(changes: dict[str, object]) -> None:
    assert prepare(cycle_of(task(10, "0-9", **changes))).splits == ()


def test_no_more_tasks_get_records_than_the_array_may_run_at_once() -> None:
    running = let_go(task(11, "0", 3), state=JobState.RUNNING)
    assert prepare(cycle_of(task(10, "2-9", 3), task(12, "1", 3), running)).splits == (SplitTasks(10, (2,)),)
    assert prepare(cycle_of(task(10, "2-9", 2), task(12, "1", 2), running)).splits == ()


def test_the_first_tasks_of_a_throttled_array_are_planned() -> None:
    """The last task has the array's id, which is lower than those of the others."""
    running = let_go(task(11, "0", 2), state=JobState.RUNNING)
    jobs = [task(10, "9", 2), task(12, "1", 2), task(13, "3", 2), running]
    why = "its array runs at most 2 tasks at once (%2)"
    assert throttled(cycle_of(*jobs).view) == {13: why, 10: why}
    waiting_to_start = let_go(task(14, "2", 2), reason="Resources")
    assert throttled(cycle_of(*jobs, waiting_to_start).view) == dict.fromkeys((12, 13, 10), why)


@pytest.mark.parametrize(
    ("others", "alone", "member"),
    [
        ([task(10, "3-9", priority=500)], 501, 502),
        ([task(10, "3-9", priority=500), let_go(task(12, "1", priority=501), reason="Resources")], 501, 502),
        ([task(10, "3-9", priority=0, held=True, reason="JobHeldUser")], None, None),  # Slurm does not look at it
        ([behind_licence(make_job(7, priority=900))], None, None),  # of no array
    ],
)
def test_a_task_is_let_go_ahead_of_those_that_are_kept_back(
    others: list[Job], alone: int | None, member: int | None
) -> None:
    job = task(11, "0", priority=500)
    siblings = Siblings.of_queue(cycle_of(*others, job).view).of(job)
    assert [priority_ahead(job, siblings, member=each) for each in (False, True)] == [alone, member]


def test_tasks_that_wait_in_slurms_queue_stay_ahead_while_the_others_age() -> None:
    kept = task(10, "3-9", priority=700)
    alone = let_go(task(11, "0", priority=501), reason="Resources")
    member = let_go(task(12, "1", priority=502), reason="Dependency", dependency="after:99")
    member = replace(member, admin_comment=f"{member.admin_comment} {MEMBER}")
    assert list(overtakes(cycle_of(kept, alone, member))) == [Overtake(11, 701), Overtake(12, 702)]
    ahead = (kept, replace(alone, priority=701), replace(member, priority=702))
    assert list(overtakes(cycle_of(*ahead))) == []
