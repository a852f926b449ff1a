"""Planning with estimated profiles until a dry run has measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FOUR_KINDS, MEASURED, FakeSlurm, dry_runs, end_dry_run, make_job, make_node

from muri.profiler.errors import CorruptStoreError, StoreBusyError
from muri.profiler.records import ProfileKey
from muri.profiler.store import ProfileStore
from muri.slurm_plugin import profile_use
from muri.slurm_plugin.cli.look import explanation, show_queue
from muri.slurm_plugin.records.roles import Role, read_job


def two_gpus(job_id: int, model: str):
    """A job on two GPUs of one node, of a model that was measured on one."""
    asked = {"gpu_count": 2, "gpu_request": "gres/gpu:2", "cpus_per_task": 2}
    return make_job(job_id, admin_comment=f"muri:model={model},batch-size=8,duration=100", **asked)


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
    assert "~ planned with an estimated profile" in output
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
    other = make_job(2, admin_comment="muri:model=m3,batch-size=8,duration=100")
    slurm = FakeSlurm([other], [make_node("n1", gpu_count=1)])
    known = [replace(one, load_s=0.01, propagate_s=0.01) if one.key.model == "m3" else one for one in FOUR_KINDS]
    with make_controller(slurm, tuple(known)) as controller:
        status = controller.cycle()
    assert not having(slurm, Role.PILOT)
    assert not dry_runs(slurm)  # what the last one found will be found again
    assert "its profile does not say what it uses: 78% of its iteration is in no stage" in " ".join(
        status.jobs[0].reasons
    )


@pytest.mark.parametrize(
    ("known", "profiling", "runs"),
    [(FOUR_KINDS, {"use_estimates": False}, 2), (FOUR_KINDS[:1], {}, 1), (FOUR_KINDS, {"at_once": 0}, 0)],
)
def test_without_estimates_they_wait_for_their_dry_runs_if_there_are_any(make_controller, known, profiling, runs):
    slurm = slurm_with_two()
    with make_controller(slurm, known, profiling=profiling) as controller:
        status = controller.cycle()
    assert len(dry_runs(slurm)) == runs
    assert bool(having(slurm, Role.PILOT)) == (not runs)
    assert status.jobs[1].estimated == (not runs)
    assert (status.jobs[1].state == "waiting") == bool(runs)


def test_a_measured_profile_takes_the_estimates_place(make_controller, tmp_path):
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
    with ProfileStore(tmp_path / "profiles.db") as store:
        stored = store.get(ProfileKey("m1", 8, 2, "gpu", "bob"))
    assert stored is not None
    assert (stored.source, stored.iteration_s) == ("dry-run", 1.2)
    assert not slurm.jobs[3].held


def test_a_model_whose_dry_runs_failed_is_not_planned_with_an_estimate(make_controller):
    slurm = slurm_with_two()
    keys = [str(ProfileKey(model, 8, 2, "gpu")) for model in ("m1", "m3")]
    with make_controller(slurm) as controller:
        for key in keys:
            controller._journal.set_fact("dry-run-failed", key, [2, "no stages"])
        for _ in range(3):
            status = controller.cycle()
            slurm.tick()
    assert not having(slurm, Role.PILOT)
    assert "its dry run failed: no stages" in " ".join(status.jobs[0].reasons)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a library's own"),
        StoreBusyError(Path("p.db"), 30.0),
        CorruptStoreError(Path("p.db"), "damaged"),  # set aside, and tried again
    ],
)
def test_what_fails_in_an_estimate_costs_no_cycle(make_controller, monkeypatch, caplog, tmp_path, error):
    told = [error]

    def fail_once(*_):
        if told:
            raise told.pop()
        return {}

    monkeypatch.setattr(profile_use, "estimates_of", fail_once)
    slurm = slurm_with_two()
    with make_controller(slurm) as controller:
        controller.cycle()
    assert len(dry_runs(slurm)) == 2
    damaged = isinstance(error, CorruptStoreError)
    assert ("this cycle plans without estimates" in caplog.text) != damaged
    assert bool(list(tmp_path.glob("profiles.db.damaged*"))) == damaged
