"""The command `muri-lab sweep`: its output, and its errors."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from polling import until
from sweep_builders import TWO_BY_FOUR, trace_file

from muri.cli import run_command
from muri.errors import MuriError
from muri_lab.sweep.command import sweep

MURI_LAB = Path(sys.executable).with_name("muri-lab")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return trace_file(tmp_path)


def muri(*words: object) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [MURI_LAB, "sweep", *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The command in this process, all simulations too; it must succeed."""
    code = run_command(sweep, [*map(str, words), "--jobs", "1"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the error of an exit with 2."""
    assert run_command(sweep, [str(word) for word in words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_json_of_one_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(printed(capsys, trace, "--policy", "srtf,srsf,muri-s", *TWO_BY_FOUR, "--json"))
    assert list(document["policies"]) == ["srtf", "srsf", "muri-s"]
    promised = {
        "avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s", "queue_length_mean", "blocking_index_mean",
        "utilization", "jobs", "wall_s", "decisions",
    }  # fmt: skip
    for figures in document["policies"].values():
        assert promised <= figures.keys()
        assert figures["jobs"] == 40
        assert figures["median_jct_s"] <= figures["p99_jct_s"] <= figures["makespan_s"]
        assert set(figures["utilization"]) == {"storage", "cpu", "gpu", "network"}
    assert document["skipped_rows"] == 0
    # Four kinds of jobs on a crowded cluster: interleaving must help.
    assert document["policies"]["muri-s"]["avg_jct_s"] < document["policies"]["srsf"]["avg_jct_s"]


def test_several_traces_are_told_apart_even_with_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    files = [trace_file(folder, jobs=size) for folder, size in zip(folders, (5, 7), strict=True)]
    document = json.loads(printed(capsys, *files, "--policy", "fifo", *TWO_BY_FOUR, "--json"))
    jobs = {name: found["policies"]["fifo"]["jobs"] for name, found in document["traces"].items()}
    assert jobs == {str(files[0]): 5, str(files[1]): 7}


def test_table_fits_eighty_columns_and_speaks_to_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_file(tmp_path, jobs=20)
    monkeypatch.setenv("COLUMNS", "80")
    output = printed(capsys, trace, "--policy", "tiresias-gittins,fifo,muri-jct", *TWO_BY_FOUR)
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "small: 20 jobs, 2 × 4 GPUs, model default"
    assert re.search(r"^tiresias-gittins +[\d.]+ (min|h) .* \d+% +1\.00×$", output, re.MULTILINE), output
    assert re.search(r"^muri-jct .* \d+\.\d\d×$", output, re.MULTILINE), output


def test_options_reach_the_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_file(tmp_path, jobs=20)

    def avg_jct_s(*options: str) -> dict[str, float]:
        text = printed(capsys, trace, "--policy", "muri-s,muri-l", *TWO_BY_FOUR, "--json", *options)
        return {name: found["avg_jct_s"] for name, found in json.loads(text)["policies"].items()}

    usual, one = avg_jct_s(), avg_jct_s("--option", "muri-l:max_group_size=1")
    both = avg_jct_s("--option", "max_group_size=1", "--option", "muri-l:max_group_size=4")
    assert one["muri-s"] == usual["muri-s"]
    assert one["muri-l"] != usual["muri-l"]
    assert both["muri-s"] != usual["muri-s"]
    assert both["muri-l"] == usual["muri-l"]


def test_settings_reach_the_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_file(tmp_path, jobs=20)

    def figures(*options: str) -> dict[str, float]:
        text = printed(capsys, trace, "--policy", "muri-s", *TWO_BY_FOUR, "--json", *options)
        found: dict[str, float] = json.loads(text)["policies"]["muri-s"]
        return found

    usual = figures()
    for options in (
        ("--interval", "360"),
        ("--restart-s", "300"),
        ("--unknown-durations",),
        ("--no-checkpoints",),
        ("--outage", "1:100:90000"),
        ("--profiling-s", "120"),
    ):
        assert figures(*options)["avg_jct_s"] != usual["avg_jct_s"], options
    assert figures("--steady-state", "10:20")["jobs"] == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "srft"), "unknown policy 'srft' (did you mean 'srtf'?); valid are: auto, muri-s,"),
        (("--policy", "srtf,srtf"), "srtf is given more than once"),
        (("--policy", "srtf,"), "has an empty name"),
        (("--policy", "muri-s", "--option", "max_groups=2"), "valid are: max_group_size, ordering"),
        (("--policy", "muri-s", "--option", "max_group_size"), "must be KEY=VALUE"),
        (
            ("--policy", "muri-s", "--option", "fifo:preemption=false"),
            "--option for fifo, which --policy does not name",
        ),
        (("--policy", "muri-l", "--option", "matching=best"), "valid are: certified, rustworkx"),
        (("--policy", "fifo", "--format", "excel"), "muri"),
        (("--policy", "fifo", "--outage", "2:1:5"), "the 2 nodes are 0 to 1"),
        (("--policy", "fifo", "--outage", "0:5:1"), "START < END"),
        (("--policy", "fifo", "--steady-state", "9:3"), "FIRST < LAST"),
        (("--policy", "fifo", "--steady-state", "0:41"), "small has 40 jobs"),
        (("--policy", "fifo", "--seed", "1,x"), "whole numbers"),
        (("--policy", "fifo", "--seed", "1,1"), "more than once"),
        (("--policy", "fifo", "--slurm-option", "partition=x"), "--slurm-option is for --executor slurm"),
        (("--policy", "fifo", "--profile-noise", "2"), "0<=x<=1"),
        (("--policy", "fifo", "--model", "reference"), "no policy 'fifo'; valid are: srtf, srsf"),
        (("--policy", "muri-s", "--model", "reference", "--option", "merge=as-needed"), "no option 'merge'"),
        ((), "no policy; say --policy with some of: auto, muri-s"),
    ],
)
def test_wrong_input_is_named(
    words: tuple[str, ...], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, trace, *TWO_BY_FOUR, *words)


def test_trace_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no trace" in refusal(capsys, "--policy", "fifo")
    done = muri(tmp_path / "nowhere.csv", "--policy", "fifo")
    assert done.returncode == 2
    assert "nowhere.csv" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_rows_are_counted_when_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_file(tmp_path, jobs=6)
    path.write_text(path.read_text() + "nonsense,,,\n")
    assert f"{path}:8" in refusal(capsys, path, "--policy", "fifo", *TWO_BY_FOUR)
    words = (path, "--policy", "fifo", *TWO_BY_FOUR, "--skip-bad-rows")
    assert json.loads(printed(capsys, *words, "--json"))["skipped_rows"] == 1
    assert "1 bad row skipped" in printed(capsys, *words)


def test_folder_that_cannot_be_written_is_refused_before_the_work(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    said = refusal(capsys, trace, "--policy", "fifo", *TWO_BY_FOUR, "--out", tmp_path / "file" / "below")
    assert "--out" in said
    assert "choose a folder" in said


def is_there(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def read_terminal(fd: int, last: re.Pattern[str], deadline_s: float = 240.0) -> str:
    """Return the terminal output until the last pattern is there or the other end is closed."""
    text, limit = "", time.monotonic() + deadline_s
    while not last.search(text) and time.monotonic() < limit:
        if select.select([fd], [], [], 0.2)[0]:
            try:
                text += os.read(fd, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                break
    return text


@pytest.mark.parametrize(("options", "at_a_time"), [((), 5), (("--jobs", "2"), 2), (("--executor", "slurm"), 1)])
def test_as_many_simulations_at_a_time_as_there_are_cpus_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], at_a_time: int
) -> None:
    seen: list[int] = []

    def stop(runs: object, count: int, *_: object) -> None:
        seen.append(count)
        raise MuriError("seen")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    monkeypatch.setattr("muri.simulator.run.sweep", stop)
    monkeypatch.setattr("muri_lab.sweep.on_slurm.sweep_on_slurm", stop)
    trace = trace_file(tmp_path, jobs=2)
    assert run_command(sweep, [str(trace), "--policy", "fifo,srtf", *options]) == 1
    assert seen == [at_a_time]


def test_progress_on_a_terminal_and_a_clean_end_by_ctrl_c(tmp_path: Path) -> None:
    path = trace_file(tmp_path, jobs=3000)  # far more than what is waited for
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [MURI_LAB, "sweep", path, "--policy", "muri-s,muri-l", *TWO_BY_FOUR, "--jobs", "2"],
        stdout=subprocess.PIPE, stderr=child, text=True, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(child)
    try:
        drawn = read_terminal(parent, re.compile(r"[1-9]\d*%.*left", re.DOTALL))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the workers too
        drawn += read_terminal(parent, re.compile(r"interrupted"))
        assert process.wait(timeout=120) == 130
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert "small, muri-" in drawn
    assert "muri: interrupted" in drawn
    assert "Traceback" not in drawn
    assert process.stdout is not None
    assert process.stdout.read() == ""
    process.stdout.close()
    os.close(parent)
    until(lambda: not is_there(process.pid), "the end of the command's workers", 30)
