"""The commands `muri trace …`: output, exit codes, help pages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from muri.cli import cli, run_command
from muri.profiler.exchange import to_json
from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.traces.generator import Recipe, generate
from muri.simulator.traces.read import read_trace
from muri.simulator.traces.schema import write_trace

MURI = "from muri.cli import main; main()"
HELIOS = (
    "job_id,user,gpu_num,submit_time,duration\n"
    "1,ann,1,2020-06-09 18:41:01,3600\n"
    "2,bob,two,2020-06-09 18:42:01,3600\n"
    "3,bob,0,2020-06-09 18:42:01,3600\n"
)


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    write_trace(generate(Recipe(jobs=300, gpus=64, seed=1)), path)
    return path


@pytest.fixture
def helios_path(tmp_path: Path) -> Path:
    path = tmp_path / "helios.csv"
    path.write_text(HELIOS, encoding="utf-8")
    return path


def test_check_fits_eighty_columns(
    trace_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(cli, ["trace", "check", str(trace_path), "--gpus", "64"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for expected in ("300 of 20 users", "Load of 64 GPUs", "0.90", "network", "median", "longest"):
        assert expected in shown


def test_check_as_json_agrees_with_the_trace(trace_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(cli, ["trace", "check", str(trace_path), "--gpus", "32", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    jobs = read_trace(trace_path).jobs
    assert (shown["jobs"], shown["format"], shown["gpus"]) == (300, "muri", 32)
    assert shown["load"] == pytest.approx(1.8, rel=1e-3)
    assert shown["duration_s"]["p100"] == max(job.service_s for job in jobs)
    assert sum(share["jobs"] for share in shown["by_gpu_count"].values()) == 300
    assert sum(share["gpu_s"] for share in shown["by_bottleneck"].values()) == pytest.approx(shown["gpu_s"])


def test_import_stops_at_bad_rows_with_exit_code_2(helios_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = helios_path.with_name("out.csv")
    assert run_command(cli, ["trace", "import", "--from", "helios", str(helios_path), "-o", str(output)]) == 2
    said = capsys.readouterr().err
    assert f"muri: {helios_path}: 1 bad row of 2" in said
    assert f"{helios_path}:3: column gpu_num: 'two' is not a number" in said
    assert not output.exists()


def test_import_counts_what_it_leaves_out(helios_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = helios_path.with_name("out.csv")
    command = ["trace", "import", "--from", "helios", str(helios_path), "-o", str(output), "--skip-bad-rows"]
    assert run_command(cli, command) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == ["imported: 1 job (format helios)", "skipped: 1 bad row", "left out: 1 that had no GPUs"]
    assert [job.job_id for job in read_trace(output).jobs] == [1]


def test_import_reads_and_writes_pipes_in_utf_8() -> None:
    command = [sys.executable, "-c", MURI, "trace", "import", "--from", "helios", "--skip-bad-rows", "-"]
    text = HELIOS.replace("ann", "änn").encode()
    environment = {"PYTHONIOENCODING": "latin-1"}  # like a locale other than UTF-8
    finished = subprocess.run(command, input=text, env=environment, capture_output=True, check=True)
    header, row = finished.stdout.decode("utf-8").splitlines()
    assert header.startswith("job_id,user,submit_s,gpu_count,iterations,model")
    assert row.startswith("1,änn,0,1,")


def test_a_reader_that_goes_away_causes_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MURI, "trace", "generate", "--jobs", "20000", "--gpus", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert b"Traceback" not in said


def test_import_assigns_a_sites_exported_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = StageProfile(ProfileKey("unet", 32, 1, "a100"), 0.1, 0.2, 0.3, 0.4, 0.5)
    exported, log, output = tmp_path / "profiles.json", tmp_path / "h.csv", tmp_path / "out.csv"
    exported.write_text(to_json([own]), encoding="utf-8")
    log.write_text("".join(HELIOS.splitlines(keepends=True)[:2]), encoding="utf-8")
    command = ["trace", "import", str(log), "-o", str(output), "--profiles"]
    assert run_command(cli, [*command, str(exported)]) == 0
    (job,) = read_trace(output).jobs
    assert (job.key, job.iterations) == (own.key, 7200)
    assert run_command(cli, [*command, str(log)]) == 2
    assert f"{log}: line 1, column 1: not JSON" in capsys.readouterr().err
    assert run_command(cli, [*command, str(tmp_path / "none.json")]) == 2


def test_check_says_good_or_what_is_wrong(
    trace_path: Path, helios_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(cli, ["trace", "check", str(trace_path)]) == 0
    assert capsys.readouterr().out.startswith("good: 300 jobs (format muri)\n")
    assert run_command(cli, ["trace", "check", str(trace_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("format", "jobs", "skipped_rows", "left_out")] == ["muri", 300, 0, {}]
    assert run_command(cli, ["trace", "check", str(helios_path)]) == 2
    assert run_command(cli, ["trace", "check", "no-such-file.csv"]) == 2
    assert run_command(cli, ["trace", "check", str(trace_path), "--from", "philly"]) == 2
    assert "try --from muri" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu-mix", "many=1"], "'many' is not a number of GPUs"),
        (["--gpu-mix", "1=x"], "'1=x' is not of the form NAME=WEIGHT"),
        (["--gpu-mix", "=1"], "a name is missing"),
        (["--bottlenecks", "disk"], "unknown bottleneck disk"),
        (["--durations", "1,2"], "is not FLOOR,MEDIAN,SIGMA,LONGEST"),
        (["--load", "-1"], "load is -1.0"),
        (["--jobs", "0"], "0 is not in the range"),
    ],
)
def test_generate_refuses_what_makes_no_sense(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t.csv"
    command = ["trace", "generate", "--jobs", "5", "--gpus", "8", "-o", str(output), *options]
    assert run_command(cli, command) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()
