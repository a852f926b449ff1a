"""A profile that its dry run is unsure of plans as unknown: measured again, and not for ever."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, FakeSlurm, four_jobs, one_gpu

from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.profile_use import doubt
from muri.slurm_plugin.records.roles import Role, read_job
from muri.utc import text_of

M1 = ProfileKey("m1", 8, 1, "gpu", "alice")
SURE = tuple(each for each in FOUR_KINDS if each.key.model != "m1")
Make = Callable[..., Any]


def unsure(at_s: float, confidence: float | None = 0.03) -> StageProfile:
    kind = next(each for each in FOUR_KINDS if each.key.model == "m1")
    detail = ProfileDetail(confidence=confidence)
    return replace(kind, key=M1, detail=detail, measured_at=text_of(at_s), source="dry-run")


def cycle(slurm: FakeSlurm, make_controller: Make, *stored: StageProfile, **changes: Any) -> Any:
    with make_controller(slurm, (*SURE, *stored), **changes) as controller:
        return {job.job_id: job for job in controller.cycle().jobs}


def measured(slurm: FakeSlurm) -> list[str]:
    """The models that a dry run measures."""
    return [job.name for job in slurm.jobs.values() if read_job(job).role is Role.DRY_RUN]


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
    assert not doubt(profile, Config(profiling={"least_confidence": 0}))


def test_its_model_is_measured_again_and_shares_nothing_meanwhile(make_controller: Make) -> None:
    slurm = FakeSlurm(four_jobs(), one_gpu())
    status = cycle(slurm, make_controller, unsure(slurm.now_s))
    assert len(measured(slurm)) == 1
    assert slurm.jobs[1].held, status[1].reasons


@pytest.mark.parametrize(("last_s", "runs"), [(100.0, 0), (2 * 86400.0, 1)])
def test_after_as_many_attempts_as_a_failure_has_its_jobs_run_alone_for_a_day(
    make_controller: Make, tmp_path: Path, last_s: float, runs: int
) -> None:
    slurm = FakeSlurm(four_jobs()[:1], one_gpu())
    with ProfileStore(tmp_path / "profiles.db") as store:
        for ago_s in (last_s + 100.0, last_s):
            store.put(unsure(slurm.now_s - ago_s))
    (job,) = cycle(slurm, make_controller).values()
    assert len(measured(slurm)) == runs
    why = "its dry run failed: it was 3% sure of its means, less than profiling.least_confidence (10%)"
    assert (why in "; ".join(job.reasons)) == (runs == 0)
