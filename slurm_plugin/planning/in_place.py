"""What members' first iterations told of their models, as profiles to be stored. Pure.

A user may write anything into his jobs' comments: figures are checked as a dry run's are, and serve his own jobs alone.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from muri.profiler.records import IN_PLACE, ProfileError, ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import KeepProfile, NotMeasured
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.running import as_submitted
from muri.slurm_plugin.records.comment_reports import profile_in, python_in
from muri.slurm_plugin.records.roles import ManagedJob
from muri.utc import moment, text_of

log = logging.getLogger("muri.controller")


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
    if not cycle.config.profiling.in_place:
        return
    kept: dict[ProfileKey, KeepProfile] = {}
    for job in cycle.view.jobs.values():
        measured = job.reports.measured
        key = None if measured is None else _key_of(job, cycle)
        if measured is None or key is None:
            continue
        found = _told(job, measured, key, cycle)
        if isinstance(found, KeepProfile):
            known = kept.get(found.profile.key)
            if known is None or _is_before(known.profile.measured_at, found.profile.measured_at):
                kept[found.profile.key] = found
        elif found is not None:
            yield found
    yield from kept.values()


def _told(
    job: ManagedJob, measured: Mapping[str, Any], key: ProfileKey, cycle: CycleInput
) -> KeepProfile | NotMeasured | None:
    """What a job's comment says of its model; None where that cannot be true or is of no use."""
    try:
        at_s = min(float(measured["at"]), cycle.now_s)
        if "error" in measured:
            return _failure(key, str(measured["error"]), at_s, cycle)
        profile = profile_in(measured, key, text_of(at_s), IN_PLACE)
    except (ProfileError, KeyError, TypeError, ValueError, OverflowError) as error:
        log.warning("job %d: what it says of its model cannot be true: %s", job.job_id, error)
        return None
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


def _key_of(job: ManagedJob, cycle: CycleInput) -> ProfileKey | None:
    """The key of a job's model; None where nothing tells any more how many GPUs it had asked for."""
    if job.membership is not None:
        pilot = cycle.view.jobs.get(job.membership.pilot)
        return None if pilot is None else cycle.key_of(as_submitted(job, pilot))
    return cycle.key_of(job) if job.gpu_count > 0 else None


def _is_wanted(profile: StageProfile, cycle: CycleInput) -> bool:
    """Whether a measurement takes the place of what is known."""
    known, knowledge = cycle.knowledge.profile_of(profile.key), cycle.knowledge
    if known is None or known.is_estimate:
        return True
    if not _is_before(known.measured_at, profile.measured_at):
        return False
    if doubt(known, cycle.config):
        return not doubt(profile, cycle.config)
    return knowledge.is_stale(profile.key) and _is_before(knowledge.stale_since(profile.key), profile.measured_at)


def _is_before(one: str, other: str) -> bool:
    """Whether a time is earlier than another; one that cannot be read is."""
    earlier, later = moment(one), moment(other)
    return earlier is None or (later is not None and earlier < later)
