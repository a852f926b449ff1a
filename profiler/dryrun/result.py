"""What a dry run found out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muri.profiler.records import STAGES, ProfileDetail, ProfileKey, StageProfile


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The figures of a profile, whatever its key will be.

    Attributes:
        stage_s: Mean seconds per iteration that each stage's resource owns, in the order of `STAGES`.
        iteration_s: Mean wall-clock seconds of an iteration.
        gpu_mem_gib: Peak GPU memory.
        iterations: Measured iterations.
        detail: What else was measured.
        stopped: Why the dry run ended, as a sentence goes on after "stopped: ".
    """

    stage_s: tuple[float, float, float, float]
    iteration_s: float
    gpu_mem_gib: float = 0.0
    iterations: int = 0
    detail: ProfileDetail = field(default_factory=ProfileDetail)
    stopped: str = ""

    def profile(self, key: ProfileKey, measured_at: str) -> StageProfile:
        """The profile of a key.

        Args:
            key: What was measured.
            measured_at: UTC time, ISO-8601.

        Raises:
            ProfileError: A figure cannot be true.
        """
        figures = (*self.stage_s, self.iteration_s, self.gpu_mem_gib, self.iterations)
        return StageProfile(key, *figures, measured_at=measured_at, source="dry-run", detail=self.detail)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values: the fields of a `StageProfile`, and why it stopped."""
        stages = {f"{name}_s": value for name, value in zip(STAGES, self.stage_s, strict=True)}
        rest = {"iteration_s": self.iteration_s, "gpu_mem_gib": self.gpu_mem_gib, "iterations": self.iterations}
        return {**stages, **rest, "detail": self.detail.to_dict(), "stopped": self.stopped}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DryRunResult":
        """Read what `to_dict` made.

        Raises:
            KeyError: A stage or the iteration is missing.
            TypeError: A figure is no number.
            ValueError: A figure is no number.
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
