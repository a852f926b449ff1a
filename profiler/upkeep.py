"""Upkeep of stored profiles: what running jobs report, stale marks, corrections by hand, and their audit."""

import os
import pwd
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from muri.errors import UsageError
from muri.profiler import figures
from muri.profiler.records import STAGES, ProfileDetail, ProfileError, ProfileKey, StageProfile

DRIFT: Final = "drift"
"""The `who` of marks that the controller sets because live figures moved away; no user name, see `user_name`."""


class EditError(UsageError):
    """The new figures contradict each other, or none is given."""


class Author(NamedTuple):
    """Who changes the store, and when.

    Attributes:
        who: User name, or `DRIFT`.
        at: UTC time, ISO-8601.
        action: The verb of the command: "edit", "rm", "import", "stale", "clear", "publish", "unpublish".
    """

    who: str
    at: str
    action: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What a running job reported of its iterations.

    Attributes:
        observed_at: UTC time, ISO-8601.
        job_id: The job.
        iterations: Iterations that it had done by then.
        stage_s: Seconds per iteration lately in which it used each resource, waits left out, in the
            order of `STAGES`.
        gpu_mem_gib: GPU memory of its processes then; None where nobody looked.
    """

    observed_at: str
    job_id: int
    iterations: int
    stage_s: tuple[float, ...]
    gpu_mem_gib: float | None = None

    def __post_init__(self) -> None:
        """Refuse figures that no job reports.

        Raises:
            ProfileError: A figure is outside of what `muri.profiler.figures` allows.
        """
        checks: list[tuple[figures.Bounds, float]] = [(figures.ITERATIONS, self.iterations)]
        checks += [(figures.TIME_S, value) for value in self.stage_s]
        checks += [(figures.GPU_MEM_GIB, self.gpu_mem_gib)] if self.gpu_mem_gib is not None else []
        for bounds, value in checks:
            if fault := bounds.fault(value):
                raise ProfileError(f"a report of job {self.job_id} {fault}")


@dataclass(frozen=True, slots=True)
class StaleMark:
    """A profile that is to be measured again; it serves planning until then.

    Attributes:
        key: Which one.
        since: UTC time, ISO-8601.
        reason: Why, for people.
        who: User name, or `DRIFT`.
    """

    key: ProfileKey
    since: str
    reason: str
    who: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change made by hand, or a mark.

    Attributes:
        at: UTC time, ISO-8601.
        who: User name, or `DRIFT`.
        action: The verb.
        key: What was changed.
        before: Figures as in an export, None when there were none.
        after: Figures as in an export, None when there are none.
    """

    at: str
    who: str
    action: str
    key: ProfileKey
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def changed_figures(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """What differs between two exports of a profile, a line for each figure that people look at."""
    old, new = before or {}, after or {}
    skip = {"measured_at", "detail", "model", "batch_size", "gpu_count", "gpu_type", "user"}
    names = [name for name in {**old, **new} if name not in skip and old.get(name) != new.get(name)]
    return [f"{name}: {_figure(old.get(name))} → {_figure(new.get(name))}" for name in names]


def _figure(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def login_name() -> str:
    """Who runs this process."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user_name() -> str:
    """Who runs this process; under sudo, also who called it."""
    name = login_name()
    caller = os.environ.get("SUDO_USER", "")
    return f"{caller} as {name}" if caller and caller != name else name


@dataclass(frozen=True, slots=True)
class Edit:
    """New figures of a profile; None keeps the old one.

    Attributes:
        load_ms: Milliseconds per iteration that storage owns.
        preprocess_ms: Milliseconds per iteration that the CPU owns.
        propagate_ms: Milliseconds per iteration that the GPU owns.
        synchronize_ms: Milliseconds per iteration that the network owns.
        iteration_ms: Milliseconds of a whole iteration.
        gpu_mem_gib: Peak GPU memory.
    """

    load_ms: float | None = None
    preprocess_ms: float | None = None
    propagate_ms: float | None = None
    synchronize_ms: float | None = None
    iteration_ms: float | None = None
    gpu_mem_gib: float | None = None

    def times_s(self) -> dict[str, float]:
        """The times that change, by field of `StageProfile`."""
        given = {name: getattr(self, f"{name}_ms") for name in (*STAGES, "iteration")}
        return {f"{name}_s": value / 1000 for name, value in given.items() if value is not None}


def edited(profile: StageProfile, edit: Edit, now: str) -> StageProfile:
    """The profile with the new figures, its source "edit".

    The other measurements of times (spread, hidden use, confidence) do not fit changed times; they are dropped.

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
    changes: dict[str, Any] = {**times, "gpu_mem_gib": memory, "detail": detail}
    new = replace(profile, **changes, source="edit", measured_at=now)
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
        dangers=detail.dangers,
    )
