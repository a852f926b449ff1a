"""`muri doctor` on real files, as a person calls it."""

import json
import os
from pathlib import Path

import pytest

from muri.cli import cli, run_command
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.cli.doctor import (
    examine_state_dir,
    judge_cycle,
    judge_run_dir,
    judge_space,
    judge_status_dir,
    judge_way_of_writing,
)
from muri.slurm_plugin.cli.doctor_slurm import Level
from muri.slurm_plugin.controller.loop import only_one
from muri.slurm_plugin.records.journal import Journal


@pytest.fixture(autouse=True)
def state_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("MURI_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")  # no Slurm's commands either
    for name in ("MURI_PROFILES", "MURI_CONFIG", "MURI_STORE_JOURNAL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def damaged(state_dir):
    path = state_dir / "profiles.db"
    with ProfileStore(path) as store:
        store.put_all(
            StageProfile(ProfileKey(f"m{number}", 8, 1, "gpu"), 0.1, 0.1, 0.1, 0.1, 0.4) for number in range(300)
        )
    content = bytearray(path.read_bytes())
    content[8192:12288] = b"\xa5" * 4096
    path.write_bytes(content)
    return path


def doctor(capsys, *arguments):
    code = run_command(cli, ["doctor", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def findings(capsys, *arguments):
    code, output, _ = doctor(capsys, "--json", *arguments)
    return code, {item["name"]: item for item in reversed(json.loads(output)["findings"])}


def test_without_slurm_it_says_so_and_warns_only(capsys, state_dir):
    with Journal(state_dir / "journal.db"), ProfileStore(state_dir / "profiles.db"):
        pass
    code, found = findings(capsys)
    assert code == 0
    assert found["Slurm"]["level"] == "warning"
    assert "no Slurm on this machine" in found["Slurm"]["text"]
    assert {found[name]["level"] for name in ("configuration", "profile store", "journal", "disk space")} == {"ok"}
    assert not list(state_dir.glob("*.lock"))


def test_a_damaged_store_is_a_problem_and_stays_where_it_is(capsys, damaged):
    before = damaged.read_bytes()
    code, output, error = doctor(capsys)
    assert (code, error) == (1, "")
    assert all(len(line) <= 80 or str(damaged) in line for line in output.splitlines())
    assert "1 problem(s)" in output
    code, found = findings(capsys)
    assert code == 1
    assert found["profile store"]["level"] == "problem"
    assert "--set-aside" in found["profile store"]["remedy"]
    assert damaged.read_bytes() == before


def test_set_aside_renames_a_damaged_store_and_nothing_else(capsys, damaged):
    content = damaged.read_bytes()
    code, output, _ = doctor(capsys, "--set-aside", "--yes", "--json")
    place = Path(json.loads(output)["set_aside"])
    assert code == 0
    assert place.name.startswith("profiles.db.damaged-")
    assert place.read_bytes() == content
    assert not damaged.exists()
    assert "damaged and set aside" in doctor(capsys)[1]
    with ProfileStore(damaged) as store:
        assert store.list() == ()


def test_set_aside_leaves_a_whole_store_alone(capsys, state_dir):
    ProfileStore(state_dir / "profiles.db").close()
    code, output, _ = doctor(capsys, "--set-aside", "--yes")
    assert (code, "nothing to set aside" in output) == (0, True)
    assert (state_dir / "profiles.db").exists()


def test_set_aside_asks(capsys, damaged, monkeypatch):
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    code, _, error = doctor(capsys, "--set-aside")
    assert (code, damaged.exists()) == (1, True)
    assert "Nothing was changed" in error
    code, output, error = doctor(capsys, "--set-aside", "--json")
    assert (code, json.loads(output), "Nothing was changed" in error) == (1, {"set_aside": None}, True)


def test_set_aside_does_not_pull_the_store_from_under_a_controller(capsys, damaged, state_dir):
    with only_one(state_dir):
        code, _, error = doctor(capsys, "--set-aside", "--yes")
    assert (code, damaged.exists()) == (1, True)
    assert f"PID {os.getpid()}" in error


def test_a_damaged_journal_is_a_problem(capsys, state_dir):
    (state_dir / "journal.db").write_bytes(b"no database" * 1000)
    code, found = findings(capsys)
    assert (code, found["journal"]["level"]) == (1, "problem")
    assert "AdminComment" in found["journal"]["remedy"]


def test_a_wrong_configuration_is_a_problem_and_the_rest_is_still_examined(capsys, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("grouping: {min_sped: 0.3}\n")
    code, found = findings(capsys, "--config", wrong)
    assert (code, found["configuration"]["level"]) == (1, "problem")
    assert "did you mean min_speed" in found["configuration"]["text"]
    assert "GPUs" in found


def test_a_configuration_that_others_can_write_is_a_problem(capsys, tmp_path):
    config = tmp_path / "etc" / "muri.yaml"
    config.parent.mkdir()
    config.write_text("policy: auto\n")
    assert "trust" not in findings(capsys, "--config", config)[1]
    config.chmod(0o666)
    code, found = findings(capsys, "--config", config)
    assert (code, found["trust"]["level"]) == (1, "problem")
    assert "others may write" in found["trust"]["text"]


def test_a_parent_in_which_others_could_exchange_the_state_directory_is_pointed_out(capsys, state_dir, monkeypatch):
    shared = state_dir / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("MURI_STATE_DIR", str(shared / "state"))
    assert findings(capsys)[1]["trust"]["level"] == "warning"


def test_what_may_not_be_read_is_left_out(capsys, state_dir, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    code, found = findings(capsys)
    assert code == 0
    assert not {"profile store", "journal"} & set(found)
    assert found["state directory"]["level"] == "warning"


@pytest.mark.parametrize("judge", [judge_status_dir, judge_run_dir])
def test_directories_for_users_are_writable_by_one_only(judge, tmp_path):
    place = tmp_path / "muri"
    assert judge(None, place).level is Level.WARNING
    for mode, level in (
        (0o40755, Level.OK),
        (0o40777, Level.PROBLEM),
        (0o41777, Level.PROBLEM),
        (0o120777, Level.PROBLEM),
    ):
        found = judge(os.stat_result((mode, 0, 0, 1, 0, 0, 0, 0, 0, 0)), place)
        assert (found.level, bool(found.remedy)) == (level, level is not Level.OK)
    foreign = os.stat_result((0o40755, 0, 0, 1, 1002, 0, 0, 0, 0, 0))
    assert judge_run_dir(foreign, place).level is Level.PROBLEM


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (judge_space(Path("/"), 10 * 1024**2), Level.PROBLEM),
        (judge_space(Path("/"), 500 * 1024**2), Level.WARNING),
        (judge_space(Path("/"), 5 * 1024**3), Level.OK),
        (judge_cycle(None, 360), Level.WARNING),
        (judge_cycle(100, 360), Level.OK),
        (judge_cycle(2000, 360), Level.WARNING),
    ],
)
def test_each_finding_has_its_level_and_says_what_to_do(finding, level):
    assert finding.level is level
    assert bool(finding.remedy) is (level is not Level.OK)


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        (lambda path: None, Level.OK, "alone, writable"),
        (lambda path: path.rmdir(), Level.WARNING, "there is no"),
        (lambda path: (path.rmdir(), path.touch()), Level.PROBLEM, "is not a directory"),
        (lambda path: (path.rename(f"{path}1"), path.symlink_to(f"{path}1")), Level.PROBLEM, "is a link"),
        (lambda path: (path.rmdir(), path.touch(), os.chown(path, 4711, -1)), Level.PROBLEM, "is not a directory"),
        (lambda path: os.chown(path, 4711, -1), Level.PROBLEM, "belongs to 4711, not to root"),
        (lambda path: path.chmod(0o755), Level.WARNING, "others may enter"),
        (lambda path: ((path / "x").touch(), os.chown(path / "x", 4711, -1)), Level.WARNING, "not owned by root"),
    ],
)
def test_the_state_directory_is_for_root_alone(tmp_path, change, level, said):
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    change(path)
    finding = examine_state_dir(path)
    assert (finding.level, said in finding.text, bool(finding.remedy)) == (level, True, level is not Level.OK)


def test_a_write_ahead_log_on_a_network_file_system_is_pointed_out():
    assert [finding.level for finding in judge_way_of_writing("nfs4", "wal")] == [Level.WARNING]
    assert not [*judge_way_of_writing("nfs4", "delete"), *judge_way_of_writing("ext4", "wal")]
