"""What the launcher asks of the scheduler: is this job a member of a group, and requeue it."""

from importlib import import_module
from typing import Final, Protocol, cast

from muri.errors import MuriError

IMPLEMENTATION: Final = "muri.slurm_plugin.node.membership:SlurmMembership"


class MembershipError(MuriError):
    """The scheduler's part is not installed or broken; trying again cannot help."""

    worth_retrying = False


class Membership(Protocol):
    """A job's standing with the scheduler."""

    def expects_group(self, job_id: str) -> bool:
        """Whether the job was released to run inside a group's runtime.

        Raises:
            MuriError: The scheduler cannot say now.
        """

    def requeue(self, job_id: str, reason: str) -> None:
        """Put the job back into the queue; the scheduler then ends its processes.

        Raises:
            MuriError: The scheduler did not accept it.
        """

    def host_of(self, job_id: str) -> str | None:
        """The host job of the group that the job was given to, None when it is in none.

        Raises:
            MuriError: The scheduler cannot say now.
        """

    def accumulate_steps(self, job_id: str) -> int:
        """Into how many micro-batches the scheduler wants the job's batches split; 1: none.

        Raises:
            MuriError: The scheduler cannot say now.
        """

    def runs(self, job_id: str) -> bool:
        """Whether the job runs and nobody is ending it.

        Raises:
            MuriError: The scheduler cannot say now.
        """

    def requeue_for_memory(self, job_id: str) -> bool:
        """Put a job that ran out of GPU memory beside others back into the queue, to ask for more next time.

        Returns:
            Whether it was put back; False where its policy doesn't do that, or has done it too often.

        Raises:
            MuriError: The scheduler did not accept it.
        """

    def requeue_stopped(self, job_id: str, run: int) -> None:
        """Put a job back that was saved, to go on later; the scheduler then ends its processes.

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


class NoMembership:
    """Stands in where no scheduler plug-in is installed: no job belongs to a group."""

    def expects_group(self, job_id: str) -> bool:
        """Nobody could have put the job into a group."""
        return False

    def requeue(self, job_id: str, reason: str) -> None:
        """Say that nothing can requeue the job."""
        raise MembershipError(f"job {job_id} cannot be requeued: Muri's Slurm part is not installed here")

    def host_of(self, job_id: str) -> str | None:
        """There are no groups."""
        return None

    def accumulate_steps(self, job_id: str) -> int:
        """Nobody wants them split."""
        return 1

    def runs(self, job_id: str) -> bool:
        """Nobody can say; what cannot be requeued is as well not running."""
        return False

    def requeue_for_memory(self, job_id: str) -> bool:
        """Nobody can put it back."""
        return False

    def requeue_stopped(self, job_id: str, run: int) -> None:
        """Say that nothing can requeue the job."""
        self.requeue(job_id, "")

    def declare_checkpoint(self, job_id: str, run: int) -> None:
        """Nobody asks."""


def load_membership(implementation: str = IMPLEMENTATION) -> Membership:
    """The scheduler's implementation, or the stand-in when it is not installed.

    Args:
        implementation: "module:attribute"; named in text so that this room does not depend on it.
    """
    module_name, _, attribute = implementation.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise MembershipError(f"{module_name} cannot be used: {error}") from error
        return NoMembership()
    return cast(Membership, getattr(module, attribute)())
