"""Questions and requests of `muri run` to Slurm inside a member's job (muri.launcher's Membership)."""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.group_spec import MemberSpec, Place
from muri.slurm_plugin.gateway.base import NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node.slurm_calls import JobRecord, growing_pauses, job_record, requeue, set_comment, state_of
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import may_try_again, out_of_memory_runs, out_of_memory_text
from muri.slurm_plugin.records.comment_tags import MemoryRetry, memory_retry

GOES_BACK = "the job goes back to the queue and runs alone next time"
_FIRST_RETRY_S, _MOST_RETRY_S = 5.0, 60.0

_Answer = TypeVar("_Answer")


class SlurmMembership:
    """Tells whether a job was given to a group, and puts it back into the queue."""

    def __init__(self, clock: Clock = MACHINE_CLOCK) -> None:
        self._clock = clock

    def await_place(self, job_id: str) -> Place | None:
        """Return the place of a job in the group that its AdminComment names, None without a group.

        A member must not run without its group's GPUs, so this keeps asking while slurmctld is away.
        """
        try:
            return self._until_answered(job_id, lambda: self.place_of(job_id))
        except NoSuchJobError:
            return None
        except (MuriError, ValueError) as error:
            print(f"muri: cannot tell whether this job is in a group: {error}", file=sys.stderr, flush=True)
            return Place("", MemberSpec(job_id))

    def place_of(self, job_id: str) -> Place | None:
        """As `await_place`, but a GatewayError where Slurm has no answer now."""
        admin_comment = job_record(int(job_id)).admin_comment
        state = tags.parse_state(admin_comment)
        if state is None:  # a damaged tag has no pilot
            return Place("", MemberSpec(job_id)) if tags.is_member(admin_comment) else None
        planned = tags.parse_plan(admin_comment) or tags.Planned()
        member = MemberSpec(
            job_id,
            solo_iteration_s=planned.solo_iteration_s,
            predicted_speed=planned.speed,
            accumulate_steps=state.accumulate_steps,
            min_speed=state.min_speed,
        )
        return Place(str(state.pilot), member)

    def requeue(self, job_id: str, reason: str) -> None:
        """Put the job back into the queue, where it waits until the controller gives it its own GPUs.

        A job that Slurm is already ending, because its user canceled it, is left alone. While slurmctld is away this
        keeps asking: a job that gave up would have failed without a fault of its script.
        """
        try:
            self._until_answered(job_id, lambda: _requeue_to_gate(job_record(int(job_id))))
        except NoSuchJobError:
            outcome = "Slurm is ending the job already, and it does not go back to the queue"
        else:
            outcome = GOES_BACK
        print(f"muri: {reason}; {outcome}", file=sys.stderr, flush=True)

    def _until_answered(self, job_id: str, ask: Callable[[], _Answer]) -> _Answer:
        pauses = growing_pauses(_FIRST_RETRY_S, _MOST_RETRY_S, int(job_id))  # not all jobs come back at once
        while True:
            try:
                return ask()
            except SlurmUnreachableError as error:
                print(f"muri: waiting for slurmctld: {error}", file=sys.stderr, flush=True)
                self._clock.sleep(next(pauses))

    def runs(self, job_id: str) -> bool:
        """Return whether the job runs and Slurm is not ending it."""
        return state_of(int(job_id)) == "RUNNING"

    def requeue_for_memory(self, job_id: str) -> bool:
        """Put a job that ran out of GPU memory beside others back into the queue, as often as it may try again."""
        record = job_record(int(job_id))
        run, (last, times) = int(os.environ.get("SLURM_RESTART_COUNT") or 0), out_of_memory_runs(record.comment)
        if last == run:
            return True  # another rank of the job has reported it and requeues the job
        retry = memory_retry(record.admin_comment)
        if retry is MemoryRetry.NONE or not may_try_again(record.comment):
            return False
        then = "asks for more" if retry is MemoryRetry.WITH_MORE else "runs alone"
        print(f"muri: out of GPU memory beside others; the job goes back to the queue and {then} next time",
              file=sys.stderr, flush=True)  # fmt: skip
        _set_token(record, tags.OUT_OF_MEMORY_PREFIX, out_of_memory_text(run, times + 1))
        _requeue_to_gate(record)
        return True

    def requeue_stopped(self, job_id: str, run: int) -> None:
        """Put a saved job back: a member for the controller to plan it anew; another to Slurm's own queue."""
        record = job_record(int(job_id))
        _set_token(record, tags.STOPPED_PREFIX, run)
        if tags.parse_state(record.admin_comment) is None:
            requeue(record.name)
        else:
            _requeue_to_gate(record)

    def groups(self) -> list[dict[str, Any]]:
        """Return the caller's groups, to root those of all users, from Slurm's records; else a GatewayError."""
        from muri.slurm_plugin.node.group_records import running_groups  # members never need the whole gateway

        return running_groups()

    def declare_checkpoint(self, job_id: str, run: int) -> None:
        """Note in the job's own comment that this run of it has a checkpoint; a GatewayError where Slurm refuses."""
        _set_token(job_record(int(job_id)), tags.CHECKPOINT_PREFIX, run)


def requeue_member(job_id: int, pilot: int) -> str:
    """Put a member of a pilot job that ends back into the queue, as `SlurmMembership.requeue` does.

    Returns its state before: "PENDING" for a job that waits, which stays as it is; "" for one that is not a member of
    the pilot any more, or that Slurm ends already.
    """
    record = job_record(job_id)
    state = tags.parse_state(record.admin_comment)
    if record.state == "PENDING":
        return record.state
    if state is None or state.pilot != pilot or record.state not in {"RUNNING", "SUSPENDED"}:
        return ""
    _requeue_to_gate(record)
    return record.state


def _requeue_to_gate(record: JobRecord) -> None:
    """Put a member back into the queue, where it must wait for the controller.

    A hold would take the place of one that an administrator or the user has put on the running job; so a job that a
    license keeps waiting gets none. Should it start before the controller has put its request back, `await_place`
    sends it back again.
    """
    gate = tags.token(record.admin_comment, tags.GATE_PREFIX)
    requeue(record.name, held=gate != tags.LICENSE_GATE)


def mark_stopped(job_id: int, run: int) -> None:
    """Note in a job's own comment that this run is stopped to be resumed; a GatewayError where Slurm refuses."""
    _set_token(job_record(job_id), tags.STOPPED_PREFIX, run)


def _set_token(record: JobRecord, prefix: str, value: int | str) -> None:
    set_comment(record.name, tags.with_token(record.comment, prefix, str(value)))
