"""What `muri run` asks of Slurm when it runs inside a member's job (muri.launcher's Membership)."""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.group_spec import MemberSpec, Place
from muri.slurm_plugin.gateway.base import NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node.pauses import growing_pauses
from muri.slurm_plugin.node.slurm_calls import JobRecord, job_record, requeue, requeue_hold, set_comment, state_of
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import may_try_again, out_of_memory_runs, out_of_memory_text
from muri.slurm_plugin.records.comment_tags import MemoryRetry, memory_retry

_FIRST_RETRY_S, _MOST_RETRY_S = 5.0, 60.0

_Answer = TypeVar("_Answer")


class SlurmMembership:
    """Tells whether a job was given to a group, and puts it back into the queue."""

    def __init__(self, clock: Clock = MACHINE_CLOCK) -> None:
        self._clock = clock

    def await_place(self, job_id: str) -> Place | None:
        """Return the place of a job in the group that its AdminComment names, None when it is in none.

        A member must not run without its group's GPUs, so this keeps asking while slurmctld is away.
        """
        try:
            return self._until_answered(job_id, self.place_of)
        except NoSuchJobError:
            return None
        except (MuriError, ValueError) as error:
            print(f"muri: cannot tell whether this job is in a group: {error}", file=sys.stderr, flush=True)
            return Place("", MemberSpec(job_id))

    def place_of(self, job_id: str) -> Place | None:
        """Return the place of a job in the group that its AdminComment names, None when it is in none.

        Raises:
            GatewayError: Slurm cannot say now.
        """
        return place_in(job_id, job_record(int(job_id)).admin_comment)

    def requeue(self, job_id: str, reason: str) -> None:
        """Put the job back into the queue, where it waits until the controller gives it its own GPUs.

        A job that Slurm is already ending, because its user cancelled it, is left alone. While slurmctld is away this
        keeps asking: a job that gave up would have failed for nothing that its script did.

        Raises:
            GatewayError: Slurm refused.
        """
        try:
            self._until_answered(job_id, lambda each: _requeue_to_gate(job_record(int(each))))
        except NoSuchJobError:
            outcome = "Slurm is ending the job already, and it does not go back to the queue"
        else:
            outcome = "the job goes back to the queue and runs alone next time"
        print(f"muri: {reason}; {outcome}", file=sys.stderr, flush=True)

    def _until_answered(self, job_id: str, ask: Callable[[str], _Answer]) -> _Answer:
        pauses = growing_pauses(_FIRST_RETRY_S, _MOST_RETRY_S, int(job_id))  # not all jobs come back at once
        while True:
            try:
                return ask(job_id)
            except SlurmUnreachableError as error:
                print(f"muri: waiting for slurmctld: {error}", file=sys.stderr, flush=True)
                self._clock.sleep(next(pauses))

    def runs(self, job_id: str) -> bool:
        """Return whether the job runs and Slurm is not ending it.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        return state_of(int(job_id)) == "RUNNING"

    def requeue_for_memory(self, job_id: str) -> bool:
        """Put a job that ran out of GPU memory beside others back into the queue, as often as it may try again.

        Raises:
            GatewayError: Slurm refused.
        """
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
        """Put a saved job back: a member for the controller to plan it anew; another to Slurm's own queue.

        Raises:
            GatewayError: Slurm refused.
        """
        record = job_record(int(job_id))
        _set_token(record, tags.STOPPED_PREFIX, run)
        if tags.parse_state(record.admin_comment) is None:
            requeue(record.name)
        else:
            _requeue_to_gate(record)

    def groups(self) -> list[dict[str, Any]]:
        """Return the caller's groups, to root everybody's, as Slurm's records tell of them.

        Raises:
            GatewayError: Slurm cannot be asked.
        """
        from muri.slurm_plugin.node.group_records import running_groups  # members never need the whole gateway

        return running_groups()

    def declare_checkpoint(self, job_id: str, run: int) -> None:
        """Say in the job's own comment that this run of it has a checkpoint.

        Raises:
            GatewayError: Slurm refused.
        """
        _set_token(job_record(int(job_id)), tags.CHECKPOINT_PREFIX, run)


def place_in(job_id: str, admin_comment: str) -> Place | None:
    """Return what an AdminComment says of a job's place in a group; one without a pilot where the tag is damaged."""
    state = tags.parse_state(admin_comment)
    if state is None:
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


def _requeue_to_gate(record: JobRecord) -> None:
    """Put a member back into the queue, where it must wait for the controller.

    A hold would take the place of one that an administrator or the user has put on the running job; so a job that a
    license keeps waiting gets none. Should it start before the controller has put its request back, `await_place`
    sends it back again.

    Raises:
        NoSuchJobError: It has ended, or Slurm is ending it.
        GatewayError: Slurm refused it.
    """
    gate = tags.token(record.admin_comment, tags.GATE_PREFIX)
    (requeue if gate == tags.LICENCE_GATE else requeue_hold)(record.name)


def mark_stopped(job_id: int, run: int) -> None:
    """Say in a job's own comment that this run of it is stopped on purpose, to be resumed.

    Raises:
        GatewayError: Slurm refused.
    """
    _set_token(job_record(job_id), tags.STOPPED_PREFIX, run)


def _set_token(record: JobRecord, prefix: str, value: int | str) -> None:
    set_comment(record.name, tags.with_token(record.comment, prefix, str(value)))
