"""Count the jobs that were planned with a profile that another job's dry run had measured."""

from collections.abc import Collection, Iterable, Sequence

from muri.policies.types import PlanJob
from muri.profiler.store import REUSE_COUNT, REUSE_KIND, REUSE_NAME, Document, ProfileStore, reuse_count
from muri.slurm_plugin.actions import Action, started
from muri.slurm_plugin.journal import Intent
from muri.utc import text_of


def reused(actions: Iterable[Action], jobs: Sequence[PlanJob], measured_for: Collection[int]) -> int:
    """How many of a cycle's starts needed no dry run of their own. Pure.

    Args:
        actions: What the cycle did.
        jobs: What the policy was asked about.
        measured_for: Jobs that a dry run was made for.
    """
    profiles = {job.job_id: job.profile for job in jobs}
    known = {job_id for job_id, profile in profiles.items() if profile is not None and not profile.is_estimate}
    return len((known & started(actions)) - set(measured_for))


def note_reuse(
    store: ProfileStore, actions: Iterable[Action], jobs: Sequence[PlanJob], intents: Iterable[Intent], now_s: float
) -> None:
    """Add a cycle's count to the store's.

    Raises:
        StoreError: The store cannot be written.
    """
    measured_for = {int(intent.payload["job_id"]) for intent in intents if intent.kind == "dry-run"}
    count = reused(actions, jobs, measured_for)
    if count:
        at = text_of(now_s)
        store.put_document(REUSE_KIND, Document(REUSE_NAME, at, {REUSE_COUNT: reuse_count(store) + count}))
