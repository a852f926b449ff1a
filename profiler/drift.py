"""Whether the figures of running jobs have drifted away from their model's profile. Pure.

1. Of the observations of a key since it was measured, those of the newest `after_s` seconds count or, where that is
   longer, the newest `LEAST_OBSERVATIONS` with `LEAST_ITERATIONS` iterations. They must reach back that far.
2. The median of each stage's use, hidden behind another stage or not, is compared with the profile's
   (`ProfileDetail.busy_s`, else the stage times). Waits for other members are in neither.
3. The difference is relative to the profiled time, or to `LEAST_SHARE` of all stages together where that is more.
4. GPU memory counts as well, upwards only, as a profile holds a job's peak: its median less `CONTEXT_GIB`.
5. The profile has drifted when the largest difference is above `limit`, and is right again below half of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from muri.clock import moment
from muri.profiler.records import STAGES, StageProfile
from muri.profiler.store import Observation

LEAST_OBSERVATIONS: Final = 3
LEAST_ITERATIONS: Final = 50
LEAST_SHARE: Final = 0.1
CONTEXT_GIB: Final = 1.0
"""GPU memory of a process's CUDA context and libraries, which PyTorch does not count; some profiles leave it out."""

GPU_MEMORY: Final = "GPU memory"
_RIGHT_AGAIN: Final = 0.5
_TINY_SHARE: Final = 1e-3
_PER_WINDOW: Final = 10
"""Observations of a job that are kept in `after_s` seconds, at most."""


@dataclass(frozen=True, slots=True)
class DriftRule:
    """When a profile has drifted."""

    limit: float = 0.2  # Relative difference that counts, 0.2 = 20 %
    after_s: float = 1800.0  # Seconds for which it must have lasted


@dataclass(frozen=True, slots=True)
class Drift:
    """What observations say about a profile."""

    what: str  # The stage that differs most, or `GPU_MEMORY`
    expected: float  # Its seconds per iteration in the profile, or GiB
    observed: float  # The median of what was observed
    difference: float  # How far apart they are, see the rule
    iterations: int  # Iterations that the observations cover
    drifted: bool  # Whether the difference is above the limit
    right: bool  # Whether it is below half of the limit

    def __str__(self) -> str:
        """The reason of a mark."""
        over = f"over {self.iterations} iterations"
        if self.what == GPU_MEMORY:
            return f"{self.what} was {self.observed:.1f} GiB instead of {self.expected:.1f} GiB {over}"
        return (
            f"{self.what} took {1000 * self.observed:.1f} ms per iteration instead of "
            f"{1000 * self.expected:.1f} ms {over}"
        )


def find_drift(profile: StageProfile, observations: Sequence[Observation], rule: DriftRule) -> Drift | None:
    """Compare a profile with the reports of its running jobs."""
    recent = _recent(profile, observations, rule.after_s)
    if not recent:
        return None
    expected = profile.detail.busy_s or profile.stage_s
    observed = _medians(recent)
    # A profile may say that all stages together take next to nothing; the iteration always takes some time.
    least_s = LEAST_SHARE * max(sum(expected), _TINY_SHARE * profile.iteration_s)
    differences = [abs(live - known) / max(known, least_s) for live, known in zip(observed, expected, strict=True)]
    found = [*zip(differences, STAGES, expected, observed, strict=True), *_grown(profile, recent)]
    worst, what, known, live = max(found, key=lambda row: row[0])
    return Drift(
        what,
        known,
        live,
        worst,
        _iterations(recent),
        drifted=worst > rule.limit,
        right=worst < rule.limit * _RIGHT_AGAIN,
    )


def _grown(profile: StageProfile, observations: Sequence[Observation]) -> list[tuple[float, str, float, float]]:
    """How much more GPU memory jobs hold than the profile says, as a row of `find_drift`; empty if unread."""
    held = [item.gpu_mem_gib for item in observations if item.gpu_mem_gib is not None]
    if len(held) < LEAST_OBSERVATIONS or profile.gpu_mem_gib <= 0:
        return []
    observed = median(held)
    more = max(0.0, observed - CONTEXT_GIB - profile.gpu_mem_gib) / profile.gpu_mem_gib
    return [(more, GPU_MEMORY, profile.gpu_mem_gib, observed)]


def measured_by_jobs(
    profile: StageProfile, observations: Sequence[Observation], rule: DriftRule
) -> StageProfile | None:
    """What running jobs measured, in place of a profile that is not to be trusted.

    A job reports how long it uses each resource. How much of that the stage owns, and the time outside of stages, stay
    as they were measured; so does what jobs do not report.
    """
    recent = _recent(profile, observations, rule.after_s)
    if not recent:
        return None
    busy_s = _medians(recent)
    before_s = profile.detail.busy_s or profile.stage_s
    load_s, preprocess_s, propagate_s, synchronize_s = owned_s = [
        used * min(1.0, own / before) if before else used
        for used, own, before in zip(busy_s, profile.stage_s, before_s, strict=True)
    ]
    outside_s = max(0.0, profile.iteration_s - sum(profile.stage_s))
    detail = replace(
        profile.detail, busy_s=busy_s, stage_p95_s=None, stage_cv=None, iteration_p95_s=None, iteration_cv=None,
        confidence=None, warmup_iterations=None,
    )  # fmt: skip
    return replace(
        profile, load_s=load_s, preprocess_s=preprocess_s, propagate_s=propagate_s, synchronize_s=synchronize_s,
        iteration_s=sum(owned_s) + outside_s, iterations=_iterations(recent),
        measured_at=max(item.observed_at for item in recent), source="run", detail=detail,
    )  # fmt: skip


def is_due(observations: Sequence[Observation], job_id: int, observed_at: str, rule: DriftRule) -> bool:
    """Whether a job's next observation is worth keeping, so that the kept ones reach back far enough."""
    now = moment(observed_at)
    times = [at for item in observations if item.job_id == job_id and (at := moment(item.observed_at)) is not None]
    if now is None or not times:
        return True
    return (now - max(times)).total_seconds() >= rule.after_s / _PER_WINDOW


def _recent(profile: StageProfile, observations: Sequence[Observation], after_s: float) -> list[Observation]:
    """The observations of the newest `after_s` seconds, of slow models as many more as it takes; empty if too few."""
    measured = moment(profile.measured_at)
    timed = [
        (at, item) for item in observations if len(item.stage_s) == len(STAGES) and (at := moment(item.observed_at))
    ]
    since = [(at, item) for at, item in timed if measured is None or at > measured]
    if not since:
        return []
    newest = max(at for at, _ in since)
    ages_s = [((newest - at).total_seconds(), item) for at, item in since]
    for edge_s in sorted({age_s for age_s, _ in ages_s if age_s >= after_s}):
        window = [item for age_s, item in ages_s if age_s <= edge_s]  # the one that closes the window counts too
        if len(window) >= LEAST_OBSERVATIONS and _iterations(window) >= LEAST_ITERATIONS:
            return window
    return []


def _medians(observations: Sequence[Observation]) -> tuple[float, ...]:
    """Of each stage's seconds."""
    return tuple(median(item.stage_s[index] for item in observations) for index in range(len(STAGES)))


def _iterations(observations: Sequence[Observation]) -> int:
    """Iterations that the jobs did between their first and last observation."""
    counts: dict[int, list[int]] = {}
    for item in observations:
        counts.setdefault(item.job_id, []).append(item.iterations)
    return sum(max(found) - min(found) for found in counts.values())
