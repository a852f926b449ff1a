"""What members' first iterations told of their models, as profiles to be stored. Pure.

A user may write anything into his jobs' comments: figures are checked as a dry run's are, and serve his own jobs alone.
Only a member's own run is believed, and only times within it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from muri.profiler.records import IN_PLACE, ProfileError, ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import KeepProfile, NotMeasured
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.running import as_submitted
from muri.slurm_plugin.records.cluster import Job
from muri.slurm_plugin.records.comment_reports import profile_in, python_in
from muri.slurm_plugin.records.roles import ManagedJob
from muri.utc import moment, text_of

_CLOCKS_DIFFER_S: Final = 60.0
"""By so much at most does a node's clock, which members' reports name, differ from slurmctld's."""

_SURE: Final = 0.95
"""With this confidence a measurement ends as sure; figures told earlier have less, and surer ones replace them."""

_UNTRUE: Final = (ProfileError, KeyError, TypeError, ValueError, OverflowError)


class _Report(NamedTuple):
    """What the comment of a member that has run says of its model."""

    job: ManagedJob
    measured: Mapping[str, Any]
    key: ProfileKey


def ran_s(job: Job, now_s: float) -> float:
    """Return the seconds of a job's last run, 0 when it has not started."""
    return max(0.0, (job.end_s or now_s) - job.start_s) if job.start_s else 0.0


def doubt(profile: StageProfile, config: Config) -> str:
    """Why a profile is not known well enough to plan with, "" when it is.

    Only measurements of a few iterations are doubted: who imports or corrects figures vouches for them.
    """
    sure, least = profile.detail.confidence, config.profiling.least_confidence
    if profile.source not in {"dry-run", IN_PLACE} or sure is None or sure >= least:
        return ""
    return f"it was {sure:.0%} sure of its means, less than profiling.least_confidence ({least:.0%})"


def measured_in_place(cycle: CycleInput) -> Iterator[KeepProfile | NotMeasured]:
    """Return what members told that is new: at most one profile for each key, the newest."""
    kept: dict[ProfileKey, KeepProfile] = {}
    for report in _reports(cycle):
        found = None
        with suppress(*_UNTRUE):
            found = _told(report, cycle)
        if isinstance(found, KeepProfile):
            known = kept.get(found.profile.key)
            if known is None or _is_before(known.profile.measured_at, found.profile.measured_at):
                kept[found.profile.key] = found
        elif found is not None:
            yield found
    yield from kept.values()


def untrue_reports(cycle: CycleInput) -> dict[int, str]:
    """Return why what jobs say of their models cannot be true, by job id."""
    found = {}
    for report in _reports(cycle):
        try:
            _told(report, cycle)
        except _UNTRUE as error:
            found[report.job.job_id] = f"what it says of its model cannot be true: {error}"
    return found


def _reports(cycle: CycleInput) -> Iterator[_Report]:
    """What members say of their models; none where nothing tells any more how many GPUs one had asked for."""
    if not cycle.config.profiling.in_place:
        return
    for job in cycle.view.jobs.values():
        measured, membership = job.reports.measured, job.membership
        pilot = None if measured is None or membership is None else cycle.view.jobs.get(membership.pilot)
        if measured is not None and pilot is not None and ran_s(job, cycle.now_s):
            yield _Report(job, measured, cycle.key_of(as_submitted(job, pilot)))


def _told(report: _Report, cycle: CycleInput) -> KeepProfile | NotMeasured | None:
    """What a report says of a model; None where it is of no use: it is known, or of an earlier run.

    Raises:
        ProfileError, KeyError, TypeError, ValueError, OverflowError: It cannot be true.
    """
    job, measured, key = report
    at_s = float(measured["at"])
    if at_s > cycle.now_s + _CLOCKS_DIFFER_S:
        raise ValueError("it names a time to come")
    if not job.start_s - _CLOCKS_DIFFER_S <= at_s <= cycle.now_s:
        return None
    if "error" in measured:
        return _failure(key, str(measured["error"]), at_s, cycle)
    profile = profile_in(measured, key, text_of(at_s), ran_s(job, cycle.now_s), IN_PLACE)
    if not _is_wanted(profile, cycle):
        return None
    environment = "" if job.facts is None else job.facts.environment
    return KeepProfile("", profile, bool(measured.get("accumulates")), python_in(measured), environment)


def _failure(key: ProfileKey, why: str, at_s: float, cycle: CycleInput) -> NotMeasured | None:
    """A run that told too little, if it is not counted yet; a model that is known needs no more runs."""
    known, counted_s = cycle.knowledge.profile_of(key), cycle.knowledge.failed_s.get(str(key), 0.0)
    if (known is not None and not known.is_estimate) or not counted_s < at_s:
        return None
    return NotMeasured(str(key), why, at_s)


def _is_wanted(profile: StageProfile, cycle: CycleInput) -> bool:
    """Whether a measurement takes the place of what is known."""
    known, knowledge = cycle.knowledge.profile_of(profile.key), cycle.knowledge
    if known is None or known.is_estimate:
        return True
    if _is_before(profile.measured_at, known.measured_at):
        return False
    if doubt(known, cycle.config):
        return not doubt(profile, cycle.config)
    if _is_surer(profile, known):
        return True
    return knowledge.is_stale(profile.key) and _is_before(knowledge.stale_since(profile.key), profile.measured_at)


def _is_surer(profile: StageProfile, known: StageProfile) -> bool:
    """Whether a measurement is surer than one that was told before it was sure."""
    before, now = known.detail.confidence, profile.detail.confidence
    return known.source == IN_PLACE and before is not None and now is not None and before < min(now, _SURE)


def _is_before(one: str, other: str) -> bool:
    """Whether a time is earlier than another; one that cannot be read is."""
    earlier, later = moment(one), moment(other)
    return earlier is None or (later is not None and earlier < later)
