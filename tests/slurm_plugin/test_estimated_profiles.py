"""Plans for models that are not measured yet, or not surely: who is measured, and who waits for that."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from at_work import candidate
from fake_slurm import (
    FOUR_KINDS,
    MEASURED,
    FakeSlurm,
    dry_runs,
    end_dry_run,
    four_jobs,
    group_at_work,
    make_job,
    make_node,
    one_cycle,
    one_gpu,
    pilots,
    run_cycles,
)

from muri.clock import text_of
from muri.profiler.errors import CorruptStoreError, StoreBusyError
from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin import profile_use
from muri.slurm_plugin.cli.look import explanation, show_queue
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.profile_use import doubt
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job

pytestmark = pytest.mark.configuration(profiling={"mode": "dry-run"})


def two_gpus(job_id: int, model: str):
    """A job on two GPUs of one node, of a model that was measured on one."""
    asked = {"gpu_count": 2, "gpu_request": "gres/gpu:2", "cpus_per_task": 2}
    return candidate(job_id, model, **asked)


def slurm_with_two() -> FakeSlurm:
    return FakeSlurm([two_gpus(1, "m1"), two_gpus(2, "m3")], [make_node("n1", gpu_count=2)])


def having(slurm: FakeSlurm, role: Role):
    return [job for job in slurm.jobs.values() if read_job(job).role is role]


def test_jobs_with_estimates_are_grouped_at_once_and_say_so(make_controller, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    slurm = slurm_with_two()
    with make_controller(slurm) as controller:
        status = controller.cycle()
    show_queue(status)
    output = capsys.readouterr().out
    assert "~1." in output or "~0." in output
    assert "~ by an estimate of the time alone, until the model is measured" in output
    assert max(len(line) for line in output.splitlines()) <= 80
    (pilot,) = having(slurm, Role.PILOT)
    assert [job.group for job in status.jobs] == [pilot.job_id, pilot.job_id]
    assert all(job.estimated for job in status.jobs)
    text = "\n".join(explanation(status.jobs[0]))
    assert "(from an estimated profile)" in text
    assert "job 1: its profile is estimated (scaled from another number of GPUs) until it has been measured" in text
    assert not dry_runs(slurm)  # their scripts run already


def test_profile_that_explains_too_little_plans_as_unknown(make_controller):
    """A job that seems idle would be the best partner of all."""
    other = candidate(2, "m3")
    slurm = FakeSlurm([other], [make_node("n1", gpu_count=1)])
    known = [replace(one, load_s=0.01, propagate_s=0.01) if one.key.model == "m3" else one for one in FOUR_KINDS]
    with make_controller(slurm, tuple(known)) as controller:
        status = controller.cycle()
    assert not having(slurm, Role.PILOT)
    assert not dry_runs(slurm)  # what the last one found will be found again
    why = "its profile covers too little: 78% of its iteration is in no stage"
    assert why in " ".join(status.jobs[0].reasons)


@pytest.mark.parametrize(("known", "profiling", "runs"), [(FOUR_KINDS[:1], {}, 1), (FOUR_KINDS, {"at_once": 0}, 0)])
def test_without_estimates_they_wait_for_their_dry_runs_if_there_are_any(make_controller, known, profiling, runs):
    slurm = slurm_with_two()
    with make_controller(slurm, known, profiling=profiling) as controller:
        status = controller.cycle()
    assert len(dry_runs(slurm)) == runs
    assert bool(having(slurm, Role.PILOT)) == (not runs)
    assert status.jobs[1].estimated == (not runs)
    assert (status.jobs[1].state == "waiting") == bool(runs)


def test_a_measured_profile_takes_the_estimates_place(make_controller, store):
    """It is measured with the script of a job that waits, which is not started meanwhile."""
    slurm = slurm_with_two()
    slurm.jobs[3] = replace(two_gpus(3, "m1"), user="bob", uid=1002)
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.tick()
        controller.cycle()
        (run,) = dry_runs(slurm)
        (intent,) = [intent for intent in controller._journal.intents("begun") if intent.kind == "dry-run"]
        assert intent.payload["job_id"] == 3
        slurm.nodes["n2"] = make_node("n2", gpu_count=2)
        slurm.nodes["n3"] = make_node("n3", gpu_count=2)
        controller.cycle()
        assert slurm.jobs[3].held  # GPUs are free, but its script is being executed
        end_dry_run(slurm, run, run.job_id, **MEASURED)
        controller.cycle()
        slurm.tick()
        controller.cycle()
    stored = store.get(ProfileKey("m1", 8, 2, "gpu", "bob"))
    assert stored is not None
    assert (stored.source, stored.iteration_s) == ("dry-run", 1.2)
    assert not slurm.jobs[3].held


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a library's own"),
        StoreBusyError(Path("p.db"), 30.0),
        CorruptStoreError(Path("p.db"), "damaged"),  # set aside, and jobs start in the next cycle
    ],
)
def test_what_fails_in_an_estimate_costs_one_cycle_at_most(make_controller, monkeypatch, caplog, tmp_path, error):
    told = [error]

    def fail_once(*_):
        if told:
            raise told.pop()
        return {}

    monkeypatch.setattr(profile_use, "estimates_of", fail_once)
    slurm = slurm_with_two()
    damaged = isinstance(error, CorruptStoreError)
    one_cycle(make_controller, slurm)
    assert len(dry_runs(slurm)) == (0 if damaged else 2)
    one_cycle(make_controller, slurm)
    assert len(dry_runs(slurm)) == 2
    assert ("this cycle plans without estimates" in caplog.text) != damaged
    assert bool(list(tmp_path.glob("profiles.db.damaged*"))) == damaged


@pytest.mark.configuration(profiling={"mode": "in-place"})
def test_who_asks_for_billions_of_gpus_costs_nobody_a_cycle(make_controller, caplog):
    asked = {"gpu_count": 2 * 10**9, "gpu_request": "gres/gpu:2000000000"}
    slurm = FakeSlurm([new_model(1), new_model(2, user="bob", uid=1002, **asked)], one_gpu())
    one_cycle(make_controller, slurm)
    assert not slurm.jobs[2].held  # it is Slurm's, and waits for ever
    slurm.tick()
    status = one_cycle(make_controller, slurm)
    assert (status[1].slurm_state, status[1].estimated, status[2].estimated) == ("RUNNING", True, False)
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.configuration(profiling={"mode": "in-place"})
def test_a_group_whose_pilot_has_no_gpu_costs_nobody_a_cycle(make_controller, caplog):
    slurm = group_at_work(make_controller)
    (pilot,) = pilots(slurm)
    for job_id, job in slurm.jobs.items():  # of models of which nothing is known
        slurm.jobs[job_id] = replace(job, admin_comment=job.admin_comment.replace("model=", "model=new-"))
    slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], gpu_count=0)
    one_cycle(make_controller, slurm)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


AT_WORK = make_job(1, held=False, state=JobState.RUNNING, nodes="n1", admin_comment="")


new_model = partial(candidate, model="new")


@pytest.mark.parametrize("policy", ["fifo", "srtf", "las", "tiresias", "themis", "synergy", "drf", "tetris", "antman"])
def test_who_reads_no_profiles_measures_nobody_and_who_starts_without_one_is_not_measured_beside_itself(
    make_controller, policy
):
    slurm = FakeSlurm([new_model(1)], one_gpu())
    run_cycles(make_controller, slurm, 3, policy=policy, policy_options={"order": "srtf"})
    assert slurm.jobs[1].state is JobState.RUNNING
    assert list(slurm.jobs) == [1]


@pytest.mark.parametrize("policy", ["synergy", "antman"])
def test_a_job_that_has_to_wait_is_measured_and_starts_after_its_dry_run(make_controller, policy):
    slurm = FakeSlurm([AT_WORK, new_model(2)], one_gpu())
    one_cycle(make_controller, slurm, policy=policy)
    (run,) = dry_runs(slurm)
    slurm.end(1)
    status = one_cycle(make_controller, slurm, policy=policy)
    assert slurm.jobs[2].held
    assert "being measured with its script" in status[2].reasons[0]
    slurm.tick()
    assert slurm.jobs[run.job_id].state is JobState.RUNNING
    slurm.end(run.job_id, state=JobState.FAILED)
    for _ in range(8):
        one_cycle(make_controller, slurm, policy=policy)
        slurm.tick()
        for left in dry_runs(slurm):
            assert slurm.jobs[2].state is not JobState.RUNNING
            slurm.end(left.job_id, state=JobState.FAILED)
    assert (slurm.jobs[2].state, slurm.starts[2]) == (JobState.RUNNING, 1)


@pytest.mark.parametrize(("late_s", "held", "runs"), [(0, True, 1), (2 * 86400, False, 0)])
def test_alone_by_wish_is_measured_first_but_waits_no_longer_than_any_other(make_controller, late_s, held, runs):
    slurm = FakeSlurm([AT_WORK, new_model(2, words=",alone=1")], one_gpu())
    one_cycle(make_controller, slurm)
    slurm.now_s += late_s
    for _ in range(2):
        status = one_cycle(make_controller, slurm)
    assert (slurm.jobs[2].held, len(dry_runs(slurm))) == (held, runs)
    assert ("being measured" in status[2].reasons[0]) == held


def test_a_job_that_its_user_releases_ends_its_dry_run(make_controller):
    slurm = FakeSlurm([new_model(1)], one_gpu())
    one_cycle(make_controller, slurm)
    slurm.tick()
    (run,) = dry_runs(slurm)
    slurm.release(1)
    one_cycle(make_controller, slurm)
    assert slurm.jobs[run.job_id].state is JobState.CANCELLED
    slurm.tick()
    one_cycle(make_controller, slurm)
    assert slurm.jobs[1].state is JobState.RUNNING
    assert dry_runs(slurm) == []


M1 = ProfileKey("m1", 8, 1, "gpu", "alice")
SURE = tuple(each for each in FOUR_KINDS if each.key.model != "m1")
Make = Callable[..., Any]


def unsure(at_s: float, confidence: float | None = 0.03) -> StageProfile:
    kind = next(each for each in FOUR_KINDS if each.key.model == "m1")
    detail = ProfileDetail(confidence=confidence)
    return replace(kind, key=M1, detail=detail, measured_at=text_of(at_s), source="dry-run")


@pytest.mark.parametrize(
    ("profile", "doubted"),
    [
        (unsure(0.0), True),
        (unsure(0.0, 0.1), False),
        (unsure(0.0, None), False),
        (replace(unsure(0.0), source="edit"), False),
        (replace(unsure(0.0), source="import"), False),
    ],
)
def test_a_dry_run_that_was_not_sure_is_doubted(profile: StageProfile, doubted: bool) -> None:
    assert bool(doubt(profile, Config())) == doubted
    assert not doubt(profile, Config().tuned(least_confidence=0))


def test_its_model_is_measured_again_and_shares_nothing_meanwhile(make_controller: Make) -> None:
    slurm = FakeSlurm(four_jobs(), one_gpu())
    one_cycle(make_controller, slurm, (*SURE, unsure(slurm.now_s)))
    assert len(dry_runs(slurm)) == 1
    assert slurm.jobs[1].held


@pytest.mark.parametrize(("last_s", "runs"), [(100.0, 0), (2 * 86400.0, 1)])
def test_after_as_many_attempts_as_a_failure_has_its_jobs_run_alone_for_a_day(
    make_controller: Make, store: ProfileStore, last_s: float, runs: int
) -> None:
    slurm = FakeSlurm(four_jobs()[:1], one_gpu())
    for ago_s in (last_s + 100.0, last_s):
        store.put(unsure(slurm.now_s - ago_s))
    with make_controller(slurm, SURE) as controller:
        (job,) = controller.cycle().jobs
    assert len(dry_runs(slurm)) == runs
    why = "its dry run failed: it was 3% sure of its means, less than 10%"
    assert (why in "; ".join(job.reasons)) == (runs == 0)
