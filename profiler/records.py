"""The stage profile of a model: how long one iteration holds each resource."""

import math
from dataclasses import dataclass
from typing import Final

from muri.errors import UsageError

STAGES: Final = ("load", "preprocess", "propagate", "synchronize")
"""The stages of one training iteration, in the order in which they happen (Muri, section 2)."""

RESOURCES: Final = ("storage", "cpu", "gpu", "network")
"""The resource that each stage of `STAGES` holds, in the same order."""


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
class StageProfile:
    """Mean stage times of one iteration, running alone.

    Attributes:
        key: What the figures are valid for.
        load_s: Seconds per iteration that hold storage.
        preprocess_s: Seconds per iteration that hold the CPU.
        propagate_s: Seconds per iteration that hold the GPU.
        synchronize_s: Seconds per iteration that hold the network.
        iteration_s: Wall-clock seconds of an iteration; less than the sum of the stages where
            the job overlaps them itself.
        gpu_mem_gib: Peak GPU memory.
        iterations: How many iterations the means are over.
        measured_at: UTC time, ISO-8601.
        source: "dry-run", "import" or "run".
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
    def stage_s(self) -> tuple[float, float, float, float]:
        """Seconds per stage in the order of `STAGES`."""
        return (self.load_s, self.preprocess_s, self.propagate_s, self.synchronize_s)

    @property
    def bottleneck(self) -> str:
        """The resource that the iteration holds longest; the earlier one on a tie."""
        return RESOURCES[max(range(len(STAGES)), key=lambda index: self.stage_s[index])]
