"""A soak: hours of training in minutes, in one runtime, with everything that goes wrong drawn at random.

Short jobs come and go in a group's four places. They, their workers and their `muri run` get signals, are paused,
cancelled and killed. Every loss, with all digits, must be that of the same job alone under plain Python. In the end the
runtime must hold no more threads, files or processes than in the beginning.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from muri.group_spec import GroupSpec, MemberSpec
from muri.launcher.sessions.setup import CANCEL_GRACE_S
from muri_lab.benchmarks.bars import Bar, finish, tell
from muri_lab.benchmarks.interleaving_soak import Held, held
from muri_lab.benchmarks.runtime_process import MURI_RUN, BenchmarkError, as_member, start_runtime

RESULT = Path(__file__).parent / "results" / "soak.json"
JOB = Path(__file__).with_name("soak_job.py")
MEMBERS = ("101", "102", "103", "104")
KINDS = ("stages", "torch", "workers")
MARK = "MURI_SOAK"  # A variable that every process of a soak has, by which those left over are found
ITERATION_STANDS_FOR_S = 1.0  # Seconds of an iteration on a real GPU, to convert iterations to hours of training
POLL_S = 0.05
END_S = 180.0
LEAST_EVENTS = 6  # A soak in which less happens shows nothing: on a busy machine it lasts longer
LAST_EVENT = 0.85  # No event reaches a job that is nearly done: it could be one for an exit that is under way
PAUSE_S = (0.05, 1.5)
JOIN_DELAY_S = (0.0, 2.0)
HANDLED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
WEIGHTS = {"signal": 6, "pause": 4, "cancel": 1, "kill script": 2, "kill worker": 2}


@dataclass(frozen=True, slots=True)
class Kind:
    """A job's computation; two of one kind have the same losses."""

    kind: str
    seed: int
    iterations: int

    def command(self, log: Path) -> list[str]:
        """The job, as after `python`."""
        return [str(JOB), self.kind, str(self.seed), str(self.iterations), str(log)]


@dataclass(slots=True)
class Job:
    """A job at work."""

    kind: Kind
    process: "subprocess.Popen[bytes]"  # Its `muri run`
    log: Path  # Its losses
    expected: set[int] = field(default_factory=lambda: {0})  # Exit codes that it may end with
    paused_until_s: float | None = None  # When it goes on, on the monotonic clock; None when it is not paused

    @property
    def pid(self) -> int | None:
        """Of the script; None before it has written it."""
        lines = self._lines()
        return int(lines[0]) if lines else None

    @property
    def losses(self) -> list[str]:
        """Those written in full."""
        return self._lines()[1:]

    def _lines(self) -> list[str]:
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []


class Soak:
    """A runtime, its jobs and what happens to them."""

    def __init__(self, folder: Path, kinds: Sequence[Kind], seed: int) -> None:
        self._folder, self._kinds = folder, kinds
        self._random = random.Random(seed)
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: str(os.getpid())}
        self._reference = {kind: self._alone(kind) for kind in dict.fromkeys(kinds)}
        self._jobs: dict[str, Job] = {}
        self._next_start_s = dict.fromkeys(MEMBERS, 0.0)
        self._count = 0
        self.events: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.iterations = 0
        self.errors: list[str] = []

    def run(self, seconds: float, events_per_s: float, tell_progress: Callable[[str], None]) -> None:
        """Keep every place busy for so long and until enough has happened to the jobs."""
        begin_s = told_s = time.monotonic()
        next_event_s = begin_s
        while not self.errors and (
            (now_s := time.monotonic()) < begin_s + seconds or self.events.total() < LEAST_EVENTS
        ):
            for member in MEMBERS:
                if member not in self._jobs and now_s >= self._next_start_s[member]:
                    self._start(member, self._random.choice(self._kinds))
            if now_s >= next_event_s:
                self._let_happen()
                next_event_s = now_s + self._random.expovariate(events_per_s)
            self._look_after()
            if now_s > told_s + 60:
                tell_progress(f"soak: {(now_s - begin_s) / 60:.0f} min, {dict(self.ended)}, {dict(self.events)}")
                told_s = now_s
            time.sleep(POLL_S)
        self._finish()

    def warm_up(self) -> None:
        """Jobs of each kind to their end, one in each place: what the first ones leave behind is not a leak."""
        for kind in {kind.kind: kind for kind in self._kinds}.values():
            for member in MEMBERS:
                self._start(member, kind)
            self._finish()

    def _alone(self, kind: Kind) -> list[str]:
        log = self._folder / "alone.log"
        subprocess.run([sys.executable, *kind.command(log)], env=self._environment, check=True)
        return log.read_text().split("\n")[1:-1]

    def _start(self, member: str, kind: Kind) -> None:
        self._count += 1
        log = self._folder / f"{self._count}.log"
        own = as_member(self._folder, member)
        with log.with_suffix(".out").open("wb") as out:
            process = subprocess.Popen(
                [*MURI_RUN, *kind.command(log)], env=self._environment | own, stdin=subprocess.DEVNULL, stdout=out,
                stderr=out,
            )  # fmt: skip
        self._jobs[member] = Job(kind, process, log)

    def _let_happen(self) -> None:
        """One event at one job that trains."""
        jobs = [
            job for job in self._jobs.values() if job.expected == {0} and job.paused_until_s is None
            and 0 < len(job.losses) < LAST_EVENT * job.kind.iterations
        ]  # fmt: skip
        if not jobs:
            return
        job = self._random.choice(jobs)
        event = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        pid = job.pid
        if pid is None or (event == "kill worker" and job.kind.kind != "workers"):
            return
        self.events[event] += 1
        if event == "signal":
            job.process.send_signal(self._random.choice(HANDLED))
        elif event == "pause":
            os.kill(pid, signal.SIGSTOP)
            job.paused_until_s = time.monotonic() + self._random.uniform(*PAUSE_S)
        elif event == "cancel":
            job.expected = {-signal.SIGTERM}
            job.process.terminate()
        elif event == "kill script":
            job.expected = {-signal.SIGKILL}
            job.process.kill()
        else:
            job.expected = {0, 1}  # 0 where its part was done
            os.kill(self._random.choice(psutil.Process(pid).children()).pid, signal.SIGKILL)

    def _look_after(self) -> None:
        """Continue paused jobs; check those that have ended."""
        now_s = time.monotonic()
        for member, job in list(self._jobs.items()):
            if job.paused_until_s is not None and now_s >= job.paused_until_s:
                os.kill(int(job.pid or 0), signal.SIGCONT)
                job.paused_until_s = None
            code = job.process.poll()
            if code is not None:
                self._check(job, code)
                del self._jobs[member]
                self._next_start_s[member] = now_s + self._random.uniform(*JOIN_DELAY_S)

    def _check(self, job: Job, code: int) -> None:
        losses, reference = job.losses, self._reference[job.kind]
        self.iterations += len(losses)
        self.ended["survived" if code == 0 else "killed"] += 1
        output = job.log.with_suffix(".out").read_text()[-600:]
        if code not in job.expected:
            self.errors.append(f"{job.kind} ended with {code}, not {sorted(job.expected)}: {output}")
        elif losses != reference[: len(losses)]:
            first = next(i for i, (a, b) in enumerate(zip(losses, reference, strict=False)) if a != b)
            self.errors.append(f"{job.kind}: loss {first} is {losses[first]}, alone {reference[first]}")
        elif code == 0 and len(losses) != len(reference):
            self.errors.append(f"{job.kind} ended after {len(losses)} of {len(reference)} iterations")

    def _finish(self) -> None:
        """Wait for the last jobs."""
        deadline_s = time.monotonic() + END_S
        while self._jobs and time.monotonic() < deadline_s:
            self._look_after()
            time.sleep(POLL_S)
        for member, job in self._jobs.items():
            self.errors.append(f"member {member}, {job.kind}, did not end; it has {len(job.losses)} losses")
            job.process.kill()
            job.process.wait()


def draw_kinds(kinds: Sequence[str], seeds: int, iterations: int) -> list[Kind]:
    """The jobs of a soak: several seeds and lengths of each kind."""
    return [Kind(kind, seed, iterations * (2 + seed) // 2) for kind in kinds for seed in range(seeds)]


def measure(
    seconds: float, seed: int, kinds: Sequence[Kind], events_per_s: float, tell_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run a soak."""
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name:
        folder = Path(name)
        soak = Soak(folder, kinds, seed)
        group = GroupSpec(members=tuple(map(MemberSpec, MEMBERS)))
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: str(os.getpid())}
        runtime = start_runtime(folder, group, "--preload", "", environment=environment)
        try:
            soak.warm_up()
            before, own = held(runtime.pid), _marked()
            soak.run(seconds, events_per_s, tell_progress)
            left = _left(own)
            after = _settled(runtime.pid, before)
            if runtime.poll() is not None:
                soak.errors.append(f"the runtime ended: {(folder / 'runtime.out').read_text()[-2000:]}")
        finally:
            runtime.send_signal(signal.SIGTERM)
            runtime.wait(timeout=30)
    return {
        "seconds": seconds, "seed": seed, "iterations": soak.iterations,
        "hours_of_training": round(soak.iterations * ITERATION_STANDS_FOR_S / 3600, 2),
        "jobs": dict(soak.ended), "events": dict(soak.events), "errors": soak.errors,
        **_growth(before, after), "processes_left": left,
    }  # fmt: skip


def _growth(before: Held, after: Held) -> dict[str, Any]:
    return {
        "threads": [before.threads, after.threads],
        "files": [before.files, after.files],
        "memory_mib": [round(before.memory_mib, 1), round(after.memory_mib, 1)],
    }


def _settled(pid: int, before: Held) -> Held:
    """What the runtime holds once the timers of the last ends have run out: they are threads."""
    deadline_s = time.monotonic() + CANCEL_GRACE_S + 10.0
    while (after := held(pid)).threads > before.threads and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return after


def _left(own: Mapping[int, str]) -> list[str]:
    """Processes of the soak beside the runtime's own, once they had time to end."""
    deadline_s = time.monotonic() + 10.0
    while (found := [name for pid, name in _marked().items() if pid not in own]) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return found


def _marked() -> dict[int, str]:
    """The soak's processes."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return the bars of a soak."""
    wanted = {
        "errors": len(found["errors"]),
        "more threads": found["threads"][1] - found["threads"][0],
        "more files": found["files"][1] - found["files"][0],
        "processes left": len(found["processes_left"]),
    }
    return [Bar("soak", what, value, "≤ 0", value <= 0) for what, value in wanted.items()]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", default=20.0, show_default=True, help="How long.")
@click.option("--seed", default=1, show_default=True, help="Of all that is drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--write/--no-write", "stored", default=False, help="Keep it in benchmarks/results/soak.json.")
def main(minutes: float, seed: int, as_json: bool, stored: bool) -> None:
    """Train for hours in minutes, with random signals, pauses, joins and kills; exit with 1 if a bar is missed."""
    try:
        kinds = draw_kinds(KINDS, seeds=3, iterations=4000)
        tell(f"soak: the {len(kinds)} kinds of jobs alone, then {minutes:g} minutes")
        found = measure(minutes * 60, seed, kinds, 0.5, tell)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    for error in found["errors"]:
        tell(f"soak: {error}")
    if not as_json:
        tell(json.dumps(found, ensure_ascii=False))
    finish(RESULT, {"soak": found}, bars(found), stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
