"""Deliberate bugs in the product: each must break an invariant of some story."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.execute import executor, gate
from muri.slurm_plugin.gateway.base import Gateway
from muri.slurm_plugin.planning import repairs, slurm_requests
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobChange
from muri.slurm_plugin.records.journal import Journal
from muri.slurm_plugin.records.roles import ManagedJob

_RESTORED = executor.original_request
_PILOT = executor.pilot_job
_MEMBER = executor.member_change
_OPEN_GATE = gate.open_gate


def _request_not_restored(job: ManagedJob, why: str = "") -> JobChange:
    return replace(_RESTORED(job, why), gpu_request=None)


def _members_are_cut(*arguments: Any, **named: Any) -> JobChange:
    return replace(_MEMBER(*arguments, **named), cpu_count=1, cpus_per_task=1, mem_per_node_mib=64)


def _members_get_no_grant(*arguments: Any, **named: Any) -> JobChange:
    change = _MEMBER(*arguments, **named)
    return replace(change, admin_comment=tags.with_token(change.admin_comment or "", tags.GRANT_PREFIX, None))


def _grant_stays(admin_comment: str) -> str:
    return tags.with_token(admin_comment, tags.STATE_PREFIX, None)


def _time_limit_not_restored(job: ManagedJob, why: str = "") -> JobChange:
    return replace(_RESTORED(job, why), time_limit_s=None)


def _pilot_of_no_account(*arguments: Any) -> Any:
    return replace(_PILOT(*arguments), account="")


def _releases_every_hold(
    gateway: Gateway, job: ManagedJob, change: JobChange | None = None, comment: str | None = None
) -> None:
    _OPEN_GATE(gateway, replace(job, held_by_others=False, gated=True), change or JobChange(), comment)


def _cancels_members(self: executor.Executor, action: Any) -> None:
    self._gateway.cancel(action.job_id)


def _short_limit(*arguments: Any, **named: Any) -> JobChange:
    return replace(_MEMBER(*arguments, **named), time_limit_s=60)


def _stays_at_pilots_end(*_: Any) -> Any:
    return repairs.Abandon("no such token", "nothing is done")


def _journal_forgets(self: Journal, token: str, kind: str, payload: Any, now_s: float) -> None:
    """Begin nothing."""


def _ends_no_gate(*_: Any, **__: Any) -> None:
    """Release nothing."""


def _lease_first(original: Callable[[Controller], Any]) -> Callable[[Controller], Any]:
    def cycle(self: Controller) -> Any:
        self._read_s = self._around.clock()
        self._extend_lease()
        return original(self)

    return cycle


def _nothing(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


MUTATIONS: dict[str, tuple[object, str, Any]] = {
    "a member's GPUs are not restored": (executor, "original_request", _request_not_restored),
    "members lose CPUs and memory": (executor, "member_change", _members_are_cut),
    "members get no grant": (executor, "member_change", _members_get_no_grant),
    "a grant outlives its group": (slurm_requests, "without_membership", _grant_stays),
    "a member's time limit is not restored": (executor, "original_request", _time_limit_not_restored),
    "the journal is skipped": (Journal, "begin", _journal_forgets),
    "the placeholder forgets the account": (executor, "pilot_job", _pilot_of_no_account),
    "others' holds are lifted": (gate, "open_gate", _releases_every_hold),
    "a restored member is cancelled": (executor.Executor, "_restore", _cancels_members),
    "members get a minute": (executor, "member_change", _short_limit),
    "members stay when their placeholder has ended": (repairs, "after_pilot_end", _stays_at_pilots_end),
    "a drain leaves members behind": (gate, "restore_request", _ends_no_gate),
    "the lease is extended before anything is done": (Controller, "_cycle", _lease_first(Controller._cycle)),
    "dry runs are never given up": (repairs, "_dry_run", _nothing),
    "given CPUs are not taken back": (slurm_requests, "_own_cpus_and_memory", lambda original: JobChange()),
}
"""What each is in words: where, which name, and what takes its place."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Within, the product has a bug."""
    place, attribute, mutant = MUTATIONS[name]
    with patch.object(place, attribute, mutant):
        yield
