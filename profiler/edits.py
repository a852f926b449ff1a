"""Correcting a profile's figures by hand. Pure."""

from dataclasses import dataclass, replace

from muri.errors import UsageError
from muri.profiler.records import STAGES, ProfileDetail, StageProfile


class EditError(UsageError):
    """The figures that were given contradict each other, or there are none."""


@dataclass(frozen=True, slots=True)
class Edit:
    """New figures; None leaves one as it is.

    Attributes:
        load_ms: Milliseconds per iteration that storage owns.
        preprocess_ms: The same of the CPU.
        propagate_ms: The same of the GPU.
        synchronize_ms: The same of the network.
        iteration_ms: Milliseconds of an iteration.
        gpu_mem_gib: Peak GPU memory.
    """

    load_ms: float | None = None
    preprocess_ms: float | None = None
    propagate_ms: float | None = None
    synchronize_ms: float | None = None
    iteration_ms: float | None = None
    gpu_mem_gib: float | None = None

    def times_s(self) -> dict[str, float]:
        """The times that change, by the record's field."""
        given = {name: getattr(self, f"{name}_ms") for name in (*STAGES, "iteration")}
        return {f"{name}_s": value / 1000 for name, value in given.items() if value is not None}


def edited(profile: StageProfile, edit: Edit, now: str) -> StageProfile:
    """The profile with the new figures, its source "edit".

    What else was measured of the times (spread, hidden use, confidence) no longer fits changed ones and is
    dropped.

    Args:
        profile: What is stored.
        edit: What changes.
        now: UTC time, ISO-8601.

    Raises:
        EditError: Nothing changes, or a stage would take longer than its iteration.
        ProfileError: A figure cannot be true.
    """
    times = edit.times_s()
    if not times and edit.gpu_mem_gib is None:
        options = ", ".join(f"--{name}-ms" for name in (*STAGES, "iteration"))
        raise EditError(f"nothing to change; say at least one of {options} and --gpu-mem-gib")
    memory = profile.gpu_mem_gib if edit.gpu_mem_gib is None else edit.gpu_mem_gib
    detail = _without_times(profile.detail) if times else profile.detail
    new = replace(profile, **times, gpu_mem_gib=memory, detail=detail, source="edit", measured_at=now)  # type: ignore[arg-type]
    longest_s = max(new.stage_s)
    if longest_s > new.iteration_s:
        raise EditError(
            f"a stage would take {1000 * longest_s:g} ms of an iteration of {1000 * new.iteration_s:g} ms; "
            "correct the iteration too, with --iteration-ms"
        )
    return new


def _without_times(detail: ProfileDetail) -> ProfileDetail:
    return ProfileDetail(
        host_mem_gib=detail.host_mem_gib,
        cpu_cores=detail.cpu_cores,
        gpu_utilisation=detail.gpu_utilisation,
        gradient_mib=detail.gradient_mib,
    )
