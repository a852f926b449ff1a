"""Compare what the members of running groups tell with their profiles, and mark those that have moved away.

Only members of a group are seen: a job that runs alone reports nothing. A mark lets the next job of the
model be measured by a dry run again (planning); until then the old profile serves.
"""

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from muri.profiler.differences import Drift, DriftRule, find_drift, is_due
from muri.profiler.records import STAGES, ProfileKey
from muri.profiler.store import ProfileStore
from muri.profiler.upkeep import DRIFT, Author, Observation, StaleMark
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.running import as_submitted, running_groups
from muri.slurm_plugin.telemetry import member_report
from muri.slurm_plugin.view import View, profile_key
from muri.utc import moment, text_of

log = logging.getLogger("muri.controller")

_CLOCK: Final = "milliseconds"
"""Cycles may follow each other within a second."""


class Observed(NamedTuple):
    """An observation and the key that it is of."""

    key: ProfileKey
    observation: Observation


def observed(view: View) -> Iterator[Observed]:
    """What the members of running groups tell of their stages.

    Without turns others slow a stage itself down, not the wait for it: that says nothing against a profile.
    """
    at = text_of(view.snapshot.taken_s, _CLOCK)
    for group in (group for group in running_groups(view) if group.mode == "interleave"):
        for job in group.members:
            report = member_report(view, group.host.job_id, job.job_id)
            if report is not None and report.iterations and len(report.stage_s) == len(STAGES):
                key = profile_key(as_submitted(job, group.host), view.snapshot.nodes)
                yield Observed(key, Observation(at, job.job_id, report.iterations, report.stage_s))


def watch(store: ProfileStore, view: View, config: Config) -> None:
    """Keep a cycle's observations and set or take back marks.

    Raises:
        StoreError: The store cannot be written.
    """
    if not config.profiles.drift_limit:
        return
    found = tuple(observed(view))
    rule = DriftRule(config.profiles.drift_limit, config.profiles.drift_after_s)
    for key, item in found:
        if is_due(store.observations(key), item.job_id, item.observed_at, rule):
            store.observe(key, item)
    marks = {mark.key: mark for mark in store.stale_marks()}
    for key in sorted({each.key for each in found}):
        profile = store.get(key)
        drift = None if profile is None or profile.is_estimate else find_drift(profile, store.observations(key), rule)
        if drift is not None:
            _judge(store, key, drift, marks.get(key), config, view.snapshot.taken_s)


def _judge(
    store: ProfileStore, key: ProfileKey, drift: Drift, mark: StaleMark | None, config: Config, now_s: float
) -> None:
    if mark is None and drift.drifted and _may_mark(store, key, config, now_s):
        log.warning("profile of %s is stale: %s; the next job of it is measured again", key, drift)
        store.mark_stale(key, str(drift), Author(DRIFT, text_of(now_s, _CLOCK), "stale"))
    elif mark is not None and mark.who == DRIFT and drift.right:
        log.info("profile of %s is right again: %s", key, drift)
        store.clear_stale(key, Author(DRIFT, text_of(now_s, _CLOCK), "clear"))


def _may_mark(store: ProfileStore, key: ProfileKey, config: Config, now_s: float) -> bool:
    """Whether the last mark is long ago: a measurement that did not help is not repeated at once."""
    ours = (entry for entry in store.audit() if entry.key == key and entry.who == DRIFT and entry.action == "stale")
    times = [at.timestamp() for entry in ours if (at := moment(entry.at)) is not None]
    return not times or now_s - max(times) >= config.profiles.drift_again_s
