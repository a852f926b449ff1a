"""Four real PyTorch jobs on the CPU: alone, as plain processes at once, and interleaved by the runtime.

    python -m benchmarks.interleaving_real                    # about five minutes; leave the machine alone
    python -m benchmarks.interleaving_real --seconds 6 --rounds 1 --json

The jobs are the scripts in real_jobs/, the same for every way of running them, with PyTorch's defaults.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.machine import describe_machine
from benchmarks.real_link import Link, slow_link
from benchmarks.real_report import Case, Throughput, print_report

JOBS = ("storage", "cpu", "gpu", "network")
# "processes" is `fair` with a process for each member.
WAYS = ("plain", "plain-passive", "lockstep", "fair", "auto", "processes")
# What a user could set who knows that OpenMP's threads spin while they wait: it matters when processes share cores.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
SCRIPTS = Path(__file__).parent / "real_jobs"
MURI = Path(sys.executable).with_name("muri")
DATA_MIB = 256
RATE_MBIT = 100
START_LIMIT_S = 90.0
WARM_ITERATIONS = 5


class BenchmarkError(Exception):
    """A job failed; the text says which and how."""


@dataclass(frozen=True)
class Setting:
    """What all runs share.

    Attributes:
        data: Directory of the samples, on a disk.
        link: The network job's link.
        seconds: Length of the window in which iterations are counted.
    """

    data: Path
    link: Link
    seconds: float


class Run:
    """Some jobs at work at once, in a directory of their own."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._jobs: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, command: Sequence[str], name: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to a file."""
        with (self._folder / f"{name}.out").open("wb") as out:
            variables = os.environ | environment
            process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._processes.append(process)
        return process

    def start_job(self, job: str, prefix: Sequence[str], **environment: str) -> None:
        """Start one job by `prefix` and its script."""
        files = ["--log", str(self._folder / f"{job}.log"), "--stop", str(self._folder / "stop")]
        more = self._setting.link.arguments if job == "network" else ()
        command = [*prefix, str(SCRIPTS / f"{job}.py"), *files, "--data", str(self._setting.data), *more]
        self._jobs[job] = self.spawn(command, job, **environment)

    def ends_s(self, job: str) -> list[float]:
        """When a job's iterations ended, on the monotonic clock."""
        path = self._folder / f"{job}.log"
        return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def measure(self) -> dict[str, float]:
        """Iterations per second of each job in a window in which all are at work."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while min(len(self.ends_s(job)) for job in self._jobs) < WARM_ITERATIONS:
            self._check(deadline_s)
            time.sleep(0.2)
        begin_s = time.monotonic()
        time.sleep(self._setting.seconds)
        end_s = time.monotonic()
        self._check(end_s + 1.0)
        rates = {job: _rate(self.ends_s(job), begin_s, end_s) for job in self._jobs}
        (self._folder / "stop").touch()
        for job, process in self._jobs.items():
            if process.wait(timeout=60) != 0:
                raise BenchmarkError(f"{job}: {self._output(job)}")
        return rates

    def close(self) -> None:
        """End what still runs."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _check(self, deadline_s: float) -> None:
        for job, process in self._jobs.items():
            if process.poll() is not None:
                raise BenchmarkError(f"{job} ended too early: {self._output(job)}")
        if time.monotonic() > deadline_s:
            slow = [job for job in self._jobs if len(self.ends_s(job)) < WARM_ITERATIONS]
            raise BenchmarkError(f"{', '.join(slow)} did not come to {WARM_ITERATIONS} iterations in {START_LIMIT_S} s")

    def _output(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text()[-2000:]


def _rate(ends_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Iterations per second, from the first end in the window to the last."""
    inside = [at_s for at_s in ends_s if begin_s <= at_s <= end_s]
    if len(inside) < 3:
        return len(inside) / (end_s - begin_s)
    return (len(inside) - 1) / (inside[-1] - inside[0])


def run_alone(setting: Setting, job: str) -> tuple[float, tuple[float, ...]]:
    """A job's solo iteration time in seconds and the share of it that it holds each resource."""
    with tempfile.TemporaryDirectory(prefix="muri-real-") as name:
        folder = Path(name)
        run = Run(setting, folder)
        try:
            run.start_job(job, [sys.executable], MURI_TRACE=str(folder / "trace.jsonl"))
            rate = run.measure()[job]
        finally:
            run.close()
        events = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    stages = ("load", "preprocess", "propagate", "synchronize")
    elapsed_s = max(e["end_s"] for e in events) - min(e["start_s"] for e in events)
    shares = (sum(e["end_s"] - e["start_s"] for e in events if e["stage"] == stage) / elapsed_s for stage in stages)
    return 1 / rate, tuple(shares)


def run_together(setting: Setting, way: str, solo_s: dict[str, float]) -> dict[str, float]:
    """Normalized throughput of each job, all at once."""
    with tempfile.TemporaryDirectory(prefix="muri-real-") as name:
        run = Run(setting, Path(name))
        try:
            if way in {"plain", "plain-passive"}:
                for job in JOBS:
                    run.start_job(job, [sys.executable], **(PASSIVE if way == "plain-passive" else {}))
            else:
                _start_interleaved(run, Path(name), way, solo_s)
            return {job: rate * solo_s[job] for job, rate in run.measure().items()}
        finally:
            run.close()


def _start_interleaved(run: Run, folder: Path, way: str, solo_s: dict[str, float]) -> None:
    ids = {job: str(101 + index) for index, job in enumerate(JOBS)}
    sockets, status = folder / "run", folder / "status.json"
    solo = ",".join(f"{ids[job]}={seconds:.6f}" for job, seconds in solo_s.items())
    own_process = way == "processes"
    runtime = [
        sys.executable, "-m", "muri.launcher.runtime", "--members", ",".join(ids.values()), "--run-dir", str(sockets),
        "--discipline", "fair" if own_process else way, "--isolation", "process" if own_process else "thread",
        "--solo-iteration-s", solo, "--status-file", str(status),
    ]  # fmt: skip
    process = run.spawn(runtime, "runtime")
    deadline_s = time.monotonic() + START_LIMIT_S
    while not status.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise BenchmarkError(f"the runtime did not start: {(folder / 'runtime.out').read_text()}")
        time.sleep(0.1)
    for job, job_id in ids.items():
        run.start_job(job, [str(MURI), "run"], SLURM_JOB_ID=job_id, MURI_RUN_DIR=str(sockets))


def measure(seconds: float, rounds: int, ways: Sequence[str], data: Path | None = None) -> Case:
    """Run all jobs in all ways, the ways in turn, so that a disturbance hits all alike.

    Args:
        seconds: Length of each window.
        rounds: How often each way is run.
        ways: Which of `WAYS`.
        data: Where the samples are written; a temporary directory on the working directory's disk when None.
    """
    with tempfile.TemporaryDirectory(prefix="muri-data-", dir=data or Path.cwd()) as name, slow_link(RATE_MBIT) as link:
        _write_samples(Path(name))
        setting = Setting(Path(name), link, seconds)
        alone: dict[str, list[tuple[float, tuple[float, ...]]]] = {job: [] for job in JOBS}
        speeds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for job in JOBS:
                alone[job].append(run_alone(setting, job))
            solo_s = {job: median(result[0] for result in results) for job, results in alone.items()}
            for way in ways:
                speeds[way].append(run_together(setting, way, solo_s))
    shares = {job: tuple(map(mean, zip(*(result[1] for result in alone[job]), strict=True))) for job in JOBS}
    throughputs = {way: Throughput.of(way, results) for way, results in speeds.items()}
    return Case(link.description, solo_s, shares, throughputs)


def _write_samples(folder: Path) -> None:
    with (folder / "samples.bin").open("wb") as file:
        for _ in range(DATA_MIB):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())


def main() -> int:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="window of each run (default: 12)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is run (default: 3)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--data", type=Path, help="directory on the disk to read from (default: here)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs, link and files are cleared away
    try:
        case = measure(options.seconds, options.rounds, options.ways, options.data)
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"machine": describe_machine(), "real_pytorch_cpu": case.to_json()}, indent=1))
    else:
        print_report(case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
