"""`muri-controller` and `muri drain`: when they refuse, and when that is a failure."""

import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_slurm import FakeSlurm, make_job, make_node

from muri.cli import cli
from muri.commands import run_command
from muri.slurm_plugin.cli.admin import controller, drain
from muri.slurm_plugin.controller import assemble
from muri.slurm_plugin.controller.loop import LOCK_NAME, only_one
from muri.slurm_plugin.controller.status import STATUS_NAME
from muri.slurm_plugin.gateway.base import GatewayError


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """The command sets the process's log up; here that ends with the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm([make_job(1)], [make_node("n1")])
    monkeypatch.setattr(assemble, "open_gateway", lambda *_: fake)
    monkeypatch.setattr("muri.slurm_plugin.gateway.commands.CommandGateway", lambda: fake)
    return fake


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "muri.yaml"
    path.write_text(f"state_dir: {tmp_path / 'state'}\npolicy: muri-s\ninterval_s: 100\n")
    return path


@pytest.mark.parametrize(
    ("held_s", "finished_s", "code"),
    [(10.0, None, 0), (10.0, 5000.0, 0), (5000.0, 10.0, 0), (5000.0, 5000.0, 1), (5000.0, None, 1)],
)
def test_a_lock_held_by_one_that_finishes_no_cycle_is_a_failure(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], held_s: float, finished_s: float | None, code: int
) -> None:
    with only_one(tmp_path / "state"):
        os.utime(tmp_path / "state" / LOCK_NAME, (time.time() - held_s,) * 2)
        if finished_s is not None:
            (tmp_path / "state" / STATUS_NAME).touch()
            os.utime(tmp_path / "state" / STATUS_NAME, (time.time() - finished_s,) * 2)
        assert run_command(controller, ["--once", "--config", str(config)]) == code
    error = capsys.readouterr().err
    assert "another controller" in error
    assert (re.search(r"has finished no cycle for 5\d\d\d s", error) is not None) is (code == 1)


@pytest.mark.usefixtures("slurm")
def test_a_configuration_that_others_can_write_stops_the_controller_but_no_drain(
    config: Path, slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.chmod(0o666)
    assert run_command(controller, ["--once", "--config", str(config)]) == 2
    assert slurm.jobs[1].held
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setattr("muri.slurm_plugin.cli.admin.Config", lambda: assemble.Config(state_dir=tmp_path / "built-in"))
    assert run_command(drain, ["--if-stale", "1800", "--config", str(config)]) == 0
    assert "is not safe to obey: others may write" in capsys.readouterr().err
    assert not slurm.jobs[1].held
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("damage", ["color: blue\n", "policy: [\n", "policy: \xff\n"])
def test_a_drain_with_a_broken_configuration_looks_for_the_controller_where_it_is(
    config: Path, slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    config.write_bytes(config.read_bytes() + damage.encode("latin-1"))
    with only_one(tmp_path / "state"):
        (tmp_path / "state" / STATUS_NAME).touch()
        assert run_command(drain, ["--if-stale", "1800", "--config", str(config)]) == 0
    captured = capsys.readouterr()
    assert f"going on with the built-in settings and state_dir {tmp_path}/state" in captured.err
    assert "nothing to do" in captured.out
    assert slurm.jobs[1].held


def test_a_controller_that_is_not_root_says_so(
    config: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muri.slurm_plugin.cli.admin.os.geteuid", lambda: 64030)
    assert run_command(controller, ["--once", "--config", str(config)]) == 2
    assert "muri-controller must run as root" in capsys.readouterr().err
    assert slurm.jobs[1].held


def test_what_slurm_says_to_a_drain_is_shown_as_text(
    config: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "release", Mock(side_effect=GatewayError("no \x1b]0;owned\x07")))
    with pytest.raises(SystemExit):
        run_command(drain, ["--config", str(config)])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make directories of another user")
def test_a_state_directory_of_another_user_is_a_message(
    config: Path, slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 4711, 4711)
    assert run_command(drain, ["--config", str(config)]) == 1
    assert capsys.readouterr().err.startswith(f"muri: {tmp_path}/state belongs to 4711, not to root: run this as 4711")
    assert slurm.jobs[1].held


@pytest.mark.parametrize(
    "arguments", [("queue",), ("explain", "7"), ("plan", "--save", "-"), ("drain",), ("--once",), ("preempt", "7")]
)
def test_without_slurm_it_is_slurms_configuration_that_cannot_be_read(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("MURI_CONFIG", str(config))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert run_command(controller if arguments == ("--once",) else cli, arguments) == 1
    told = capsys.readouterr().err
    assert "cannot read Slurm's configuration: the command 'scontrol' is not in PATH: this needs a host" in told


def test_before_removal_a_drain_takes_muris_words_from_jobs_and_no_others(
    config: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job = slurm.jobs[1]
    slurm.jobs[1] = replace(job, admin_comment=f"site=x {job.admin_comment}")
    assert run_command(drain, ["--forget", "--config", str(config)]) == 0
    assert slurm.jobs[1].admin_comment == "site=x"
    assert not slurm.jobs[1].held
    assert "took Muri's tags from the AdminComment of jobs 1\n" in capsys.readouterr().out
