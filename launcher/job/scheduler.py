"""What the launcher asks of the scheduler: is this job a member of a group, and requeue it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from muri.errors import MuriError
from muri.group_spec import Place
from muri.inherited import settle
from muri.launcher.job import scheduler_call

ENTRY_POINTS: Final = "muri.schedulers"
"""Group of the entry points by which a scheduler makes itself known (pyproject.toml)."""


OWN: Final = ("slurm", "muri.slurm_plugin.node.membership:SlurmMembership")
"""Muri's own scheduler, for a Python that finds Muri through PYTHONPATH and so knows no entry points."""


class MembershipError(MuriError):
    """The scheduler's part is not installed or broken; trying again cannot help."""

    worth_retrying = False


class Membership(Protocol):
    """A job's standing with the scheduler."""

    def await_place(self, job_id: str) -> Place | None:
        """As `place_of`, but asks until the scheduler answers: running alone could mean running twice.

        Raises:
            MuriError: The scheduler's part cannot be used.
        """

    def requeue(self, job_id: str, reason: str) -> None:
        """Put the job back into the queue; the scheduler then ends its processes.

        Raises:
            MuriError: The scheduler did not accept it.
        """

    def place_of(self, job_id: str) -> Place | None:
        """The place of the job in the group that it was released to run in, None when it is in none.

        Raises:
            MuriError: The scheduler cannot say now.
        """

    def runs(self, job_id: str) -> bool:
        """Whether the job runs and is not being ended.

        Raises:
            MuriError: The scheduler cannot say now.
        """

    def requeue_for_memory(self, job_id: str) -> bool:
        """Put a job that ran out of GPU memory beside others back into the queue, to ask for more or run alone then.

        Returns:
            Whether it was put back; False where no controller would plan it again, or it was put back too often.

        Raises:
            MuriError: The scheduler did not accept it.
        """

    def requeue_stopped(self, job_id: str, run: int) -> None:
        """Requeue a job that was saved, so that it resumes later; the scheduler then ends its processes.

        Args:
            job_id: The job.
            run: How often it was requeued before.

        Raises:
            MuriError: The scheduler did not accept it.
        """

    def declare_checkpoint(self, job_id: str, run: int) -> None:
        """Tell the controller that this run of the job can be stopped and resumed.

        Raises:
            MuriError: The scheduler did not accept it.
        """

    def groups(self) -> list[dict[str, Any]]:
        """The caller's running groups on all nodes, each in the form of a runtime's status file, as far as is known.

        Raises:
            MuriError: The scheduler cannot say now.
        """


class NoMembership:
    """Stands in where no scheduler plug-in is installed: no job belongs to a group."""

    def await_place(self, job_id: str) -> Place | None:
        """Without a scheduler there are no groups."""
        return None

    def requeue(self, job_id: str, reason: str) -> None:
        """Say that nothing can requeue the job."""
        raise MembershipError(f"job {job_id} cannot be requeued: Muri's Slurm part is not installed here")

    def place_of(self, job_id: str) -> Place | None:
        """Without a scheduler there are no groups."""
        return None

    def runs(self, job_id: str) -> bool:
        """Unknown; a job that cannot be requeued counts as not running."""
        return False

    def requeue_for_memory(self, job_id: str) -> bool:
        """No scheduler can put it back."""
        return False

    def requeue_stopped(self, job_id: str, run: int) -> None:
        """Say that nothing can requeue the job."""
        self.requeue(job_id, "")

    def declare_checkpoint(self, job_id: str, run: int) -> None:
        """No controller asks."""

    def groups(self) -> list[dict[str, Any]]:
        """Without a scheduler there are no groups."""
        return []


def load_membership(group: str = ENTRY_POINTS) -> Membership:
    """The implementation of the scheduler that is installed here, or the stand-in when there is none.

    Args:
        group: Entry points among which a scheduler announces its implementation of `Membership`.

    Raises:
        MembershipError: Several are installed, or the one cannot be used.
    """
    # Costs tens of milliseconds, which most runs of `muri run` can save.
    from importlib.metadata import EntryPoint, entry_points

    found = tuple(entry_points(group=group))
    if not found and group == ENTRY_POINTS:
        found = (EntryPoint(*OWN, group),)
    if not found:
        return NoMembership()
    if len(found) > 1:
        names = ", ".join(f"{point.name} ({point.value})" for point in found)
        raise MembershipError(f"several schedulers are installed for Muri: {names}; uninstall all but one")
    try:
        return cast(Membership, found[0].load()())
    except (ImportError, AttributeError) as error:
        raise MembershipError(
            f"the scheduler {found[0].name} ({found[0].value}) cannot be used: {error}; install Muri anew"
        ) from error


def answer(arguments: Sequence[str]) -> int:
    """Do what a script's process asks for; see `scheduler_call` for the words and the exit codes."""
    what, job_id, run = arguments
    try:
        membership = load_membership()
        if what == scheduler_call.DECLARE_CHECKPOINT:
            membership.declare_checkpoint(job_id, int(run))
        elif membership.runs(job_id):
            membership.requeue_stopped(job_id, int(run))
        else:
            return scheduler_call.NOT_RUNNING
    except MuriError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return scheduler_call.DONE


if __name__ == "__main__":
    settle()
    exit_code = answer(sys.argv[1:])
    print(exit_code)
    sys.exit(exit_code)
