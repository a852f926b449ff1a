"""The command `muri`: commands and options of 0.2 that are gone, and the store of the site's controller."""

import json

import pytest

from muri.cli import REMOVED, cli, site_state_dir
from muri.commands import run_command


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_says_what_to_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(cli, [*name.split(), "--json", "anything"]) == 2
    assert capsys.readouterr().err == f"muri: `muri {name}` was removed in 0.3: {REMOVED[name]}\n"


def test_a_slip_is_no_removed_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(cli, ["quue"]) == 2
    assert "No such command 'quue'; did you mean 'queue'?" in capsys.readouterr().err
    assert run_command(cli, ["queue", "--jsn"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name in ("MURI_PROFILES", "MURI_STATE_DIR", "MURI_STORE_JOURNAL"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "muri.yaml"
    monkeypatch.setenv("MURI_CONFIG", str(path))
    return path


def stored_at(capsys, *options):
    """The store that `muri profile export` looks for and does not find."""
    assert run_command(cli, ["profile", "export", *options]) == 1
    return capsys.readouterr().err.partition("there is no profile store at ")[2].partition(". ")[0]


def test_the_configured_state_directory_holds_the_store(config, tmp_path, monkeypatch, capsys):
    config.write_text(json.dumps({"state_dir": str(tmp_path / "state")}))
    assert stored_at(capsys) == str(tmp_path / "state" / "profiles.db")
    assert stored_at(capsys, "--store", "/nowhere/p.db") == "/nowhere/p.db"
    monkeypatch.setenv("MURI_STATE_DIR", "/srv/muri")
    assert stored_at(capsys) == "/srv/muri/profiles.db"
    monkeypatch.setenv("MURI_PROFILES", "/srv/other.db")
    assert stored_at(capsys) == "/srv/other.db"


@pytest.mark.parametrize("text", ["", "- a list", "state_dir: 7", "state_dir: [", "grouping: {}"])
def test_a_configuration_without_a_directory_leaves_the_default(config, text):
    assert site_state_dir() is None  # there is no file
    config.write_text(text)
    assert site_state_dir() is None
