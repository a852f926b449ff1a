"""Planning with estimated profiles until a dry run has measured."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from muri.errors import MuriError
from muri.policies.types import Plan, PlanJob
from muri.profiler.errors import CorruptStoreError
from muri.profiler.estimates import estimates_of, why_estimated
from muri.profiler.records import ProfileKey
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.actions import Action, StartDryRun, started
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning import Knowledge, Preparation
from muri.slurm_plugin.running import as_submitted, running_groups
from muri.slurm_plugin.view import Role, View, profile_key

log = logging.getLogger("muri.controller")


def with_estimates(know: Knowledge, view: View, store: ProfileStore, config: Config) -> Knowledge:
    """Add estimates of the queue's models that have no profile.

    They count as stale: they serve planning at once, and a dry run measures the model when there is room for
    one. A model whose dry runs failed gets none, and its jobs run alone as ever. Without estimates jobs wait for
    their dry runs, so that a failure here costs only that.

    Raises:
        CorruptStoreError: The store is damaged; the cycle sets it aside.
    """
    if not config.profiling.use_estimates:
        return know
    missing = {key for key in _keys(view) if key not in know.profiles and not know.failed(key, config)}
    try:
        found = estimates_of(store, sorted(missing)) if missing else {}
    except CorruptStoreError:
        raise
    except MuriError as error:
        log.warning("this cycle plans without estimates: %s", error)
        return know
    except Exception:  # libraries of prediction too: an estimate is worth no cycle
        log.exception("this cycle plans without estimates")
        return know
    return replace(know, profiles={**know.profiles, **found}, stale=know.stale | found.keys())


def _keys(view: View) -> Iterator[ProfileKey]:
    """What the jobs that wait, and those that run in groups or alone, are profiled under."""
    for job in (*view.having(Role.CANDIDATE), *view.having(Role.RELEASED)):
        yield profile_key(job, view.snapshot.nodes)
    for group in running_groups(view):
        for member in group.members:
            yield profile_key(as_submitted(member, group.host), view.snapshot.nodes)


def without_started(preparation: Preparation, starts: Sequence[Action]) -> tuple[StartDryRun, ...]:
    """The dry runs, but none with the script of a job that starts.

    Another job of the model will wait some day; a script that runs twice at once costs GPUs twice, and could spoil
    its own files.
    """
    gone = started(starts)
    return tuple(run for run in preparation.dry_runs if run.job_id not in gone)


def notes_of(jobs: Sequence[PlanJob], plan: Plan) -> dict[int, str]:
    """What to say of the jobs that were planned with an estimate and are in no group; groups say it themselves."""
    grouped = {job_id for group in plan.groups for job_id in group.members}
    said = {job.job_id: why_estimated(job.profile) for job in jobs if job.profile is not None}
    return {job_id: why for job_id, why in said.items() if why and job_id not in grouped}
