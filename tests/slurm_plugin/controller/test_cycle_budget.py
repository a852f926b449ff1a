"""A cycle's requests to Slurm are bounded: the rest is logged, and done in the next cycle, which comes soon."""

from collections import Counter

from fake_slurm import NOW_S, FakeSlurm, behind_lease, four_jobs, make_job, make_node, one_gpu

from muri.slurm_plugin.controller.loop import run_once
from muri.slurm_plugin.records import comment_tags as tags


class ReadingSlurm(FakeSlurm):
    """Counts reads of the whole queue."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.reads: Counter[str] = Counter()

    def snapshot(self):
        self.reads["snapshot"] += 1
        return super().snapshot()

    def queue(self):
        self.reads["queue"] += 1
        found = super().queue()
        self.reads["snapshot"] -= 1  # this fake's queue is a part of its snapshot
        return found


def loners(count: int) -> list:
    """Jobs that start alone, behind the license."""
    comment = "muri:model=m1,batch-size=8,alone=1"
    return [make_job(number, admin_comment=comment) for number in range(1, count + 1)]


def let_go(slurm: FakeSlurm) -> list[int]:
    return [job.job_id for job in slurm.jobs.values() if not job.licenses]


def test_what_exceeds_the_budget_of_calls_is_told_and_done_in_the_next_cycles(make_controller):
    slurm = behind_lease(loners(10), [make_node("n1", gpu_count=16, cpu_count=64)])
    with make_controller(slurm, tuning={"cycle_calls": 8}) as controller:
        status = controller.cycle()
        assert (slurm.calls, let_go(slurm)) == (["modify"] * 4, [1, 2, 3, 4])
        assert "6 starts are left for the next cycle: the budget of 4 calls is used up" in status.errors
        told = {job.job_id: job.reasons for job in status.jobs}
        assert told[5][0].startswith("its start is left for the next cycle: the budget of 4 calls")
        assert not any("left for the next cycle" in why for why in told[4])
        assert controller.has_more
        controller.cycle()
        last = controller.cycle()
        assert not controller.has_more
        assert not last.errors
    assert slurm.calls == ["modify"] * 10
    assert let_go(slurm) == list(range(1, 11))


def test_what_was_begun_is_finished_whatever_the_budget_of_calls(make_controller):
    slurm = behind_lease(four_jobs(), one_gpu())
    with make_controller(slurm, tuning={"cycle_calls": 2}) as controller:
        status = controller.cycle()
        assert not controller._journal.intents("begun")
    assert slurm.calls == ["submit"] + ["modify"] * 4  # or the pilot would hold its GPU in vain until the next cycle
    assert not status.errors


def test_repairs_leave_starts_their_half_of_the_calls(make_controller):
    given = tags.Given(int(NOW_S) - 60, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600))
    comment = f"muri:model=m1,batch-size=8,alone=1 {tags.GIVEN_PREFIX}{tags.format_record(given)}"
    half_started = [make_job(number, admin_comment=comment) for number in range(101, 109)]
    slurm = behind_lease(loners(8) + half_started, [make_node("n1", gpu_count=32, cpu_count=256)])
    with make_controller(slurm, tuning={"cycle_calls": 8}) as controller:
        status = controller.cycle()
    assert len(slurm.calls) == 8
    assert let_go(slurm) == [1, 2, 3, 4]
    assert [error.partition(" left")[0] for error in status.errors] == ["4 repairs are", "8 starts are"]


def test_a_cycle_that_starts_something_reads_the_jobs_once_more(make_controller):
    slurm = behind_lease(loners(1), one_gpu(), ReadingSlurm)
    with make_controller(slurm) as controller:
        run_once(controller, 60.0, controller._stop)
    assert slurm.reads == {"snapshot": 1, "queue": 1}
