"""From the samples of a dry run to a profile; a pure function, whoever measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from muri.profiler.records import STAGES, ProfileError, ProfileKey, StageProfile


@dataclass(frozen=True, slots=True)
class IterationSample:
    """One measured iteration.

    Attributes:
        stage_s: Seconds per stage, in the order of `STAGES`.
        iteration_s: Wall-clock seconds of the whole iteration.
    """

    stage_s: tuple[float, float, float, float]
    iteration_s: float


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a measurement says beside the times.

    Attributes:
        gpu_mem_gib: Peak GPU memory.
        measured_at: UTC time, ISO-8601.
        source: "dry-run", "import" or "run".
    """

    gpu_mem_gib: float = 0.0
    measured_at: str = ""
    source: str = "dry-run"


NEGLIGIBLE_SHARE = 0.005
"""Share of the iteration below which a stage counts as zero (Muri, section 5: a threshold)."""


def summarise(
    key: ProfileKey,
    samples: Sequence[IterationSample],
    *,
    warmup: int,
    circumstances: Circumstances,
) -> StageProfile:
    """Mean stage times of the iterations after the warm-up.

    The first iterations fill caches, compile kernels and start workers; they say nothing about
    the thousands that follow.

    Args:
        key: What was measured.
        samples: All iterations, in order.
        warmup: How many of the first to leave out.
        circumstances: Memory, time and source.

    Raises:
        ProfileError: Nothing is left after the warm-up, or a sample cannot be true.
    """
    counted = samples[warmup:]
    if warmup < 0 or not counted:
        raise ProfileError(
            f"profile of {key}: {len(samples)} iterations with a warm-up of {warmup} leave none to measure; "
            "the script must run more iterations than the warm-up"
        )
    iteration_s = fmean(sample.iteration_s for sample in counted)
    stage_s = [fmean(sample.stage_s[index] for sample in counted) for index in range(len(STAGES))]
    load_s, preprocess_s, propagate_s, synchronize_s = (
        0.0 if 0 <= value < NEGLIGIBLE_SHARE * iteration_s else value for value in stage_s
    )
    return StageProfile(
        key=key,
        load_s=load_s,
        preprocess_s=preprocess_s,
        propagate_s=propagate_s,
        synchronize_s=synchronize_s,
        iteration_s=iteration_s,
        gpu_mem_gib=circumstances.gpu_mem_gib,
        iterations=len(counted),
        measured_at=circumstances.measured_at,
        source=circumstances.source,
    )
