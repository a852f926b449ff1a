"""`muri setup` as a person calls it, on files that no Slurm reads."""

import json
import os

import pytest
from click.testing import CliRunner

from muri.errors import MuriError
from muri.slurm_plugin.cli.setup import setup

CONF = "GresTypes=gpu\nLicenses=matlab:2\nNodeName=n[1-2] Gres=gpu:2 CPUs=4\nPartitionName=p Nodes=ALL\n"


@pytest.fixture
def conf(tmp_path, monkeypatch):
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "slurm.conf").write_text(CONF)
    (tmp_path / "muri.yaml").touch()
    monkeypatch.setenv("MURI_CONFIG", str(tmp_path / "muri.yaml"))
    return folder / "slurm.conf"


def run(*arguments):
    return CliRunner().invoke(setup, [*map(str, arguments)], catch_exceptions=True)


def test_check_shows_a_diff_and_changes_nothing(conf):
    done = run("--check", "--slurm-conf", conf)
    assert done.exit_code == 1
    assert "+Licenses=matlab:2,muri_gate:1000000" in done.output
    assert "+NodeName=n[1-2] Name=muri Count=64 Flags=CountOnly" in done.output
    assert "2 file(s) lack something" in done.output
    assert conf.read_text() == CONF
    assert [path.name for path in conf.parent.iterdir()] == ["slurm.conf"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change Slurm's files")
def test_apply_and_remove_are_each_others_inverse(conf):
    assert run("--apply", "--slurm-conf", conf).exit_code == 0
    again = run("--apply", "--slurm-conf", conf, "--json")
    assert json.loads(again.output) | {"plugin_installed": None, "controller_installed": None} == {
        "complete": True, "changed": False, "files": [], "plugin_installed": None, "controller_installed": None,
    }  # fmt: skip
    assert run("--check", "--slurm-conf", conf).exit_code == 0
    done = run("--remove", "--slurm-conf", conf, "--json")
    assert sorted(json.loads(done.output)["restored"]) == [str(conf.with_name("gres.conf")), str(conf)]
    assert conf.read_text() == CONF
    assert [path.name for path in conf.parent.iterdir()] == ["slurm.conf"]


def test_muris_own_hold_leaves_licences_alone(conf, tmp_path):
    (tmp_path / "muri.yaml").write_text("gate: hold\n")
    done = run("--check", "--slurm-conf", conf)
    assert "Name=muri Count=64" in done.output
    assert "muri_gate" not in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((), "--check, --apply or --remove"), (("--check", "--purge"), "--purge goes with --remove"),
     (("--check", "--slurm-conf", "/nowhere/slurm.conf"), "there is no /nowhere/slurm.conf")],
)  # fmt: skip
def test_mistakes_are_said(arguments, says):
    done = run(*arguments)
    assert isinstance(done.exception, MuriError)
    assert says in str(done.exception)


def test_ordinary_users_may_only_look(conf, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    for mode in ("--apply", "--remove"):
        done = run(mode, "--slurm-conf", conf)
        assert "must run as root" in str(done.exception)
    assert conf.read_text() == CONF
