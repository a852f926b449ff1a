"""Messages between a measurement and its script: request, result and progress of a dry run, and iteration log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from muri.errors import UsageError
from muri.profiler.records import STAGES, ProfileDetail, ProfileError, ProfileKey, StageProfile, fault_in

DRY_RUN_VARIABLE: Final = "MURI_DRY_RUN"
DRY_RUN_RESULT_VARIABLE: Final = "MURI_DRY_RUN_RESULT"
DEFAULT_ITERATIONS: Final = 40
DEFAULT_STEADY_S: Final = 60.0
LEAST_CONFIDENCE: Final = 0.1
"""A dry run that is less sure of its means has found nothing to plan with; the default of muri.yaml."""

_OF_SCRIPT: Final = ".found"
_FORMS: Final = (
    "give auto, auto:iterations:seconds (at most so many measured iterations and seconds, for example auto:40:60),"
    " or iterations:warm-up (for example 30:10)"
)
_LIMITS: Final = re.compile(r"auto(?::(?P<most>\d+):(?P<seconds>\d+\.?\d*|\.\d+))?|(?P<all>\d+):(?P<warmup>\d+)")
ITERATION_LOG_VARIABLE: Final = "MURI_ITERATION_LOG"
"""Names the file to which a script that runs alone appends a line for each iteration: when it ended, in seconds of
`time.perf_counter`, which all processes of a node share."""

FULL_MEMORY_VARIABLE: Final = "MURI_FULL_MEMORY"
"""In the Slurm job that it names, `muri.cache` reads a few items again and again, as if all were in memory: for runs
that measure throughput and are thrown away. A job that such a run submits inherits the variable, but has another id: it
must train on all items."""

NO_JOB: Final = "none"
"""Stands for the job's id in it outside of Slurm."""

READS: Final = "reads"
"""Name, in a dry run's result, of what `muri.cache` saw of the dataset."""


class DryRunError(UsageError):
    """A request for a dry run makes no sense."""


@dataclass(frozen=True)
class Limits:
    """How much a dry run may take."""

    iterations: int = DEFAULT_ITERATIONS  # Most iterations that are measured
    steady_s: float = DEFAULT_STEADY_S  # Most seconds of measuring, once the script has warmed up
    # Leave out so many first iterations and measure exactly `iterations`, whatever they look like; None: find out when
    # the script has warmed up, and stop as soon as the means are sure
    fixed_warmup: int | None = None
    time_limit_s: float = 600.0  # Most seconds in all, with start-up and warm-up

    def __post_init__(self) -> None:
        """Refuse limits under which nothing can be measured."""
        if self.iterations < 1:
            raise DryRunError(f"a dry run of {self.iterations} iterations: there must be more iterations than warm-up")
        if not (self.steady_s > 0 and self.time_limit_s > 0):
            raise DryRunError(f"a dry run of {self.steady_s:g} s within {self.time_limit_s:g} s: both must be above 0")

    @property
    def text(self) -> str:
        """The value of MURI_DRY_RUN."""
        if self.fixed_warmup is not None:
            return f"{self.iterations + self.fixed_warmup}:{self.fixed_warmup}"
        return f"auto:{self.iterations}:{self.steady_s:g}"

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Read a value of MURI_DRY_RUN (DryRunError: it is malformed)."""
        found = _LIMITS.fullmatch(text)
        if found is None:
            raise DryRunError(f"{DRY_RUN_VARIABLE}={text!r}: {_FORMS}")
        try:
            if found["all"]:
                warmup = int(found["warmup"])
                return cls(int(found["all"]) - warmup, fixed_warmup=warmup)
            return cls(int(found["most"] or DEFAULT_ITERATIONS), float(found["seconds"] or DEFAULT_STEADY_S))
        except DryRunError as error:
            raise DryRunError(f"{DRY_RUN_VARIABLE}={text!r}: {error}") from error


@dataclass(frozen=True)
class DryRunRequest:
    """What to measure."""

    limits: Limits  # How much it may take
    result_path: Path  # Where the result goes

    @property
    def progress_path(self) -> Path:
        """Where the script reports its progress every second."""
        name = self.result_path.name
        if name.endswith(_OF_SCRIPT):
            name = name[: -len(_OF_SCRIPT)]
        return self.result_path.with_name(f"{name}.progress")

    def for_script(self) -> DryRunRequest:
        """The request to the script's own process, whose result still has to be completed."""
        return replace(self, result_path=self.result_path.with_name(self.result_path.name + _OF_SCRIPT))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> DryRunRequest | None:
        """Read MURI_DRY_RUN and MURI_DRY_RUN_RESULT; None when no dry run is asked for.

        Raises:
            DryRunError: One is malformed or the other is missing.
        """
        text = environment.get(DRY_RUN_VARIABLE)
        if not text:
            return None
        result = environment.get(DRY_RUN_RESULT_VARIABLE)
        if not result:
            raise DryRunError(f"{DRY_RUN_VARIABLE} is set but {DRY_RUN_RESULT_VARIABLE} does not say where to write")
        return cls(Limits.parse(text), Path(result).absolute())

    def environment(self) -> dict[str, str]:
        """The variables that ask a script for this."""
        return {DRY_RUN_VARIABLE: self.limits.text, DRY_RUN_RESULT_VARIABLE: str(self.result_path)}


@dataclass(frozen=True)
class DryRunResult:
    """The figures of a profile, whatever its key will be."""

    # Mean seconds per iteration that each stage's resource owns, in the order of `STAGES`
    stage_s: tuple[float, float, float, float]
    iteration_s: float  # Mean wall-clock seconds of an iteration
    gpu_mem_gib: float = 0.0  # Peak GPU memory
    iterations: int = 0  # Measured iterations
    detail: ProfileDetail = field(default_factory=ProfileDetail)  # What else was measured
    stopped: str = ""  # Why the dry run ended; the rest of a sentence that begins with "stopped: "

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give."""
        if fault := fault_in(self.stage_s, self.iteration_s, self.gpu_mem_gib, self.iterations):
            raise ProfileError(f"a dry run's result: {fault}")

    def profile(self, key: ProfileKey, measured_at: str, source: str = "dry-run") -> StageProfile:
        """The profile of a key (ProfileError: a figure cannot be true)."""
        figures = (*self.stage_s, self.iteration_s, self.gpu_mem_gib, self.iterations)
        return StageProfile(key, *figures, measured_at=measured_at, source=source, detail=self.detail)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values: the fields of a `StageProfile`, and why it stopped."""
        stages = {f"{name}_s": value for name, value in zip(STAGES, self.stage_s)}
        rest = {"iteration_s": self.iteration_s, "gpu_mem_gib": self.gpu_mem_gib, "iterations": self.iterations}
        return {**stages, **rest, "detail": self.detail.to_dict(), "stopped": self.stopped}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DryRunResult:
        """Read what `to_dict` made.

        Raises:
            KeyError: A stage or the iteration is missing.
            TypeError: A figure is not a number.
            ValueError: A figure is not a number.
            ProfileError: A figure cannot be true.
        """
        detail = values.get("detail")
        load_s, preprocess_s, propagate_s, synchronize_s = (float(values[f"{name}_s"]) for name in STAGES)
        return cls(
            stage_s=(load_s, preprocess_s, propagate_s, synchronize_s),
            iteration_s=float(values["iteration_s"]),
            gpu_mem_gib=float(values.get("gpu_mem_gib", 0.0)),
            iterations=int(values.get("iterations", 0)),
            detail=ProfileDetail.from_dict(detail) if isinstance(detail, Mapping) else ProfileDetail(),
            stopped=str(values.get("stopped", "")),
        )


class StampReader:
    """Reads the iteration log of a script that goes on appending to it.

    Attributes:
        stamps_s: All ends of iterations so far, in order.
    """

    def __init__(self, path: Path) -> None:
        self.stamps_s: list[float] = []
        self._path = path
        self._offset = 0

    def read(self) -> list[float]:
        """Read on; returns all stamps so far. A line that is still being written is left for the next time."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                text = stream.read()
        except FileNotFoundError:
            return self.stamps_s
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.stamps_s.extend(float(line) for line in whole.split())
        return self.stamps_s
