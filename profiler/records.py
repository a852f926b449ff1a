"""The stage profile of a model: how long one iteration holds each resource."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from muri.errors import UsageError

STAGES: Final = ("load", "preprocess", "propagate", "synchronize")
"""The stages of one training iteration, in the order in which they happen (Muri, section 2)."""

RESOURCES: Final = ("storage", "cpu", "gpu", "network")
"""The resource that each stage of `STAGES` holds, in the same order."""

SOURCES: Final = ("dry-run", "run", "import", "edit", "scaled", "predicted")
"""Measured in a dry run or in a real run, read from a file, typed in; estimated from another GPU count or from
the model's graph."""

ESTIMATES: Final = frozenset({"scaled", "predicted"})
"""Sources that measure nothing: such a profile serves until there is a measured one."""


class ProfileError(UsageError):
    """A profile holds a figure that cannot be true."""


@dataclass(frozen=True, slots=True, order=True)
class ProfileKey:
    """What a profile is valid for.

    Attributes:
        model: Model name as given with `--muri=model=…`, or a name derived from the job's script.
        batch_size: Samples per iteration and GPU; 0 when the user did not say.
        gpu_count: GPUs of the whole job.
        gpu_type: GRES type as Slurm names it, "gpu" when the cluster has no types.
    """

    model: str
    batch_size: int
    gpu_count: int
    gpu_type: str

    def __str__(self) -> str:
        """Compact form for tables and logs."""
        return f"{self.model} (batch {self.batch_size or '?'}, {self.gpu_count} × {self.gpu_type})"


@dataclass(frozen=True, slots=True)
class ProfileDetail:
    """What a measurement says beside the mean stage times; None where it was not measured.

    Attributes:
        stage_p95_s: 95th percentile of each stage's seconds per iteration, in the order of `STAGES`.
        stage_cv: Coefficient of variation (standard deviation / mean) of each stage.
        busy_s: Seconds per iteration in which each resource was used, also where another one owned
            the time; `StageProfile.stage_s` counts only what the stage owns (Muri, section 4.2).
        iteration_p95_s: 95th percentile of the iteration.
        iteration_cv: Coefficient of variation of the iteration.
        host_mem_gib: Peak host memory of all processes of the job.
        cpu_cores: Mean number of cores in use.
        gpu_utilisation: Mean GPU utilisation, 0 to 1.
        gradient_mib: Size of the gradients that the ranks exchange in an iteration.
        confidence: How far the means can be trusted, 0 to 1 (docs/profiles.md).
        warmup_iterations: Iterations that were left out.
    """

    stage_p95_s: tuple[float, ...] | None = None
    stage_cv: tuple[float, ...] | None = None
    busy_s: tuple[float, ...] | None = None
    iteration_p95_s: float | None = None
    iteration_cv: float | None = None
    host_mem_gib: float | None = None
    cpu_cores: float | None = None
    gpu_utilisation: float | None = None
    gradient_mib: float | None = None
    confidence: float | None = None
    warmup_iterations: int | None = None

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give.

        Raises:
            ProfileError: A figure is negative, not finite or, where it is a share, above 1.
        """
        for name, figures in self.figures():
            if len(figures) != (len(STAGES) if name in PER_STAGE else 1):
                raise ProfileError(f"{name}: there must be one figure per stage, found {len(figures)}")
            if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
                raise ProfileError(f"{name} is {figures}; it must be ≥ 0")
            if name in SHARES and figures[0] > 1:
                raise ProfileError(f"{name} is {figures[0]}; it must be between 0 and 1")

    def figures(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """Names and values of what was measured."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return tuple(
            (name, value if isinstance(value, tuple) else (value,)) for name, value in values if value is not None
        )

    def to_dict(self) -> dict[str, Any]:
        """What was measured, as plain JSON values."""
        return {name: list(value) if name in PER_STAGE else value[0] for name, value in self.figures()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` made; figures of a newer version are ignored.

        Raises:
            ProfileError: A figure cannot be true.
        """
        known: dict[str, Any] = {}
        try:
            for item in fields(cls):
                if (value := values.get(item.name)) is not None:
                    known[item.name] = tuple(value) if item.name in PER_STAGE else value
            return cls(**known)
        except TypeError as error:
            raise ProfileError(f"the details of a profile are no numbers: {error}") from error


PER_STAGE: Final = frozenset({"stage_p95_s", "stage_cv", "busy_s"})
"""Details with one figure for each stage."""

SHARES: Final = frozenset({"gpu_utilisation", "confidence"})
"""Details between 0 and 1."""

WHOLE: Final = frozenset({"warmup_iterations"})
"""Details that count something."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """Mean stage times of one iteration, running alone.

    Attributes:
        key: What the figures are valid for.
        load_s: Seconds per iteration that storage owns.
        preprocess_s: Seconds per iteration that the CPU owns.
        propagate_s: Seconds per iteration that the GPU owns.
        synchronize_s: Seconds per iteration that the network owns.
        iteration_s: Wall-clock seconds of an iteration; less than the sum of the stages where
            the job overlaps them itself and the source did not say which one owns the time.
        gpu_mem_gib: Peak GPU memory.
        iterations: How many iterations the means are over.
        measured_at: UTC time, ISO-8601.
        source: How the figures came about, one of `SOURCES`.
        detail: What else was measured.
    """

    key: ProfileKey
    load_s: float
    preprocess_s: float
    propagate_s: float
    synchronize_s: float
    iteration_s: float
    gpu_mem_gib: float = 0.0
    iterations: int = 0
    measured_at: str = ""
    source: str = "dry-run"
    detail: ProfileDetail = field(default_factory=ProfileDetail)

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give.

        Raises:
            ProfileError: A time is negative or not finite, or the iteration takes no time.
        """
        for stage, value in zip(STAGES, self.stage_s, strict=True):
            if not math.isfinite(value) or value < 0:
                raise ProfileError(f"profile of {self.key}: {stage} time is {value}; it must be ≥ 0 s")
        if not math.isfinite(self.iteration_s) or self.iteration_s <= 0:
            raise ProfileError(f"profile of {self.key}: iteration time {self.iteration_s} s must be > 0")
        if not math.isfinite(self.gpu_mem_gib) or self.gpu_mem_gib < 0:
            raise ProfileError(f"profile of {self.key}: GPU memory is {self.gpu_mem_gib} GiB; it must be ≥ 0")

    @property
    def is_estimate(self) -> bool:
        """Whether nothing of it was measured under its key."""
        return self.source in ESTIMATES

    @property
    def stage_s(self) -> tuple[float, float, float, float]:
        """Seconds per stage in the order of `STAGES`."""
        return (self.load_s, self.preprocess_s, self.propagate_s, self.synchronize_s)

    @property
    def bottleneck(self) -> str:
        """The resource that the iteration holds longest; the earlier one on a tie."""
        return RESOURCES[max(range(len(STAGES)), key=lambda index: self.stage_s[index])]
