"""The benchmark with real jobs: one of each kind really trains."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_harness import Launcher, ends, launcher_in
from polling import until

BENCHMARKS = Path(__file__).parents[3] / "lab" / "muri_lab" / "benchmarks"
pytestmark = pytest.mark.thorough


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose processes end with the test."""
    with launcher_in(tmp_path) as launcher:
        yield launcher


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
