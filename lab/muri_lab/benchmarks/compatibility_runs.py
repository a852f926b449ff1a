"""Runs the scripts of benchmarks/compatibility_scripts.py: alone with plain Python, alone and in groups under Muri."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from muri.group_spec import GroupSpec, MemberSpec
from muri.profiler.dryrun.messages import DRY_RUN_RESULT_VARIABLE, DRY_RUN_VARIABLE, Limits
from muri.pythons import PYTHON_VARIABLE, of_members
from muri_lab.benchmarks.compatibility_observation import Observation, files_of, observe, written
from muri_lab.benchmarks.compatibility_scripts import Script
from muri_lab.benchmarks.runtime_process import MURI_RUN, BenchmarkError, as_member, start_runtime

HERE = Path(__file__).parent
DRIVER = HERE / "compatibility_driver"
LIMIT_S = 420.0  # A run that takes longer has hung: alone on one of two cores each script takes a minute at most
LOOK_S = 0.1
END_S = 20.0
SMALLEST_GROUP, LARGEST_GROUP = 2, 4

_VARIABLES = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}  # fmt: skip
_KEPT = ("PATH", "LANG", "LC_ALL", "USER", "LOGNAME", "SHELL", "TERM", "SSL_CERT_FILE")


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything lies."""

    repositories: Path  # FOLDER/owner/name
    python: Path  # The scripts' own Python
    cache: Path  # What is made: prepared scripts, runs, results


def job_of(script: Script) -> str:
    """A script's job id, alone as in a group: some write it into files."""
    return str(zlib.crc32(script.name.encode()))


class Workshop:
    """Prepares scripts and runs them; a script is at work once at a time, for it always runs in the same folder."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._files: dict[str, dict[str, str]] = {}
        self._making = Lock()

    def prepare(self, script: Script) -> None:
        """Copy a script from its repository, and make its data, unless that was done."""
        folder = self._prepared(script)
        stamp = folder.with_suffix(".stamp")
        if not stamp.exists() or stamp.read_text() != self.stamp(script):
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "src").mkdir(parents=True)
            self._copy(script, folder)
            for kind, where in script.data:
                with self._making:
                    data = self._data(kind)
                shutil.copytree(data, folder / where, dirs_exist_ok=True)
            stamp.write_text(self.stamp(script))
        self._files[script.name] = files_of(folder)

    def stamp(self, script: Script) -> str:
        """What changes when a script, its data or its repository does."""
        text = f"{script} {self.version(script)} {(HERE / 'compatibility_data.py').read_text()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def version(self, script: Script) -> str:
        """The commit or the version that it comes from."""
        if script.from_repository:
            command = ["git", "-C", str(self._repository(script)), "rev-parse", "--short=10", "HEAD"]
        else:
            code = f"from importlib.metadata import version; print(version({script.source!r}))"
            command = [str(self._place.python), "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"{script.name}: {script.source} is not there: {done.stderr.strip()[-300:]}")
        return done.stdout.strip()

    def run_alone(self, script: Script, prefix: Sequence[str]) -> Observation:
        """Run a script by itself: `prefix` stands before it and its arguments."""
        run = self._start(script, prefix, {"SLURM_JOB_ID": job_of(script)})
        return self._end(run, self._await([run]))

    def dry_run(self, script: Script) -> dict[str, Any]:
        """Return a dry run's findings, or its `error`."""
        result = self._place.cache / "dry_runs" / f"{script.name}.json"
        result.parent.mkdir(exist_ok=True)
        result.unlink(missing_ok=True)
        limits = {DRY_RUN_VARIABLE: Limits().text, DRY_RUN_RESULT_VARIABLE: str(result)}
        run = self._start(script, (*MURI_RUN, "--no-attach"), {"SLURM_JOB_ID": job_of(script)} | limits)
        self._await([run])
        return dict(json.loads(result.read_text())) if result.exists() else {"error": "the dry run left no result"}

    def run_group(self, scripts: Sequence[Script], isolation: str) -> dict[str, Observation]:
        """Run scripts as members of one group in a real runtime."""
        members = {job_of(script): script for script in scripts}
        kind: Literal["process", "thread"] = "thread" if isolation == "thread" else "process"
        group = GroupSpec(members=tuple(MemberSpec(job, isolation=kind) for job in members))
        with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name:
            folder = Path(name)
            environment = of_members(self._environment())
            runtime = start_runtime(folder, group, environment=environment, python=str(self._place.python))
            try:
                runs = [self._start(script, MURI_RUN, as_member(folder, job)) for job, script in members.items()]
                codes = self._await(runs)
                found = {run.script.name: self._end(run, codes) for run in runs}
            finally:
                runtime.send_signal(signal.SIGTERM)
                try:
                    runtime.wait(END_S)
                except subprocess.TimeoutExpired:
                    runtime.kill()
                    runtime.wait()
            told = json.loads((folder / "status.json").read_text())["members"]
        for job, script in members.items():
            if found[script.name].exit_code == 0 and not told[job]["sessions"]:
                raise BenchmarkError(f"{script.name} ran outside of its group: this compares it with itself alone")
        return found

    def _start(self, script: Script, prefix: Sequence[str], own: Mapping[str, str]) -> "_Run":
        work, streams = self._work(script), self._place.cache / "streams" / script.name
        for folder in (work, streams):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._prepared(script), work, symlinks=True)
        (streams / "log").mkdir(parents=True)
        (work / "home").mkdir(exist_ok=True)
        packages = self._place.python.parents[1]
        command = [packages / word if word.startswith("bin/") else word for word in script.command]
        places = {"HOME": str(work / "home"), "COMPATIBILITY_LOG": str(streams / "log")}
        of_script = {name: value.format(src=work / "src") for name, value in script.environment.items()}
        environment = self._environment() | own | places | of_script
        with (streams / "out").open("wb") as out_file, (streams / "err").open("wb") as err_file:
            process = subprocess.Popen(
                [*prefix, *map(str, command)], cwd=work / script.cwd, env=environment, stdin=subprocess.DEVNULL,
                stdout=out_file, stderr=err_file, start_new_session=True,
            )  # fmt: skip
        return _Run(script, process, streams)

    def _await(self, runs: Sequence["_Run"]) -> dict[str, int | None]:
        waited_s = 0.0
        while waited_s < LIMIT_S and any(run.process.poll() is None for run in runs):
            time.sleep(LOOK_S)
            waited_s += LOOK_S  # not by the clock: all of it may have been stopped for a while
        codes = {run.script.name: run.process.poll() for run in runs}
        for run in runs:
            if codes[run.script.name] is None:
                run.process.terminate()
                try:
                    run.process.wait(END_S)
                except subprocess.TimeoutExpired:
                    os.killpg(run.process.pid, signal.SIGKILL)
                    run.process.wait()
        return codes

    def _end(self, run: "_Run", codes: Mapping[str, int | None]) -> Observation:
        name = run.script.name
        files = written(self._files[name], files_of(self._work(run.script)))
        return observe(codes[name], run.streams / "log", files, run.streams / "out", run.streams / "err")

    def _environment(self) -> dict[str, str]:
        own = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return own | _VARIABLES | {"PYTHONPATH": str(DRIVER), PYTHON_VARIABLE: str(self._place.python)}

    def _copy(self, script: Script, folder: Path) -> None:
        for source, where in script.copies.items():
            origin = self._repository(script) / source
            if not origin.exists():
                raise BenchmarkError(f"{script.name}: {origin} is not there")
            target = folder / where / origin.name if where.endswith("/") else folder / where
            target.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_dir():
                shutil.copytree(origin, target, dirs_exist_ok=True)
            else:
                shutil.copy(origin, target)
        for where, text in script.texts.items():
            (folder / where).parent.mkdir(parents=True, exist_ok=True)
            (folder / where).write_text(text)
        for edit in script.edits:
            path = folder / "src" / edit.file
            text = path.read_text()
            if edit.old not in text:
                raise BenchmarkError(f"{script.name}: {edit.file} has no {edit.old!r}: another version?")
            path.write_text(text.replace(edit.old, edit.new, 1))

    def _data(self, kind: str) -> Path:
        """Data of a kind, made once."""
        maker = HERE / "compatibility_data.py"
        folder = self._place.cache / "data" / f"{kind}-{hashlib.sha256(maker.read_bytes()).hexdigest()[:12]}"
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            command = [self._place.python, maker, kind, part]
            done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise BenchmarkError(f"data {kind}: {done.stderr[-1000:]}")
            part.rename(folder)
        return folder

    def _repository(self, script: Script) -> Path:
        return self._place.repositories / script.source

    def _prepared(self, script: Script) -> Path:
        return self._place.cache / "prepared" / script.name

    def _work(self, script: Script) -> Path:
        return self._place.cache / "work" / script.name


@dataclass(frozen=True, slots=True)
class _Run:
    """A script at work."""

    script: Script
    process: "subprocess.Popen[bytes]"
    streams: Path  # Its `out` and `err`, and the folder `log`


def draw_groups(names: Sequence[str], rounds: int, seed: int) -> list[list[tuple[str, ...]]]:
    """Rounds of groups of two to four, each name once in every round and, as far as can be, beside others each time."""
    generator = random.Random(seed)
    met: set[frozenset[str]] = set()
    groups: list[list[tuple[str, ...]]] = []
    for _ in range(rounds):
        drawings = [_draw_round(list(names), generator) for _ in range(200)]
        best = min(drawings, key=lambda drawing: len(_pairs(drawing) & met))
        met |= _pairs(best)
        groups.append(best)
    return groups


def _draw_round(names: list[str], generator: random.Random) -> list[tuple[str, ...]]:
    generator.shuffle(names)
    drawn: list[tuple[str, ...]] = []
    while names:
        sizes = [size for size in range(SMALLEST_GROUP, LARGEST_GROUP + 1) if len(names) - size != 1]
        size = generator.choice([size for size in sizes if size <= len(names)] or [len(names)])
        drawn.append(tuple(names[:size]))
        names = names[size:]
    return drawn


def _pairs(groups: Sequence[tuple[str, ...]]) -> set[frozenset[str]]:
    return {frozenset(pair) for group in groups for pair in combinations(group, 2)}
