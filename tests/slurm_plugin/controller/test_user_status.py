"""What users learn of a cycle: each about their own jobs, none about others'."""

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm, make_job, make_node, one_cycle

from muri.slurm_plugin.cli.look import explanation
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller import status
from muri.slurm_plugin.controller.status import (
    CYCLE_NAME,
    STATUS_NAME,
    JobStatus,
    Status,
    cycle_age_s,
    latest_status,
    refresh,
)
from muri.slurm_plugin.records.roles import view_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be one user after the other")

ALICE, BOB = 1001, 1002
SECRET = "token=hunter2"


def facts(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, stat.S_IMODE(found.st_mode)


@pytest.fixture
def slurm() -> FakeSlurm:
    """Nothing is free, so that jobs wait and a reason is given."""
    alice = [make_job(number, user="alice", uid=ALICE, admin_comment=f"muri:model=m{number}") for number in (1, 2)]
    bob = make_job(3, user="bob", uid=BOB, name=SECRET, admin_comment="muri:on", submit_line=f"sbatch {SECRET}")
    return FakeSlurm([*alice, bob], [make_node("n1", usable=False)])


@pytest.fixture
def told(slurm: FakeSlurm, make_controller: Callable[..., Any], tmp_path: Path) -> Path:
    one_cycle(make_controller, slurm)
    return tmp_path / "status"


def test_each_user_has_a_file_that_nobody_else_can_read(told: Path, config: Config) -> None:
    assert facts(told) == (0, 0o755)
    names = (STATUS_NAME, "journal.db", "profiles.db")
    assert [facts(told.parent / name) for name in names] == [(0, 0o600)] * 3
    assert {path.name: facts(path) for path in told.iterdir()} == {
        f"{ALICE}.json": (0, 0o440), f"{BOB}.json": (0, 0o440), CYCLE_NAME: (0, 0o644),
    }  # fmt: skip
    for uid in (ALICE, BOB, 4711):
        with being(uid):
            may = [os.access(told / f"{ALICE}.json", how, effective_ids=True) for how in (os.R_OK, os.W_OK)]
        assert may == [uid == ALICE, False]
    own = json.loads((told / f"{ALICE}.json").read_text())
    assert [job["job_id"] for job in own["jobs"]] == [1, 2]
    assert all(job["reasons"] for job in own["jobs"])
    assert SECRET not in (told / f"{ALICE}.json").read_text() + (told / CYCLE_NAME).read_text()


def test_files_of_users_without_jobs_go(told: Path, slurm: FakeSlurm, make_controller: Callable[..., Any]) -> None:
    del slurm.jobs[3]
    one_cycle(make_controller, slurm)
    assert sorted(path.name for path in told.iterdir()) == [f"{ALICE}.json", CYCLE_NAME]


@pytest.mark.parametrize("kind", ["link", "foreign", "open", "file"])
def test_a_place_that_others_may_write_costs_no_cycle_and_stays_empty(
    slurm: FakeSlurm, make_controller: Callable[..., Any], tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    place, target = tmp_path / "status", tmp_path / "target"
    target.mkdir()
    if kind == "link":
        place.symlink_to(target)
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        os.chown(place, BOB if kind == "foreign" else 0, -1)
        place.chmod(0o777)
    with make_controller(slurm) as controller:
        assert len(controller.cycle().jobs) == 3
    assert "users cannot see why their jobs wait" in caplog.text
    assert not any(target.iterdir())
    assert kind in {"link", "file"} or not any(place.iterdir())


@contextmanager
def being(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def seen_by_alice(slurm: FakeSlurm, config: Config) -> tuple[Status, dict[int, JobStatus]]:
    """What `muri queue` shows to alice: the status and its jobs."""
    with being(ALICE):
        status, reader = latest_status(config)
    assert reader == "alice"
    shown = refresh(status, view_of(slurm.snapshot()), reader)
    return status, {job.job_id: job for job in shown.jobs}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o711)
    monkeypatch.setattr(status, "user_name", {ALICE: "alice"}.get)
    return Config(state_dir=tmp_path / "state", status_dir=tmp_path / "status")


def test_users_see_why_their_own_jobs_wait(slurm: FakeSlurm, told: Path, config: Config) -> None:
    status, jobs = seen_by_alice(slurm, config)
    assert status.policy == "muri-l"  # auto: no job tells its duration
    assert cycle_age_s(config, time.time()) is not None
    assert explanation(jobs[1])[1] == "- it is next in line and no node of partition main can be used now"
    assert explanation(jobs[3])[-1] == "- only bob and administrators may see why"
    (told / f"{ALICE}.json").unlink()
    assert seen_by_alice(slurm, config)[0] == replace(status, jobs=())  # as before alice's first job


def test_administrators_see_all(slurm: FakeSlurm, told: Path, config: Config, tmp_path: Path) -> None:
    status, reader = latest_status(Config(state_dir=tmp_path, status_dir=told))
    assert reader is None
    shown = refresh(status, view_of(slurm.snapshot()), reader)
    assert all("only bob" not in line for job in shown.jobs for line in explanation(job))


def test_where_no_controller_runs_users_see_what_slurm_tells(slurm: FakeSlurm, config: Config) -> None:
    status, jobs = seen_by_alice(slurm, config)
    assert (status.cycle_s, sorted(jobs)) == (0.0, [1, 2, 3])
    assert cycle_age_s(config, time.time()) is None


def test_a_job_name_that_is_no_utf_8_hides_nobodys_status(
    slurm: FakeSlurm, make_controller: Callable[..., Any], tmp_path: Path
) -> None:
    slurm._update(3, name="caf\udce9")
    one_cycle(make_controller, slurm)
    status, _ = latest_status(Config(state_dir=tmp_path))
    assert {job.job_id: job.name for job in status.jobs} == {1: "job1", 2: "job2", 3: "caf\udce9"}
