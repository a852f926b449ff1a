"""Give every job back to Slurm as its user submitted it. Needs no journal: Slurm's own comments suffice."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.slurm_plugin.execute.executor import restore_request
from muri.slurm_plugin.execute.gate import release_as_asked, reset_request
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.planning.slurm_requests import with_memory_retry
from muri.slurm_plugin.records.cluster import JobChange, JobState, Snapshot
from muri.slurm_plugin.records.comment_tags import MemoryRetry
from muri.slurm_plugin.records.roles import GATE_LICENSE, ManagedJob, Role, View, is_behind_licence, view_of

_DRAINED: Final = "`muri drain` gave it back to Slurm"

log = logging.getLogger("muri.drain")

_POLL_S = 5.0

_ALIVE: Final = frozenset({JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED})

_MOST_REFUSALS = 12
"""How many passes in a row may do nothing but fail in the same way; a job that no nodes could hold stays refused."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did."""

    released: tuple[int, ...]  # Waiting jobs whose gate was opened, with their own request
    # Waiting members, and jobs that were given other CPUs, memory or a place in the queue, that got their own back
    restored: tuple[int, ...]
    cancelled: tuple[int, ...]  # Muri's own jobs that were ended (waiting pilots, dry runs)
    running: tuple[int, ...]  # Members that run on in their group
    failed: tuple[str, ...]  # Jobs that Slurm refused to change, with its words
    # Groups' pilot jobs, which end after their members, and jobs that Slurm is ending and may put back, held
    leaving: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether no job is left that could come back held: this drain changed nothing, and no member runs."""
        return not any((self.released, self.restored, self.cancelled, self.running, self.failed, self.leaving))


def drain(gateway: Gateway, read: Callable[[], Snapshot]) -> Drained:
    """Let Slurm start every waiting job, with its original request; groups that run already are left to finish.

    The lease ends first: from then on Slurm starts what waits for the license by itself, whatever happens here.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    failed: list[str] = []
    lease_is_over = True
    try:
        gateway.end_lease()
    except SlurmUnreachableError:
        raise
    except GatewayError as error:
        lease_is_over = False
        failed.append(f"the reservation {GATE_LICENSE}: {error}")
    view = view_of(read())
    members = view.having(Role.MEMBER)
    waiting_members = [job for job in members if job.state is JobState.PENDING]
    own = [job for job in view.having(Role.PILOT) if job.state is JobState.PENDING]
    own += view.having(Role.DRY_RUN)
    held = view.having(Role.CANDIDATE) + view.having(Role.NOT_OURS)
    released = _each(held, lambda job: _release(gateway, job, read, lease_is_over=lease_is_over), failed)
    waiting = [
        job for role in (Role.RELEASED, Role.USER_HELD) for job in view.having(role) if job.state is JobState.PENDING
    ]
    given = [job for job in waiting if job.given is not None or job.place is not None]
    # Members go before pilots: a cancelled pilot would set its waiting members free without GPUs.
    restored = _each(waiting_members, lambda job: restore_request(gateway, job, _DRAINED), failed)
    restored += _each(given, lambda job: _reset(gateway, job, read), failed)
    # Without a controller, a job that came back after running out of memory would stay held.
    at_work = [job for job in members if job.state is not JobState.PENDING]
    retrying = [job for job in at_work if job.memory_retry is not MemoryRetry.NONE]
    _each(retrying, lambda job: gateway.modify(job.job_id, _without_retry(job.admin_comment)), failed)
    cancelled = _each(own, lambda job: gateway.cancel(job.job_id), failed)
    running = tuple(job.job_id for job in at_work)
    return Drained(released, restored, cancelled, running, tuple(failed), _leaving(view))


def _without_retry(admin_comment: str) -> JobChange:
    return JobChange(admin_comment=with_memory_retry(admin_comment, MemoryRetry.NONE))


class _FreeAnywayError(Exception):
    """Slurm refused to change a job that nothing of Muri's keeps waiting any more."""


def _release(gateway: Gateway, job: ManagedJob, read: Callable[[], Snapshot], *, lease_is_over: bool) -> None:
    try:
        release_as_asked(gateway, job)
    except (NoSuchJobError, SlurmUnreachableError):
        raise
    except GatewayError as error:
        # Slurm changes nothing in a job that no nodes could ever hold.
        if lease_is_over and is_behind_licence(job) and not job.held and (job.given is None or _started(job, read)):
            raise _FreeAnywayError(str(error)) from error
        raise


def _reset(gateway: Gateway, job: ManagedJob, read: Callable[[], Snapshot]) -> None:
    try:
        reset_request(gateway, job)
    except (NoSuchJobError, SlurmUnreachableError):
        raise
    except GatewayError as error:
        if _started(job, read):
            raise _FreeAnywayError(str(error)) from error
        raise


def _started(job: ManagedJob, read: Callable[[], Snapshot]) -> bool:
    """Whether Slurm has started a job since it was read. Its refusals do not tell: "Invalid node name" is one."""
    return not any(each.job_id == job.job_id and each.state is JobState.PENDING for each in read().jobs)


def _leaving(view: View) -> tuple[int, ...]:
    pilots = [job.job_id for job in view.having(Role.PILOT) if job.state is not JobState.PENDING]
    # A stopped job stays in this state while it saves its checkpoint.
    ending = [job.job_id for job in view.having(Role.RELEASED) if job.state is JobState.COMPLETING]
    return (*pilots, *ending)


def drain_until_over(gateway: Gateway, read: Callable[[], Snapshot], clock: Clock = MACHINE_CLOCK) -> Iterator[Drained]:
    """Drain again and again until no job is left that could come back held, and say what each pass did.

    A member that is saved and stopped, or whose group fails, waits held until its own request is restored. Without
    a controller only a drain does that. It also ends when Slurm refuses the same changes for a minute, and nothing
    else is left to wait for.
    """
    refusals = 0
    refused: tuple[str, ...] = ()
    while True:
        try:
            done = drain(gateway, read)
        except SlurmUnreachableError as error:
            log.warning("slurmctld does not answer, waiting for it: %s", error)
        else:
            yield done
            refusals = refusals + 1 if done.failed == refused and replace(done, failed=()).is_over else 0
            refused = done.failed
            if done.is_over or refusals == _MOST_REFUSALS:
                return
        clock.sleep(_POLL_S)


def _each(jobs: Iterable[ManagedJob], change: Callable[[ManagedJob], None], failed: list[str]) -> tuple[int, ...]:
    """Change every job that can be changed; skip those that are gone."""
    changed = []
    for job in jobs:
        try:
            change(job)
            changed.append(job.job_id)
        except NoSuchJobError:
            log.info("job %d: gone already", job.job_id)
        except _FreeAnywayError as error:
            log.info("job %d: nothing keeps it waiting any more, but: %s", job.job_id, error)
        except SlurmUnreachableError:
            raise
        except Exception as error:  # one job's fault must not keep the others
            log.log(
                logging.WARNING if isinstance(error, GatewayError) else logging.ERROR, "job %d: %r", job.job_id, error
            )
            failed.append(f"job {job.job_id}: {error}")
    return tuple(changed)


def clear_tags(gateway: Gateway, read: Callable[[], Snapshot]) -> tuple[int, ...]:
    """Take Muri's words from every waiting and running job; returns their ids.

    Slurm keeps ended jobs as they are.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    cleared = []
    for job in read().jobs:
        rest = " ".join(word for word in job.admin_comment.split() if not word.startswith(("muri:", "muri-")))
        if job.state not in _ALIVE or rest == job.admin_comment:
            continue
        try:
            gateway.modify(job.job_id, JobChange(admin_comment=rest))
            cleared.append(job.job_id)
        except NoSuchJobError:
            continue
        except GatewayError as error:
            log.warning("job %d keeps Muri's words: %s", job.job_id, error)
    return tuple(cleared)
