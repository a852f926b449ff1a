"""`muri profile …` for tests, on a store of their own."""

from click.testing import CliRunner

from muri.cli import cli, run_command
from muri.profiler.commands import profile


def use_own_store(tmp_path, monkeypatch):
    """Let the commands mean a store in `tmp_path`, where they run, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MURI_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("MURI_PROFILES", "MURI_STORE_JOURNAL", "SUDO_USER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "profiles.db"


def invoke(*arguments, **options):
    """Through click alone."""
    return CliRunner().invoke(profile, [str(argument) for argument in arguments], catch_exceptions=False, **options)


def muri(capsys, *arguments):
    """As the entry point does: exit code, stdout, stderr."""
    code = run_command(cli, ["profile", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
