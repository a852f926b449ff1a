"""`muri profile …` and `muri-lab …` for tests, on a store of their own."""

import shlex

from click.testing import CliRunner
from profile_builders import make_profile

from muri.cli import cli, run_command
from muri.profiler.commands import profile
from muri.profiler.store import ProfileStore
from muri_lab.cli import cli as lab


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
    """`muri profile …` as the entry point does it: exit code, stdout, stderr."""
    return _run(capsys, cli, "profile", *arguments)


def muri_lab(capsys, *arguments):
    """`muri-lab …` as the entry point does it: exit code, stdout, stderr."""
    return _run(capsys, lab, *arguments)


def _run(capsys, command, *arguments):
    code = run_command(command, [*map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def assert_mistake(path, capsys, run, line, said):
    """Run a wrong line by `muri` or `muri_lab` on a store of three profiles at `path`: it is named, nothing changes."""
    (path.parent / "job.py").write_text("raise SystemExit('it was run')")
    (path.parent / "binary").write_bytes(b"\xff\xfe\x00")
    with ProfileStore(path) as store:
        store.put_all([make_profile(), make_profile("gpt2", gpu_type="a100"), make_profile("bert", user="alice")])
    before = path.read_bytes()
    code, out, error = run(capsys, *shlex.split(line))
    assert (code, out) == (2, "")
    assert said in error
    assert "Traceback" not in error
    assert path.read_bytes() == before
