"""Which members of a new group share the runtime's process as threads, and why the others do not. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from muri.profiler import dangers
from muri.profiler.records import StageProfile
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.records.roles import ManagedJob


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a member runs.

    Attributes:
        kind: As in `MemberSpec.isolation`.
        why: For people; "" where the site has threads for nobody.
    """

    kind: Literal["thread", "process"] = "process"
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Home:
    """What threads of one process must have in common."""

    python: str
    environment: str


def isolations(
    jobs: Sequence[ManagedJob], profiles: Sequence[StageProfile], mode: str, cycle: CycleInput
) -> list[Isolation]:
    """Return how the members of a new group run: as threads the most that may share a process, if there are two.

    Args:
        jobs: The members.
        profiles: Their models', in the same order.
        mode: How they share, as in `Group.mode`.
        cycle: What the cycle decides on.
    """
    if cycle.config.grouping.isolation == "process":
        return [Isolation()] * len(jobs)
    against = [_why_process(job, profile, mode) for job, profile in zip(jobs, profiles, strict=True)]
    homes = [None if why else _home(job, cycle) for job, why in zip(jobs, against, strict=True)]
    together = Counter(home for home in homes if home is not None).most_common(1)
    return [
        Isolation("process", why) if why else _among(home, *together[0]) if together else Isolation("process", _UNKNOWN)
        for home, why in zip(homes, against, strict=True)
    ]


_UNKNOWN = "its Python or its environment is not known"


def joins_later(cycle: CycleInput) -> Isolation:
    """Return how a job runs that joins a group at work."""
    return Isolation() if cycle.config.grouping.isolation == "process" else Isolation("process", "it joined later")


def _why_process(job: ManagedJob, profile: StageProfile, mode: str) -> str:
    found = profile.detail.dangers
    if mode == "plain":
        return "members that share without turns have processes"
    if job.gpu_count > 1:
        return "a job on several GPUs has processes"
    if found is None:
        return "its runs were not looked at for what threads cannot keep apart"
    return f"its runs used {dangers.said(found)}" if found else ""


def _home(job: ManagedJob, cycle: CycleInput) -> _Home | None:
    python = cycle.knowledge.pythons.of_job(job, cycle.key_of(job))
    if python is None or job.facts is None or not job.facts.environment:
        return None
    return _Home(python, job.facts.environment)


def _among(home: _Home | None, most: _Home, count: int) -> Isolation:
    if home is None:
        return Isolation("process", _UNKNOWN)
    if count < 2:
        return Isolation("process", "no partner could share a process with it")
    if home != most:
        return Isolation("process", "its Python or its environment is not that of the group's threads")
    return Isolation("thread", "its runs showed no danger; the site allows it")
