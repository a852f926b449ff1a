"""What `muri run` asks of Slurm when it runs inside a member's job (muri.launcher's Membership)."""

import os
import sys
from typing import Any

from muri.clock import MACHINE_CLOCK, Clock
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node.slurm_calls import active_jobs, job_field, requeue, requeue_hold, set_comment
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import may_try_again, out_of_memory_runs, out_of_memory_text
from muri.slurm_plugin.records.comment_tags import retries_memory

_RETRY_S = 10.0


class SlurmMembership:
    """Tells whether a job was given to a group, and puts it back into the queue."""

    def __init__(self, clock: Clock = MACHINE_CLOCK) -> None:
        self._clock = clock

    def expects_group(self, job_id: str) -> bool:
        """Return whether the job's AdminComment names a pilot job.

        A member must not run without its group's GPUs, so this keeps asking while slurmctld is away.
        """
        while True:
            try:
                return tags.is_member(job_field(int(job_id), "admin_comment"))
            except NoSuchJobError:
                return False
            except SlurmUnreachableError as error:
                print(f"muri: waiting for slurmctld: {error}", file=sys.stderr, flush=True)
                self._clock.sleep(_RETRY_S)
            except (GatewayError, ValueError) as error:
                print(f"muri: cannot tell whether this job is in a group: {error}", file=sys.stderr, flush=True)
                return True

    def requeue(self, job_id: str, reason: str) -> None:
        """Put the job back into the queue, where it waits until the controller gives it its own GPUs.

        A job that Slurm is already ending, because its user cancelled it, is left alone. While slurmctld is away this
        keeps asking: a job that gave up would have failed for nothing that its script did.

        Raises:
            GatewayError: Slurm refused.
        """
        try:
            self._requeue_once_possible(int(job_id))
        except NoSuchJobError:
            outcome = "Slurm is ending the job already, and it does not go back to the queue"
        else:
            outcome = "the job goes back to the queue and runs alone next time"
        print(f"muri: {reason}; {outcome}", file=sys.stderr, flush=True)

    def _requeue_once_possible(self, job_id: int) -> None:
        while True:
            try:
                return _requeue_to_gate(job_id)
            except SlurmUnreachableError as error:
                print(f"muri: waiting for slurmctld: {error}", file=sys.stderr, flush=True)
                self._clock.sleep(_RETRY_S)

    def pilot_of(self, job_id: str) -> str | None:
        """Return the pilot job that the job's AdminComment names, None when it names none.

        Raises:
            GatewayError: Slurm cannot say now.
        """
        state = tags.parse_state(job_field(int(job_id), "admin_comment"))
        return None if state is None else str(state.pilot)

    def accumulate_steps(self, job_id: str) -> int:
        """Return what the plan chose, as the job's AdminComment says; 1 when it says nothing.

        Raises:
            GatewayError: Slurm cannot say now.
        """
        state = tags.parse_state(job_field(int(job_id), "admin_comment"))
        return 1 if state is None else state.accumulate_steps

    def min_speed(self, job_id: str) -> float:
        """Return the speed that the job was promised, as its AdminComment says; 0 when it says nothing.

        Raises:
            GatewayError: Slurm cannot say now.
        """
        state = tags.parse_state(job_field(int(job_id), "admin_comment"))
        return 0.0 if state is None else state.min_speed

    def runs(self, job_id: str) -> bool:
        """Return whether the job runs and Slurm is not ending it.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        return active_jobs([int(job_id)]).get(int(job_id)) == "RUNNING"

    def requeue_for_memory(self, job_id: str) -> bool:
        """Put a job that ran out of GPU memory beside others back into the queue, as often as it may try again.

        Raises:
            GatewayError: Slurm refused.
        """
        comment = job_field(int(job_id), "comment")
        run = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        if out_of_memory_runs(comment)[0] == run:
            return True  # another rank of the job has reported it and requeues the job
        if not (retries_memory(job_field(int(job_id), "admin_comment")) and may_try_again(comment)):
            return False
        print("muri: out of GPU memory beside others; the job goes back to the queue and asks for more next time",
              file=sys.stderr, flush=True)  # fmt: skip
        _set_token(int(job_id), tags.OUT_OF_MEMORY_PREFIX, out_of_memory_text(run, out_of_memory_runs(comment)[1] + 1))
        _requeue_to_gate(int(job_id))
        return True

    def requeue_stopped(self, job_id: str, run: int) -> None:
        """Put a saved job back: a member for the controller to plan it anew; another to Slurm's own queue.

        Raises:
            GatewayError: Slurm refused.
        """
        mark_stopped(int(job_id), run)
        if self.pilot_of(job_id) is None:
            requeue(int(job_id))
        else:
            _requeue_to_gate(int(job_id))

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
        _set_token(int(job_id), tags.CHECKPOINT_PREFIX, run)


def _requeue_to_gate(job_id: int) -> None:
    """Put a member back into the queue, where it must wait for the controller.

    A hold would take the place of one that an administrator or the user has put on the running job; so a job that a
    licence keeps waiting gets none. Should it start before the controller has put its request back, `expects_group`
    sends it back again.

    Raises:
        NoSuchJobError: It has ended, or Slurm is ending it.
        GatewayError: Slurm refused it.
    """
    gate = tags.token(job_field(job_id, "admin_comment"), tags.GATE_PREFIX)
    (requeue if gate == tags.LICENCE_GATE else requeue_hold)(job_id)


def mark_stopped(job_id: int, run: int) -> None:
    """Say in a job's own comment that this run of it is stopped on purpose, to be resumed.

    Raises:
        GatewayError: Slurm refused.
    """
    _set_token(job_id, tags.STOPPED_PREFIX, run)


def _set_token(job_id: int, prefix: str, value: int | str) -> None:
    set_comment(job_id, tags.with_token(job_field(job_id, "comment"), prefix, str(value)))
