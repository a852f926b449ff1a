"""Real jobs that train at once in processes of their own, and how fast each gets on."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import psutil

from examples.demo.timeline import Slice, members_of, read_slices
from muri.group_spec import group_of
from muri.profiler.records import STAGES
from muri_lab.benchmarks.real_report import Case, Throughput
from muri_lab.benchmarks.runtime_process import MURI_RUN, START_LIMIT_S, BenchmarkError, as_member, start_runtime

WARM_ITERATIONS, LEAST_ITERATIONS = 5, 3
PYTHON = (sys.executable,)


class Alone(NamedTuple):
    """A job alone."""

    iteration_s: float  # Its iteration time
    shares: tuple[float, ...]  # Share of that in which it holds storage, CPU, GPU, network
    cores: float | None = None  # Cores that it keeps busy at that speed; None where not measured


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    data: Path  # Directory of the samples, on a disk
    jobs: Mapping[str, Sequence[str]]  # The script of each job and the arguments that only this job takes
    seconds: float  # Length of the window in which iterations are counted
    start_limit_s: float = START_LIMIT_S  # How long jobs may take until they are at work


class Run:
    """Some jobs at work at once, in a directory of their own."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.folder = folder  # That directory
        self._setting = setting
        self._ids = {job: str(101 + index) for index, job in enumerate(setting.jobs)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.cores_used: dict[str, float] = {}  # cores kept busy by each job and its children in the window
        self.changes: list[tuple[float, str, str]] = []  # seconds into the window, discipline, reason
        self.runtime: subprocess.Popen[bytes] | None = None  # Its process; None without one

    def start_job(self, job: str, prefix: Sequence[str] = PYTHON, **environment: str) -> None:
        """Start one job by `prefix` and its script; its output goes to a file."""
        files = ["--log", str(self.log(job)), "--stop", str(self._stop), "--data", str(self._setting.data)]
        command = [*prefix, *self._setting.jobs[job], *files]
        with (self.folder / f"{job}.out").open("wb") as out:
            variables = os.environ | environment
            # In a session of its own, as Slurm starts each job: the kernel shares the cores among sessions.
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._processes.append(process)
        self._jobs[job] = process

    def start_interleaved(
        self, solo_s: Mapping[str, float], *options: str, discipline: str, isolation: str = "thread"
    ) -> None:
        """Start a runtime with these options, and all jobs as its members."""
        self.serve(solo_s, *options, discipline=discipline, isolation=isolation)
        for job in self._setting.jobs:
            self.start_member(job)

    def serve(self, solo_s: Mapping[str, float], *options: str, discipline: str, isolation: str) -> None:
        """Start a runtime with these options that takes each job as a member."""
        members = [
            {"job_id": job_id, "solo_iteration_s": solo_s.get(job), "isolation": isolation}
            for job, job_id in self._ids.items()
        ]
        group = group_of({"members": members, "discipline": discipline})
        self.runtime = start_runtime(self.folder, group, *options)
        self._processes.append(self.runtime)

    def start_member(self, job: str) -> None:
        """Start one job as a member of the runtime."""
        self.start_job(job, MURI_RUN, **as_member(self.folder, self._ids[job]))

    def member_status(self) -> dict[str, Any]:
        """Each job's part of the runtime's status file."""
        members = self.status()["members"]
        return {job: members[job_id] for job, job_id in self._ids.items()}

    def status(self) -> dict[str, Any]:
        """The runtime's status file; {} without one."""
        path = self.folder / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def process(self, job: str) -> "subprocess.Popen[bytes]":
        """A job's process, or its `muri run`."""
        return self._jobs[job]

    def await_start(self) -> None:
        """Wait until each job has done some iterations."""
        deadline_s = time.monotonic() + self._setting.start_limit_s
        while min(len(self.ends_s(job)) for job in self._jobs) < WARM_ITERATIONS:
            self._check(deadline_s)
            time.sleep(0.1)

    def end(self, *jobs: str) -> None:
        """Let all jobs end, and wait for these, or for all where none is named."""
        self._stop.touch()
        for job in jobs or self._jobs:
            if self.process(job).wait(timeout=60) != 0:
                raise BenchmarkError(f"{job}: {self.output(job)}")

    def measure(self) -> dict[str, float]:
        """Return each job's iterations per second in a window in which all are at work, then end the jobs.

        The window is longer where a job would not complete `LEAST_ITERATIONS` in it.
        """
        self.await_start()
        begin_s, before_s, begin_epoch_s = time.monotonic(), self._cpu_s(), time.time()
        time.sleep(self._setting.seconds)
        deadline_s = time.monotonic() + self._setting.start_limit_s
        while min(sum(at_s >= begin_s for at_s in self.ends_s(job)) for job in self._jobs) < LEAST_ITERATIONS:
            self._check(deadline_s)
            time.sleep(0.1)
        end_s, after_s = time.monotonic(), self._cpu_s()
        self.cores_used = {job: (after_s[job] - before_s[job]) / (end_s - begin_s) for job in self._jobs}
        self._check(end_s + 1.0)
        self.changes = self._changes(begin_epoch_s)
        rates = {job: _rate(self.ends_s(job), begin_s, end_s) for job in self._jobs}
        self.end()
        return rates

    def close(self) -> None:
        """End what still runs."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)  # (nothing where it has ended)
        for process in reversed(self._processes):
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def _stop(self) -> Path:
        return self.folder / "stop"

    def _cpu_s(self) -> dict[str, float]:
        """CPU seconds of each job's processes so far."""
        found = {}
        for job, process in self._jobs.items():
            own = psutil.Process(process.pid)
            times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
            found[job] = sum(each.user + each.system for each in times)
        return found

    def _changes(self, since_s: float) -> list[tuple[float, str, str]]:
        found = self.status().get("disciplines", [])
        return [(round(each["at_s"] - since_s, 1), each["discipline"], each["reason"]) for each in found]

    def log(self, job: str) -> Path:
        """The file to which a job logs its iterations."""
        return self.folder / f"{job}.log"

    def ends_s(self, job: str) -> list[float]:
        """When a job's iterations ended, on the monotonic clock."""
        path = self.log(job)
        return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def _check(self, deadline_s: float) -> None:
        for job, process in self._jobs.items():
            if process.poll() is not None:
                raise BenchmarkError(f"{job} ended too early: {self.output(job)}")
        if time.monotonic() > deadline_s:
            slow = {job: len(self.ends_s(job)) for job in self._jobs}
            raise BenchmarkError(f"the jobs are not fast enough to measure; their iterations so far: {slow}")

    def output(self, name: str) -> str:
        """Return the end of a job's output."""
        return (self.folder / f"{name}.out").read_text()[-2000:]


def _rate(ends_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Iterations per second, from the first end in the window to the last."""
    inside = [at_s for at_s in ends_s if begin_s <= at_s <= end_s]
    if len(inside) < 3:
        return len(inside) / (end_s - begin_s)
    return (len(inside) - 1) / (inside[-1] - inside[0])


@contextmanager
def running(setting: Setting) -> Iterator[Run]:
    """A run in a temporary directory; whatever still runs at the end is ended."""
    with tempfile.TemporaryDirectory(prefix="muri-jobs-") as name:
        run = Run(setting, Path(name))
        try:
            yield run
        finally:
            run.close()


def run_traced(setting: Setting, job: str) -> Alone:
    """Run a job alone and trace its stages."""
    with running(setting) as run:
        trace = run.folder / "trace.json"
        run.start_job(job, MURI_TRACE=str(trace))
        return Alone(1 / run.measure()[job], stage_shares(trace))


def stage_shares(trace: Path) -> tuple[float, ...]:
    """Share of the time in which a job that runs alone holds storage, CPU, GPU, network."""
    (shares,) = shares_of(read_slices(trace)).values()
    return tuple(shares[stage] for stage in STAGES)


def measure_in_turns(
    setting: Setting,
    link: str,
    rounds: int,
    ways: Sequence[str],
    alone: Callable[[Setting, str], Alone],
    together: Callable[[Setting, str, Mapping[str, float]], Mapping[str, float]],
) -> Case:
    """Run each job alone and all of them in all ways, the ways in turn, so that a disturbance hits all alike."""
    found: dict[str, list[Alone]] = {job: [] for job in setting.jobs}
    speeds: dict[str, list[Mapping[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for job in setting.jobs:
            found[job].append(alone(setting, job))
        solo_s = {job: median(each.iteration_s for each in results) for job, results in found.items()}
        for way in ways:
            speeds[way].append(together(setting, way, solo_s))
    shares = {job: tuple(map(mean, zip(*(each.shares for each in found[job]), strict=True))) for job in setting.jobs}
    cores = {job: mean(each.cores or 0.0 for each in found[job]) for job in setting.jobs}
    throughputs = {way: Throughput.of(way, each) for way, each in speeds.items()}
    return Case(link, solo_s, shares, throughputs, cores if all(cores.values()) else {})


def write_random_file(path: Path, size_mib: int) -> None:
    """Random bytes, on the disk when this returns."""
    with path.open("wb") as file:
        for _ in range(size_mib):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())


def shares_of(slices: Sequence[Slice]) -> dict[str, dict[str, float]]:
    """For each member the shares of its time, from its first event to its last, that stages and waits took."""
    shares = {}
    for member in members_of(slices):
        own = [piece for piece in slices if piece.member == member]
        total_s = max(piece.end_s for piece in own) - min(piece.start_s for piece in own)
        shares[member] = {
            what: sum(p.end_s - p.start_s for p in own if p.what == what) / total_s if total_s > 0 else 0.0
            for what in (*STAGES, "wait")
        }
    return shares
