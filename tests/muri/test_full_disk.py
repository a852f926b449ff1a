"""A full disk costs one line and exit code 1, whatever was to be written; a file is written whole or not at all."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from muri.files import whole_file
from muri.launcher.script.trace import Trace

FULL = Path("/dev/full")  # Every write to it fails as on a full disk
MURI = f"{shlex.quote(sys.executable)} -c 'from muri.cli import main; main()'"
PRINTING = ["--version", "policies", "policies --json", "config check --show", "run --help"]


def shell(script: str, folder: Path) -> tuple[int, str]:
    """Exit code and standard error of a shell's script, in which the function `muri` is the command."""
    # Python 3.11 leaves half a module in its cache where a file may not grow.
    script = f'export PYTHONDONTWRITEBYTECODE=1; muri() {{ {MURI} "$@"; }}; {script}'
    done = subprocess.run(["bash", "-c", script], check=False, text=True, cwd=folder, stderr=subprocess.PIPE)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", PRINTING)
def test_output_to_a_full_disk(command: str, tmp_path: Path) -> None:
    said = "muri: the output could not be written: No space left on device\n"
    assert shell(f"muri {command} > {FULL}", tmp_path) == (1, said)


def test_an_error_keeps_its_exit_code_where_it_cannot_be_printed(tmp_path: Path) -> None:
    assert shell(f"muri config check /nowhere.yaml &> {FULL}", tmp_path) == (2, "")
    assert shell(f"muri que &> {FULL}", tmp_path) == (2, "")
    assert shell(f"muri policies &> {FULL}", tmp_path) == (1, "")


def test_a_reader_that_has_had_enough_hears_nothing(tmp_path: Path) -> None:
    assert shell("muri config check --show | true", tmp_path)[1] == ""


@pytest.mark.parametrize("before", ["", "old"])
def test_a_file_is_written_whole_or_not_at_all(before: str, tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    if before:
        file.write_text(before)
    # No file may grow beyond 1 KiB.
    code, said = shell("ulimit -f 1; muri trace generate --jobs 500 --gpus 8 -o jobs.csv", tmp_path)
    assert (code, said) == (2, "muri: cannot write jobs.csv: File too large\n")
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"] * bool(before)
    assert not before or file.read_text() == before


def test_devices_and_links_stay_what_they_are(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    for path in (link, Path("/dev/null")):
        with whole_file(path) as draft:
            draft.write_text("new")
    assert (link.is_symlink(), target.read_text(), target.stat().st_mode & 0o777) == (True, "new", 0o640)
    assert Path("/dev/null").is_char_device()


def test_a_trace_ends_on_a_full_disk_and_what_it_traces_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    path.symlink_to(FULL)
    trace = Trace(path, "job 1")
    trace.record("1", "load", 1.0, 2.0, 0.0)
    trace.flush()
    trace.record("1", "load", 3.0, 4.0, 0.0)
    trace.flush()
    trace.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the trace {path} ends here: No space left on device"
    ]
