"""Job arrays in a plan: which tasks get records, how many start, and where they stand in Slurm's queue."""

from dataclasses import replace

import at_work
import pytest
from fake_slurm import NOW_S, behind_license, make_job, make_node

from muri.slurm_plugin.planning.actions import ReleaseSolo, SplitTasks, StandBack
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.decision import stand_backs
from muri.slurm_plugin.planning.gathered import Gathered, gather, throttled
from muri.slurm_plugin.planning.request import prepare
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, task_numbers
from muri.slurm_plugin.records.comment_tags import Place

MEMBER = tags.STATE_PREFIX + tags.format_state(tags.MemberState(99, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))


def task(job_id: int, tasks: str, limit: int = 0, **changes: object) -> Job:
    """A record of array 10, behind the license."""
    told = {"array": True, "array_job_id": 10, "array_tasks": tasks, "array_limit": limit, "submit_s": NOW_S - 100}
    return replace(behind_license(make_job(job_id, **told)), **changes)  # type: ignore[arg-type]


def let_go(job: Job, **changes: object) -> Job:
    """The same task, which Muri has let start."""
    return replace(job, licenses="", **changes)  # type: ignore[arg-type]


def gathered(*jobs: Job, gpus: int = 2) -> Gathered:
    return gather(cycle_of(*jobs, gpus=gpus))


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
    cycle = gathered(task(10, "0-9999"), gpus=2)
    assert cycle.splits == (SplitTasks(10, tuple(range(8))),)  # four in a group
    assert not prepare(cycle).request.jobs
    assert "come after those that have job ids of their own" in cycle.waiting[10]
    ready = [task(20 + number, str(number)) for number in range(8)]
    assert gathered(task(10, "8-9999"), *ready).splits == ()
    (split,) = gathered(task(10, "0-9999"), gpus=1000).splits
    assert len(split.tasks) == 64
    # The last task keeps the array's record.
    assert gathered(task(10, "4,7")).splits == (SplitTasks(10, (4,)),)
    assert gathered(task(10, "7")).splits == ()


@pytest.mark.parametrize(
    "changes", [{"dependency": "afterok:3"}, {"begin_s": NOW_S + 60}, {"held": True, "reason": "JobHeldUser"}]
)
def test_tasks_that_cannot_start_anyway_stay_one_record(changes: dict[str, object]) -> None:
    assert gathered(task(10, "0-9", **changes)).splits == ()


def test_no_more_tasks_get_records_than_the_array_may_run_at_once() -> None:
    running = let_go(task(11, "0", 3), state=JobState.RUNNING)
    assert gathered(task(10, "2-9", 3), task(12, "1", 3), running).splits == (SplitTasks(10, (2,)),)
    assert gathered(task(10, "2-9", 2), task(12, "1", 2), running).splits == ()


def test_the_first_tasks_of_a_throttled_array_are_planned() -> None:
    """The last task has the array's id, which is lower than those of the others."""
    running = let_go(task(11, "0", 2), state=JobState.RUNNING)
    jobs = [task(10, "9", 2), task(12, "1", 2), task(13, "3", 2), running]
    why = "its array runs at most 2 tasks at once (%2)"
    assert throttled(cycle_of(*jobs).view) == {13: why, 10: why}
    waiting_to_start = let_go(task(14, "2", 2), reason="Resources")
    assert throttled(cycle_of(*jobs, waiting_to_start).view) == dict.fromkeys((12, 13, 10), why)


def placed(job: Job, place: Place, **changes: object) -> Job:
    """The same task as it stands once it was told to stand back."""
    waits = {"dependency": place.dependency} if place.dependency else {}
    comment = f"{job.admin_comment} {tags.PLACE_PREFIX}{tags.format_record(place)}"
    priority = max(1, job.priority + job.nice - place.nice)
    told = replace(job, nice=place.nice, priority=priority, admin_comment=comment, **waits)
    return replace(told, **changes)  # type: ignore[arg-type]


ALONE = let_go(task(11, "2", priority=500), reason="Licenses")
KEPT = task(10, "3-9", priority=500)


@pytest.mark.parametrize(
    ("kept", "place"),
    [
        (KEPT, None),  # the record of several tasks comes last
        (replace(KEPT, priority=700), Place(0, 201, "")),
        (replace(KEPT, priority=700, nice=50), Place(50, 251, "")),
        (task(12, "1", priority=500), Place(0, 1, "")),
        (task(12, "3", priority=500), None),
        (task(12, "3", priority=500, submit_s=ALONE.submit_s - 1), Place(0, 1, "")),
        (task(12, "1", priority=500, begin_s=NOW_S + 60), None),  # Slurm does not look at it
        (task(12, "1", priority=500, dependency="afterok:7"), None),
        (task(12, "1", priority=0, held=True, reason="JobHeldUser"), None),
        (task(12, "1", priority=700, partition="other"), None),
        (behind_license(make_job(7, priority=900)), None),  # of no array
    ],
)
def test_those_that_are_kept_back_stand_behind_those_that_are_let_go(kept: Job, place: Place | None) -> None:
    wanted = [] if place is None else [StandBack(kept.job_id, place)]
    assert list(stand_backs(cycle_of(kept, ALONE).view, (), ())) == wanted
    if place is not None:
        assert list(stand_backs(cycle_of(placed(kept, place), ALONE).view, (), ())) == []
        # Muri's own order does not count what Muri has taken.
        planned = cycle_of(placed(kept, place)).view.jobs[kept.job_id]
        assert (planned.own_priority, planned.own_nice) == (kept.priority, kept.nice)


def test_where_a_nice_value_does_nothing_a_task_waits_for_its_siblings_start() -> None:
    least = (task(12, "1", priority=1), replace(ALONE, priority=1))
    member = let_go(task(13, "4", priority=1), reason="Dependency", dependency="after:99")
    member = replace(member, admin_comment=f"{member.admin_comment} {MEMBER}")
    waits = Place(0, 0, "after:10_2,after:10_4")
    assert list(stand_backs(cycle_of(*least, member).view, (), ())) == [StandBack(12, waits)]
    fixed = placed(task(12, "1", priority=500), Place(0, 1, ""), nice=0, priority=500)  # by an administrator
    assert list(stand_backs(cycle_of(fixed, ALONE).view, (), ())) == [StandBack(12, Place(0, 0, "after:10_2"))]
    back = placed(least[0], waits)
    assert list(stand_backs(cycle_of(back, least[1]).view, (), ())) == []
    assert not prepare(gathered(back, least[1])).waiting.get(12, "").startswith("it waits for its dependency")
    # Neither waits for the other once the other one is let go, nor for a task that is held.
    assert list(stand_backs(cycle_of(back, task(11, "2", priority=1)).view, (), [ReleaseSolo(12, ())])) == [
        StandBack(12, None)
    ]
    held = replace(ALONE, priority=0, held=True, reason="JobHeldUser")
    assert list(stand_backs(cycle_of(back, held).view, (), ())) == [StandBack(12, None)]


def test_a_task_that_muri_no_longer_keeps_back_stands_where_slurm_has_it() -> None:
    freed = let_go(placed(task(12, "1", priority=500, nice=7), Place(7, 50, "")))
    assert list(stand_backs(cycle_of(freed, ALONE).view, (), ())) == [StandBack(12, None)]
    # With priority/basic, a new nice value would lift the hold.
    assert list(stand_backs(cycle_of(replace(freed, held=True, reason="JobHeldUser")).view, (), ())) == []


def test_tasks_that_are_let_go_together_stand_before_the_others() -> None:
    jobs = [task(12, "1", priority=500), task(13, "2", priority=500), task(14, "3", priority=500)]
    assert list(stand_backs(cycle_of(*jobs).view, (), (ReleaseSolo(13, ()), ReleaseSolo(14, ())))) == [
        StandBack(12, Place(0, 1, ""))
    ]
