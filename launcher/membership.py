"""What the launcher asks of the scheduler: is this job a member of a group, and requeue it."""

from importlib import import_module
from typing import Final, Protocol, cast

from muri.errors import MuriError

IMPLEMENTATION: Final = "muri.slurm_plugin.member:SlurmMembership"


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


class NoMembership:
    """Stands in where no scheduler plug-in is installed: no job belongs to a group."""

    def expects_group(self, job_id: str) -> bool:
        """Nobody could have put the job into a group."""
        return False

    def requeue(self, job_id: str, reason: str) -> None:
        """Say that nothing can requeue the job."""
        raise MembershipError(f"job {job_id} cannot be requeued: Muri's Slurm part is not installed here")


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
