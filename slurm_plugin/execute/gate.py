"""Opens and closes the gate of one job, together with a change of its request; `drain` opens all. Repeatable steps.

With the license each is one call. With Muri's own hold, the request changes before the hold is lifted, so a
controller that dies in between leaves a held job, which the next cycle starts anew.

CPUs and memory are given to jobs, and taken back, here, too. A job's own request goes into its AdminComment before
anything of it is changed: a controller that dies in between leaves a held job with that tag, and the next cycle, or
`muri drain`, puts its own request back. Draining needs no journal.

All functions raise NoSuchJobError where a job is gone, and GatewayError where Slurm refuses, unless they say otherwise.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.slurm_plugin.gateway.base import (
    Gateway,
    GatewayError,
    JobGateway,
    NoSuchJobError,
    SlurmUnreachableError,
    job_started,
)
from muri.slurm_plugin.planning.actions import GivenShare
from muri.slurm_plugin.planning.slurm_requests import (
    given_change,
    given_comment,
    in_own_place,
    original_request,
    reset_change,
    with_memory_retry,
)
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, Snapshot
from muri.slurm_plugin.records.comment_tags import MemoryRetry
from muri.slurm_plugin.records.roles import (
    GATE_LICENSE,
    OPEN,
    REQUEUED,
    REQUEUED_HELD,
    ManagedJob,
    Role,
    gate_word,
    is_behind_license,
    view_of,
    with_gate,
    with_word,
    without_gate,
)

log = logging.getLogger("muri.controller")
drain_log = logging.getLogger("muri.drain")

_NOTHING = JobChange()


@contextmanager
def unless_gone(job_id: int) -> Iterator[None]:
    """Carry out a change of a job that may have ended meanwhile, which is logged."""
    try:
        yield
    except NoSuchJobError:
        log.info("job %d: gone already", job_id)


def is_refusal(error: GatewayError) -> bool:
    """Whether Slurm refused, rather than that the job is gone or slurmctld does not answer."""
    return not isinstance(error, NoSuchJobError | SlurmUnreachableError)


def open_gate(gateway: JobGateway, job: ManagedJob, change: JobChange = _NOTHING, comment: str | None = None) -> None:
    """Change a waiting job's request and let Slurm start it. A hold that is not Muri's stays."""
    if job.place is not None:
        change = in_own_place(job, change if comment is None else replace(change, admin_comment=comment))
        comment = None
    lifts = job.gated and job.held and not job.held_by_others
    if is_behind_license(job):
        told = change.admin_comment if comment is None else comment
        change = replace(change, licenses=without_gate(job.licenses), admin_comment=told)
    if lifts and change != _NOTHING and (gate_word(job) == OPEN or job.reason == REQUEUED_HELD):
        # A controller that dies before the release leaves a hold that must look like Muri's own, member or not.
        change = replace(change, admin_comment=with_word(comment or _comment(job, change), REQUEUED))
    if change != _NOTHING:
        gateway.modify(job.job_id, change)
    if lifts:
        gateway.release(job.job_id)
        note_open(gateway, job, comment or _comment(job, change))


def close_gate(gateway: JobGateway, job: ManagedJob, change: JobChange = _NOTHING) -> None:
    """Change a job's request and keep it from starting.

    A running job cannot be held: with Muri's own hold as its gate, a later hold is not Muri's.
    """
    if job.gate == "license":
        # Slurm 25.05 to 25.11.6 forget the licenses of a requeued job, until they change: once it is back, they do.
        count = 1 if job.state is JobState.PENDING else 2
        gateway.modify(job.job_id, replace(change, licenses=with_gate(job.licenses, count)))
        return
    # A hold of a user or administrator must not look like Muri's; once it is released, Slurm decides about the job.
    is_open = job.held_by_others or job.state is JobState.RUNNING
    back = job.held and job.reason == REQUEUED_HELD
    word = OPEN if is_open else REQUEUED if back else "hold"
    gateway.modify(job.job_id, replace(change, admin_comment=with_word(_comment(job, change), word)))
    if is_open or job.held:
        return
    try:
        gateway.hold(job.job_id)
    except GatewayError as error:
        if not job_started(error):  # one that started just now has its own request and may run
            raise


def note_open(gateway: JobGateway, job: ManagedJob, comment: str | None = None) -> None:
    """Say that Muri's hold on a job is lifted, twice if need be: until then its user's hold looks like Muri's."""
    change = JobChange(admin_comment=with_word(job.admin_comment if comment is None else comment, OPEN))
    try:
        gateway.modify(job.job_id, change)
    except (NoSuchJobError, SlurmUnreachableError):
        raise
    except GatewayError:
        gateway.modify(job.job_id, change)


def stop(gateway: JobGateway, job: ManagedJob) -> None:
    """End a running job's run and put it back into the queue, behind its gate."""
    _expect_back(gateway, job)
    _requeue(gateway, job.job_id, held=job.gate == "hold")


def stop_as_caller(gateway: JobGateway, job: ManagedJob) -> None:
    """Do the same in the name of the caller, who may be the job's user.

    Slurm lets only administrators change a running job's licenses and AdminComment. A job alone that its user stops has
    no gate, and Slurm starts it again by itself.
    """
    held = job.gate == "hold"
    try:
        _expect_back(gateway, job)
    except GatewayError:
        held = held and job.role is Role.MEMBER
    _requeue(gateway, job.job_id, held=held)


def _expect_back(gateway: JobGateway, job: ManagedJob) -> None:
    """Close a running job's gate, or say that the hold with which it comes back will be Muri's.

    Slurm does not tell such a hold from an administrator's. One with which its user submitted the job is long lifted.
    """
    if job.gate == "hold":
        comment = tags.with_token(job.admin_comment, tags.USER_HOLD, None)
        gateway.modify(job.job_id, JobChange(admin_comment=with_word(comment, REQUEUED)))
    else:
        close_gate(gateway, job)


def _requeue(gateway: JobGateway, job_id: int, *, held: bool) -> None:
    (gateway.requeue_hold if held else gateway.requeue)(job_id)


def move_to_license(gateway: JobGateway, job: ManagedJob) -> None:
    """Put a job that Muri holds behind the license instead.

    The hold goes before the word changes: a controller that dies in between leaves a job that is still Muri's to start.
    """
    if not is_behind_license(job):
        # Jobs of the oldest versions have no word; beside the license only the word says that the hold is Muri's.
        comment = with_word(job.admin_comment, "hold")
        gateway.modify(job.job_id, JobChange(licenses=with_gate(job.licenses), admin_comment=comment))
    if job.held and not job.held_by_others:
        gateway.release(job.job_id)
    gateway.modify(job.job_id, JobChange(admin_comment=with_word(job.admin_comment, tags.LICENSE_GATE)))


def _comment(job: ManagedJob, change: JobChange) -> str:
    return job.admin_comment if change.admin_comment is None else change.admin_comment


def give_share(gateway: JobGateway, job: Job, share: GivenShare, now_s: float) -> str:
    """Change the request of a held job; return why it keeps its own, "" when it was changed.

    The next cycle repairs a change that an error cut off.
    """
    if refusal := _refusal(gateway, job, JobChange(admin_comment=given_comment(job, share, now_s))):
        return refusal
    refusal = _refusal(gateway, job, given_change(job, share))
    if refusal:
        gateway.modify(job.job_id, reset_change(job, share.original))
    return refusal


def _refusal(gateway: JobGateway, job: Job, change: JobChange) -> str:
    """Make a change; return Slurm's words where it refuses, "" where it does not."""
    try:
        gateway.modify(job.job_id, change)
    except (NoSuchJobError, SlurmUnreachableError):
        raise
    except GatewayError as error:
        return f"Slurm refused other CPUs or memory: {error}"
    return ""


def reset_request(gateway: JobGateway, job: ManagedJob) -> None:
    """Give a pending job its own CPUs, memory and place in the queue back."""
    change = _own_change(job)
    if change == JobChange():
        return
    try:
        with unless_gone(job.job_id):
            gateway.modify(job.job_id, change)
    except GatewayError as error:
        if not job_started(error):
            raise
        log.info("job %d: has started meanwhile", job.job_id)


def reset_or_release(gateway: JobGateway, job: ManagedJob) -> None:
    """Give a job behind the gate its own request back; where Slurm refuses, open the gate with the share."""
    try:
        reset_request(gateway, job)
    except GatewayError as error:
        if is_refusal(error):
            open_gate(gateway, job)
        raise


def release_as_asked(gateway: JobGateway, job: ManagedJob) -> None:
    """Open a job's gate, with its own request."""
    try:
        open_gate(gateway, job, _own_change(job))
    except GatewayError as error:
        if is_refusal(error):
            open_gate(gateway, job)
        raise


def _own_change(job: ManagedJob) -> JobChange:
    return in_own_place(job, JobChange() if job.given is None else reset_change(job, job.given.original))


def restore_request(gateway: JobGateway, job: ManagedJob, why: str) -> None:
    """Give a pending member its original request back and let it run alone, unless it is held; `why` is for people."""
    if job.membership is None:
        raise GatewayError(
            f"job {job.job_id}: its AdminComment is damaged, so the GPUs that it asked for are unknown; cancel it and "
            "submit it again"
        )
    with unless_gone(job.job_id):
        open_gate(gateway, job, original_request(job, why))


_DRAINED: Final = "`muri drain` gave it back to Slurm"

_POLL_S = 5.0

_ALIVE: Final = frozenset({JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED})

_MOST_REFUSALS = 12
"""How many passes in a row may do nothing but fail in the same way; a job that no nodes could hold stays refused."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The jobs that a drain changed, or that are left."""

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

    def waits_for_nothing(job: ManagedJob) -> bool:
        # Slurm changes nothing in a job that no nodes could ever hold.
        is_free = lease_is_over and is_behind_license(job) and not job.held
        return is_free and (job.given is None or _started(job, read))

    def without_retry(job: ManagedJob) -> None:
        change = JobChange(admin_comment=with_memory_retry(job.admin_comment, MemoryRetry.NONE))
        gateway.modify(job.job_id, change)

    released = _each(held, lambda job: release_as_asked(gateway, job), failed, waits_for_nothing)
    waiting = [
        job for role in (Role.RELEASED, Role.USER_HELD) for job in view.having(role) if job.state is JobState.PENDING
    ]
    given = [job for job in waiting if job.given is not None or job.place is not None]
    # Members go before pilots: a cancelled pilot would set its waiting members free without GPUs.
    restored = _each(waiting_members, lambda job: restore_request(gateway, job, _DRAINED), failed)
    restored += _each(given, lambda job: reset_request(gateway, job), failed, lambda job: _started(job, read))
    # Without a controller, a job that came back after running out of memory would stay held.
    at_work = [job for job in members if job.state is not JobState.PENDING]
    retrying = [job for job in at_work if job.memory_retry is not MemoryRetry.NONE]
    _each(retrying, without_retry, failed)
    cancelled = _each(own, lambda job: gateway.cancel(job.job_id), failed)
    running = tuple(job.job_id for job in at_work)
    leaving = [job.job_id for job in view.having(Role.PILOT) if job.state is not JobState.PENDING]
    # A stopped job stays in this state while it saves its checkpoint.
    leaving += [job.job_id for job in view.having(Role.RELEASED) if job.state is JobState.COMPLETING]
    return Drained(released, restored, cancelled, running, tuple(failed), tuple(leaving))


def _started(job: ManagedJob, read: Callable[[], Snapshot]) -> bool:
    """Whether Slurm has started a job since it was read. Its refusals do not tell: "Invalid node name" is one."""
    return not any(each.job_id == job.job_id and each.state is JobState.PENDING for each in read().jobs)


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
            drain_log.warning("slurmctld does not answer, waiting for it: %s", error)
        else:
            yield done
            refusals = refusals + 1 if done.failed == refused and replace(done, failed=()).is_over else 0
            refused = done.failed
            if done.is_over or refusals == _MOST_REFUSALS:
                return
        clock.sleep(_POLL_S)


def _each(
    jobs: Iterable[ManagedJob],
    change: Callable[[ManagedJob], None],
    failed: list[str],
    is_free: Callable[[ManagedJob], bool] = lambda _: False,
) -> tuple[int, ...]:
    """Change every job that can be changed; skip those that are gone, and those that a refusal leaves free anyway."""
    changed = []
    for job in jobs:
        try:
            try:
                change(job)
            except GatewayError as error:
                if not (is_refusal(error) and is_free(job)):
                    raise
                drain_log.info("job %d: nothing keeps it waiting any more, but: %s", job.job_id, error)
            else:
                changed.append(job.job_id)
        except NoSuchJobError:
            drain_log.info("job %d: gone already", job.job_id)
        except SlurmUnreachableError:
            raise
        except Exception as error:  # one job's fault must not keep the others
            drain_log.log(
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
            drain_log.warning("job %d keeps Muri's words: %s", job.job_id, error)
    return tuple(cleared)
