"""Reports of members that ended: when they are written, their content, and failures of the accounts."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from fake_slurm import FOUR_KINDS, FakeSlurm, Killed, four_jobs, one_cycle, one_gpu, pilots

from muri.profiler.records import StageProfile
from muri.slurm_plugin.config import Tuning
from muri.slurm_plugin.controller import metrics
from muri.slurm_plugin.controller.metrics import Counters
from muri.slurm_plugin.gateway.accounting import NoAccountingError
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import with_measured
from muri.slurm_plugin.records.journal import COUNTERS, GROUP_RUN, Journal
from muri.slurm_plugin.records.usage import Run, parse_report


@pytest.fixture
def group(make_controller):
    """A group of jobs 1 and 2 that runs; returns its Slurm, the pilot's id and a function that runs a cycle."""
    return running_group(make_controller, *FOUR_KINDS)


def running_group(make_controller, *known: StageProfile, **changes):
    slurm = FakeSlurm(four_jobs()[:2], one_gpu())

    def cycle(seconds: float = 10.0):
        slurm.tick(seconds)
        with make_controller(slurm, known, **changes) as controller:  # a fresh process each time, as a timer starts it
            return controller.cycle()

    cycle()
    cycle()
    cycle()
    (pilot,) = pilots(slurm)
    assert [slurm.jobs[job].state for job in (1, 2, pilot.job_id)] == [JobState.RUNNING] * 3
    return slurm, pilot.job_id, cycle


def measure(slurm: FakeSlurm, pilot: int, iterations: dict[int, int]) -> None:
    """Let the pilot report iterations by job id."""
    figures = {
        str(job): {"n": n, "t": 1.25, "s": [0.7, 0.1, 0.1, 0.1], "w": [0.25, 0, 0, 0]} for job, n in iterations.items()
    }
    report = tags.SPEED_PREFIX + tags.format_json({**figures, "d": "fair"})
    slurm.jobs[pilot] = replace(slurm.jobs[pilot], comment=report)


def counters(tmp_path) -> dict[str, dict[str, float]]:
    with Journal(tmp_path / "journal.db") as journal:
        return journal.facts(COUNTERS)


def open_accounts(tmp_path) -> dict[str, object]:
    with Journal(tmp_path / "journal.db") as journal:
        return journal.facts(GROUP_RUN)


def test_a_group_that_ended_is_reported_once(group, accounts, tmp_path):
    slurm, pilot, cycle = group
    start_s = slurm.jobs[pilot].start_s
    slurm.tick(100)
    measure(slurm, pilot, {1: 90, 2: 80})
    slurm.end(1, 2, pilot)
    end_s = slurm.now_s
    cycle()
    reports = {job: parse_report(comment) for job, comment in accounts.comments.items()}
    assert set(reports) == {1, 2}
    first = reports[1]
    assert (first.pilot, first.gpu_count, first.partners) == (pilot, 1, (2,))
    assert (first.iterations, first.basis) == (90, "iterations")
    assert first.alone_s == pytest.approx(90.0)  # 90 iterations of 1 s
    assert (first.stage_s, first.wait_s) == ((0.7, 0.1, 0.1, 0.1), (0.25, 0, 0, 0))
    assert first.gpu_s + reports[2].gpu_s == pytest.approx(end_s - start_s)
    assert "model=m1" in accounts.comments[1]
    told = counters(tmp_path)
    assert told["member_gpu_seconds_alone"][""] == pytest.approx(170.0)
    assert told["member_gpu_seconds_shared"][""] == pytest.approx(end_s - start_s)
    assert told["groups_ended"] == {"completed": 1.0}
    saved = metrics.counter_values(Counters(told))["muri_gpu_seconds_saved"][()]
    assert saved == pytest.approx(170.0 - (end_s - start_s))
    cycle()
    cycle()
    assert (accounts.writes, open_accounts(tmp_path)) == (2, {})
    assert counters(tmp_path)["members_ended"] == {"iterations": 2.0}


#: What the first iterations of a member told: its model takes 1.25 s alone.
FIRST = {
    "load_s": 0.6, "preprocess_s": 0.2, "propagate_s": 0.3, "synchronize_s": 0.1, "iteration_s": 1.25,
    "iterations": 14, "gpu_mem_gib": 3.5, "detail": {"confidence": 0.97},
}  # fmt: skip


@pytest.mark.parametrize("seen", ["running", "ended"])
def test_the_first_job_of_a_model_is_told_its_counted_iterations_in_the_time_that_it_was_measured_with(
    make_controller, accounts, tmp_path, seen
):
    slurm, pilot, cycle = running_group(make_controller, *FOUR_KINDS[1:], profiling={"mode": "in-place"})
    slurm.tick(100)
    measure(slurm, pilot, {1: 60, 2: 60})
    job = slurm.jobs[1]
    slurm.jobs[1] = replace(job, comment=with_measured(job.comment, {**FIRST, "at": slurm.now_s}))
    if seen == "running":
        cycle()
    slurm.end(1, 2, pilot)
    cycle()
    report = parse_report(accounts.comments[1])
    assert (report.basis, report.alone_s) == ("iterations", pytest.approx(60 * 1.25))
    assert counters(tmp_path)["members_ended"] == {"iterations": 2.0}


def test_an_estimate_of_a_time_alone_enters_no_sum(make_controller, accounts, tmp_path):
    slurm, pilot, cycle = running_group(make_controller, *FOUR_KINDS[1:], profiling={"mode": "in-place"})
    slurm.tick(100)
    measure(slurm, pilot, {1: 60, 2: 60})
    slurm.end(1, 2, pilot)
    cycle()
    reports = {job: parse_report(comment) for job, comment in accounts.comments.items()}
    assert {job: report.basis for job, report in reports.items()} == {1: "plan", 2: "iterations"}
    told = counters(tmp_path)
    assert told["members_ended"] == {"plan": 1.0, "iterations": 1.0}
    assert told["member_gpu_seconds_alone"][""] == pytest.approx(reports[2].alone_gpu_s)
    assert told["member_gpu_seconds_shared"][""] == pytest.approx(reports[2].gpu_s, abs=0.1)


def test_a_member_that_ends_before_its_partner_is_reported_after_the_pilots_next_reports(group, accounts):
    slurm, pilot, cycle = group
    measure(slurm, pilot, {1: 90, 2: 80})
    slurm.end(1)
    cycle(5)
    assert accounts.writes == 0  # the pilot has yet to tell of the last iterations
    measure(slurm, pilot, {1: 95, 2: 85})
    cycle(2 * Tuning().telemetry_s)
    assert set(accounts.comments) == {1}
    assert parse_report(accounts.comments[1]).iterations == 95


def test_what_slurmctld_has_forgotten_is_looked_up(group, accounts):
    slurm, pilot, cycle = group
    measure(slurm, pilot, {1: 90, 2: 80})
    cycle()
    start_s, comment, told = int(slurm.jobs[1].start_s), slurm.jobs[1].admin_comment, slurm.jobs[pilot].admin_comment
    one = Run(1, "alice", "hep", "normal", "COMPLETED", start_s - 9, start_s, start_s + 60, 60, 0, f"site:x {comment}")
    two = replace(one, job_id=2, end_s=start_s + 120, elapsed_s=120)
    host = replace(one, job_id=pilot, end_s=start_s + 120, elapsed_s=120, gpu_count=1, admin_comment=told)
    accounts.runs = [one, two, host]
    for job in (1, 2, pilot):
        del slurm.jobs[job]
    cycle()
    reports = {job: parse_report(text) for job, text in accounts.comments.items()}
    assert {job: report.gpu_s for job, report in reports.items()} == {1: pytest.approx(30.0), 2: pytest.approx(90.0)}
    assert reports[1].iterations == 90
    assert accounts.comments[1].startswith("site:x ")


def test_a_failed_cycle_keeps_the_accounts_that_are_open(group, tmp_path):
    slurm, _, cycle = group
    before = open_accounts(tmp_path)
    slurm.snapshot = Mock(side_effect=SlurmUnreachableError("slurmctld does not answer"))
    with pytest.raises(SlurmUnreachableError):
        cycle()
    assert open_accounts(tmp_path) == before != {}


def test_while_the_accounts_do_not_answer_reports_wait_and_are_counted_once(group, accounts, tmp_path, caplog):
    slurm, pilot, cycle = group
    slurm.end(1, 2, pilot)
    accounts.failure = GatewayError("cannot complete the record: connection refused")
    cycle()
    cycle()
    assert accounts.writes == 2  # one try in each cycle
    assert "reports of ended jobs wait for the next cycle" in caplog.text
    assert counters(tmp_path)["members_ended"] == {"plan": 2.0}
    accounts.failure = None
    cycle()
    assert set(accounts.comments) == {1, 2}
    assert counters(tmp_path)["members_ended"] == {"plan": 2.0}
    assert open_accounts(tmp_path) == {}
    ran_s = slurm.jobs[1].end_s - slurm.jobs[1].start_s
    assert parse_report(accounts.comments[1]).alone_s == pytest.approx(ran_s)  # planned without a slow-down


@pytest.mark.parametrize(
    ("failure", "tries"),
    [
        (NoAccountingError("Slurm accounting storage is disabled"), [10]),
        (NoSuchJobError("Request didn't affect anything"), [10, 3600]),  # a record that never arrives is given up
    ],
)
def test_without_accounts_only_the_metrics_know(group, accounts, tmp_path, failure, tries):
    slurm, pilot, cycle = group
    accounts.failure = failure
    slurm.end(1, 2, pilot)
    for seconds in tries:
        assert open_accounts(tmp_path) != {}
        cycle(seconds)
    assert open_accounts(tmp_path) == {}
    assert counters(tmp_path)["members_ended"] == {"plan": 2.0}


def test_a_member_that_leaves_its_group_is_not_reported_for_it(group, accounts, tmp_path):
    slurm, pilot, cycle = group
    slurm.tick(50)
    slurm.end(pilot, state=JobState.CANCELLED)
    for job in (1, 2):
        slurm.requeue_hold(job)
    for _ in range(4):
        cycle()
    assert accounts.writes == 0
    assert counters(tmp_path)["groups_ended"] == {"cancelled": 1.0}
    assert str(pilot) not in open_accounts(tmp_path)


def test_a_job_that_joins_pays_its_part_from_then_on(group, accounts):
    slurm, pilot, cycle = group
    begun_s = slurm.jobs[pilot].start_s
    slurm.jobs[3] = replace(four_jobs()[2], submit_s=slurm.now_s)
    cycle()
    cycle()
    joined_s = slurm.jobs[3].start_s
    assert slurm.jobs[3].state is JobState.RUNNING
    slurm.tick(300)
    slurm.end(1, 2, 3, pilot)
    cycle()
    reports = {job: parse_report(comment) for job, comment in accounts.comments.items()}
    alone_s, together_s = joined_s - begun_s, slurm.jobs[pilot].end_s - joined_s
    assert {job: report.gpu_s for job, report in reports.items()} == {
        1: pytest.approx(alone_s / 2 + together_s / 3, abs=0.1),
        2: pytest.approx(alone_s / 2 + together_s / 3, abs=0.1),
        3: pytest.approx(together_s / 3, abs=0.1),
    }
    assert (reports[3].partners, reports[1].partners) == ((1, 2), (2, 3))


def test_a_job_that_joins_after_anothers_end_has_not_shared_with_it(group, accounts):
    slurm, pilot, cycle = group
    slurm.end(1)
    slurm.tick(10)
    slurm.jobs[3] = replace(four_jobs()[2], submit_s=slurm.now_s)
    cycle()
    cycle()
    assert slurm.jobs[3].state is JobState.RUNNING
    slurm.tick(100)
    slurm.end(2, 3, pilot)
    cycle()
    partners = {job: parse_report(comment).partners for job, comment in accounts.comments.items()}
    assert partners == {1: (2,), 2: (1, 3), 3: (2,)}


def test_a_job_alone_behind_its_pilot_saves_nothing_by_sharing(make_controller, accounts, tmp_path):
    slurm = FakeSlurm(four_jobs()[:1], one_gpu())
    for _ in range(3):
        slurm.tick(10)
        one_cycle(make_controller, slurm)
    (pilot,) = pilots(slurm)
    slurm.tick(100)
    measure(slurm, pilot.job_id, {1: 60})
    slurm.end(1, pilot.job_id)
    one_cycle(make_controller, slurm)
    report = parse_report(accounts.comments[1])
    assert (report.basis, report.partners) == ("iterations", ())
    told = counters(tmp_path)
    assert told["members_ended"] == {"unshared": 1.0}
    assert "member_gpu_seconds_alone" not in told


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_controller_killed_at_any_call_reports_all_the_same(make_controller, accounts, nth):
    slurm = FakeSlurm(four_jobs()[:2], one_gpu())
    with pytest.raises(Killed), make_controller(slurm) as controller, slurm.killing("after", nth):
        controller.cycle()
    for _ in range(8):
        slurm.tick()
        one_cycle(make_controller, slurm)
        for pilot in pilots(slurm):
            if all(slurm.jobs[job].state is JobState.RUNNING for job in tags.parse_pilot(pilot.admin_comment)[1]):
                slurm.tick()
                for job in (*tags.parse_pilot(pilot.admin_comment)[1], pilot.job_id):
                    slurm.end(job)
    assert set(accounts.comments) == {1, 2}
    assert accounts.writes == 2
