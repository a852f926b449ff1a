"""The benchmark with real jobs: its arithmetic, and one job of each kind that really trains."""

import os
import sys
from pathlib import Path

import pytest
from launcher_harness import Launcher, ends
from polling import until

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import real_report

    return real_report


def case(report, by_user: float, fair: float):
    speeds = {"plain": 0.1, "plain-passive": by_user, "processes:fair": fair, "processes:plain": 0.1}
    throughputs = {way: report.Throughput.of(way, [{"a": speed / 2, "b": speed / 2}]) for way, speed in speeds.items()}
    throughputs["a long run"] = report.Throughput.of("processes:auto", [{"a": 0.9 * fair / 2, "b": 0.9 * fair / 2}])
    shares = {"a": (0.5, 0.5, 0, 0), "b": (0.5, 0, 1.0, 0)}
    cores = {"a": 0.5 * (os.cpu_count() or 1), "b": 1.0 * (os.cpu_count() or 1)}
    return report.Case("loopback", {"a": 0.1, "b": 0.2}, shares, throughputs, cores)


def test_throughput_is_the_median_of_the_rounds(report) -> None:
    rounds = [{"a": 0.5, "b": 0.1}, {"a": 0.7, "b": 0.9}, {"a": 0.6, "b": 0.2}]
    throughput = report.Throughput.of("fair", rounds)
    assert throughput.members == {"a": 0.6, "b": 0.2}
    assert throughput.total == pytest.approx(0.8)
    assert throughput.totals == pytest.approx((0.6, 1.6, 0.8))


def test_figures_compare_muris_best_way_with_the_best_without_it_and_auto_with_the_best_discipline(report) -> None:
    figures = case(report, 1.5, 2.1).to_json()
    assert figures["ratio"] == pytest.approx(2.1 / 1.5)
    assert figures["auto_ratio"] == pytest.approx(0.9)
    assert figures["lp_bound"] == pytest.approx(2.0)
    assert figures["core_bound"] == pytest.approx(1.5)  # a at full speed leaves half of the cores to b


def test_report_fits_80_columns(report, capsys: pytest.CaptureFixture[str]) -> None:
    report.print_report(case(report, 1.0, 2.0))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "2.00 (bar 1.1)" in text
    assert "0.90 (bar 0.97)" in text


@pytest.mark.parametrize("job", ["storage", "cpu", "gpu", "network"])
def test_job_trains_until_it_is_told_to_stop(launcher: Launcher, job: str) -> None:
    (launcher.folder / "samples.bin").write_bytes(bytes(range(256)) * 4 * 4096)
    log, stop = launcher.folder / "log", launcher.folder / "stop"
    command = [sys.executable, str(BENCHMARKS / "real_jobs" / f"{job}.py"), "--log", str(log), "--stop", str(stop)]
    # One thread: on a machine that is busy, several that spin while they wait take minutes.
    variables = launcher.environment | {"OMP_NUM_THREADS": "1"}
    out = launcher.folder / "out"
    options = {"stdout": out.open("ab"), "stderr": out.open("ab"), "cwd": launcher.folder}
    process = launcher.spawn([*command, "--data", str(launcher.folder)], variables, **options)
    until(
        lambda: process.poll() is not None or (log.exists() and len(log.read_text().splitlines()) >= 3),
        "three iterations",
    )
    stop.touch()
    assert ends(process) == 0, out.read_text()
    ends_s = [float(line) for line in log.read_text().splitlines()]
    assert len(ends_s) >= 3
    assert ends_s == sorted(ends_s)
