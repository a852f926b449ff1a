"""Starts real runtimes and real `muri run` processes, each in a run directory of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from group_words import runtime_words
from polling import DEADLINE_S, until
from warm_start import ONE_THREAD, WarmProcess, starts_warm, warm_start

from muri.launcher.protocol import NO_JOB

FOREIGN_VARIABLES = (
    "SLURM_JOB_ID", "MURI_JOB", "MURI_PILOT", "MURI_TIMING", "MURI_TRACE", "MURI_DRY_RUN", "CUDA_VISIBLE_DEVICES",
    "PYTHONUNBUFFERED",  # scripts' workers would write one line's words in turns, as under plain Python
)  # fmt: skip


LOOP = """
    import os, sys, time
    import muri
    print("started", os.getpid(), flush=True)
    for step in muri.batches(range(int(sys.argv[1]))):
        for name in ("preprocess", "propagate", "synchronize"):
            with muri.stage(name):
                time.sleep(0.002)
    print("finished")
"""
"""A script of so many iterations as its first argument says."""

MURI = (sys.executable, "-c", "from muri.cli import main; main()")

Process = subprocess.Popen[bytes] | WarmProcess


def ends(process: Process) -> int:
    """The exit code of a process that should end by itself."""
    return process.wait(timeout=DEADLINE_S)


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Launcher:
    """A run directory, runtimes that serve it, and members.

    Attributes:
        warm: Runtimes and members start with PyTorch loaded; not where a test is about their start.
        grant: What the SPANK plugin sets in members; empty before the first runtime.
    """

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.folder, self.run_dir = folder, run_dir
        self.status_path = folder / "status.json"
        self.processes: list[Process] = []
        self.warm = True
        self.grant: dict[str, str] = {}
        self.environment = {k: v for k, v in os.environ.items() if k not in FOREIGN_VARIABLES}
        self.environment |= ONE_THREAD | {"MURI_RUN_DIR": str(run_dir)}

    def script(self, text: str, name: str = "train.py", folder: str = ".") -> Path:
        """Write a training script."""
        path = self.folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def runtime(self, *members: str, options: tuple[str, ...] = ()) -> Process:
        """Start a runtime and wait until it takes members."""
        command = [sys.executable, "-m", "muri.launcher.runtime.main", "--preload", ""]
        command += ["--status-file", str(self.status_path), *runtime_words(members, options)]
        self.give_grant()
        process = self.spawn(command, self.environment, stderr=(self.folder / "runtime.log").open("wb"))
        until(lambda: process.poll() is not None or self._serves(process.pid), "the runtime")
        assert process.poll() is None, (self.folder / "runtime.log").read_text()
        return process

    def give_grant(self) -> None:
        """Let members from now on find the runtime, as Slurm's plugin would."""
        self.grant = {"MURI_PILOT": self.environment.get("SLURM_JOB_ID", NO_JOB)}

    def threads(self, *members: str, options: tuple[str, ...] = ()) -> Process:
        """Start a runtime whose members are threads."""
        return self.runtime(*members, options=("--isolation", "thread", *options))

    def _serves(self, pid: int) -> bool:
        return self.status_path.exists() and self.status()["pid"] == pid

    def member(
        self,
        job_id: str | None,
        *arguments: object,
        command: Sequence[str] = (*MURI, "run"),
        cwd: Path | None = None,
        into: str | None = None,
        **environment: str,
    ) -> Process:
        """Start `muri run …` as the job would; its output goes to out() and err() of the job, or of a name."""
        variables = self.environment | ({"SLURM_JOB_ID": job_id} | self.grant if job_id else {}) | environment
        return self.start(into or job_id, [*command, *arguments], variables, cwd)

    def ran(self, job_id: str | None, *arguments: object, code: int = 0, **environment: str) -> str:
        """Run `muri run …` as the job would until it ends with that exit code; returns all of its output."""
        assert ends(self.member(job_id, *arguments, **environment)) == code, self.err(job_id)
        return self.out(job_id)

    def start(
        self, name: str | None, command: list[object], environment: dict[str, str], cwd: Path | None = None
    ) -> Process:
        """Start a command; its output goes to out() and err() of that name."""
        out, err = self.path(name, "out").open("ab"), self.path(name, "err").open("ab")
        return self.spawn([*map(str, command)], environment, stdout=out, stderr=err, cwd=cwd or self.folder)

    def dry_run(self, limits: str, *arguments: object, **environment: str) -> tuple[int, dict]:
        """Measure a script that runs alone; returns its exit code and the result, or {} where it left none."""
        result = self.folder / "result.json"
        asked = {"MURI_DRY_RUN": limits, "MURI_DRY_RUN_RESULT": str(result)}
        code = ends(self.member(None, *arguments, **asked, **environment))
        return code, json.loads(result.read_text()) if result.exists() else {}

    def path(self, job_id: str | None, kind: str) -> Path:
        """Where a member's output goes."""
        return self.folder / f"{job_id or 'solo'}.{kind}"

    def out(self, job_id: str | None) -> str:
        """A member's standard output so far."""
        return self.path(job_id, "out").read_text()

    def says(self, job_id: str, word: str = "started") -> str:
        """Wait until a member's output has a line with a word; returns the line."""
        until(lambda: word in self.out(job_id) and self.out(job_id).endswith("\n"), f"{word!r} of {job_id}")
        return next(line for line in self.out(job_id).splitlines() if word in line)

    def err(self, job_id: str | None) -> str:
        """A member's standard error so far."""
        return self.path(job_id, "err").read_text()

    def status(self) -> dict:
        """The runtime's status file."""
        return json.loads(self.status_path.read_text())

    def spawn(self, command: list[str], environment: dict[str, str], **options) -> Process:
        """Start a process that ends with the test; its files are closed here."""
        if self.warm and starts_warm(environment):
            process: Process = warm_start().popen(command, env=environment, **options)
        else:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **options)
        self.processes.append(process)
        for stream in ("stdout", "stderr"):
            if stream in options:
                options[stream].close()
        return process

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=DEADLINE_S)


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder whose path leaves room for a socket's name, unlike pytest's own."""
    return tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp")


@contextmanager
def launcher_in(folder: Path) -> Iterator[Launcher]:
    """A launcher with its files in a folder, but for its run directory."""
    with short_folder() as run_dir:
        launcher = Launcher(folder, Path(run_dir))
        try:
            yield launcher
        finally:
            launcher.close()
