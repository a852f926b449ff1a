"""What all parts of the check share: their sizes, their jobs, and the file that each writes."""

import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muri.files import atomic_json
from muri_lab.benchmarks.job_runs import Run, Setting
from muri_lab.benchmarks.runtime_process import BenchmarkError

JOBS = Path(__file__).resolve().parents[1] / "gpu_jobs"
DETERMINISTIC = ("--preload", "torch,muri_lab.benchmarks.gpu_jobs.deterministic")  # Options of a runtime
MODELS = ("resnet18", "gpt2", "a2c", "vgg16")  # Bound by storage, GPU, CPU and the exchange of gradients, in this order
START_LIMIT_S = 40.0
PART_LIMIT_S = 90.0
SMOKE_LIMIT_S = 600.0  # Where no GPU is paid for, nothing is hurried
FAILURES = (BenchmarkError, OSError, subprocess.SubprocessError)
"""Exceptions of a single measurement, which leave the others valid."""


@dataclass(frozen=True)
class Check:
    """One run of the check."""

    out: Path  # Where the results go
    data: Path  # Where the samples are
    smoke: bool  # Everything in tiny sizes on the CPU, with two members in place of four
    head: Mapping[str, Any] = field(default_factory=dict)  # What each result begins with: machine, GPU, commit, time

    @property
    def models(self) -> tuple[str, ...]:
        """Models with different bottlenecks."""
        return MODELS[::3] if self.smoke else MODELS

    @property
    def window_s(self) -> float:
        """For how long iterations are counted."""
        return 0.3 if self.smoke else 2.5

    @property
    def device(self) -> tuple[str, ...]:
        """Options of a job that say where it runs."""
        return ("--device", "cpu") if self.smoke else ()

    @property
    def start_limit_s(self) -> float:
        """How long jobs may take until they are at work: where they do not start, a part must not lose all its time."""
        return SMOKE_LIMIT_S if self.smoke else START_LIMIT_S

    @property
    def part_limit_s(self) -> float:
        """How long a part may take."""
        return SMOKE_LIMIT_S if self.smoke else PART_LIMIT_S

    def job(self, *words: str) -> tuple[str, ...]:
        """The script that trains, for these models and with these options."""
        return (str(JOBS / "train.py"), *words, *self.device, *(("--tiny",) if self.smoke else ()))

    def setting(self, jobs: Mapping[str, tuple[str, ...]], seconds: float | None = None) -> Setting:
        """Jobs that run at once, counted for a window of `seconds`."""
        return Setting(self.data, jobs, self.window_s if seconds is None else seconds, self.start_limit_s)

    def path(self, name: str) -> Path:
        """The file of a result."""
        return self.out / f"gpu-{name}.json"

    def earlier(self, name: str) -> dict[str, Any]:
        """What another part of this run has found so far; {} for nothing."""
        path = self.path(name)
        found = dict(json.loads(path.read_text())) if path.exists() else {}
        return found if found.get("begun") == self.head.get("begun") else {}

    def alone(self) -> dict[str, Any]:
        """What the part `stages` has found of each model alone."""
        found = self.earlier("stages").get("alone")
        if not found:
            raise BenchmarkError("the part `stages` has to be run before: it measures each model alone")
        return dict(found)


class Figures:
    """What some parts have found: a file that is complete after each addition."""

    def __init__(self, check: Check, name: str) -> None:
        self._check, self._name = check, name
        self.failed = False  # Whether something could not be measured

    def add_measured(self, name: str, measure: Callable[[], object]) -> None:
        """Note what is measured, or why it cannot be: what else a part measures does not depend on it."""
        try:
            self.add(name, measure())
        except FAILURES as error:
            self.failed = True
            self.add(f"failed: {name}", str(error)[-1000:])

    def add(self, name: str, value: object) -> None:
        """Note something and write the file."""
        folder = os.open(self._check.out, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two parts may share a file
            found = {**self._check.head, **self._check.earlier(self._name), name: value}
            atomic_json(self._check.path(self._name), found, 0o644, indent=1)
        finally:
            os.close(folder)


def report(run: Run, job: str) -> dict[str, Any]:
    """Return a job's report of its models."""
    path = run.log(job).with_suffix(".json")
    if not path.exists():
        raise BenchmarkError(f"{job} has told nothing: {run.output(job)}")
    return dict(json.loads(path.read_text()))


def only(report_of_models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of a job's only model."""
    (found,) = report_of_models.values()
    return dict(found)
