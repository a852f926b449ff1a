"""The one door to Slurm: a protocol with two implementations behind `open_gateway`."""

from typing import Protocol

from muri.errors import MuriError
from muri.slurm_plugin.model import JobChange, NewJob, Snapshot


class GatewayError(MuriError):
    """Slurm refused, or could not be reached; the text carries Slurm's own words."""


class SlurmUnreachableError(GatewayError):
    """slurmctld does not answer; the cycle is skipped and tried again at the next."""


class NoSuchJobError(GatewayError):
    """slurmctld no longer knows the job, or the job has ended."""


class GatewayUnavailableError(GatewayError):
    """This way of speaking to Slurm cannot work on this machine; the text says what to do instead."""

    worth_retrying = False


class Gateway(Protocol):
    """Everything that Muri asks of Slurm. Each call is one RPC unless it says otherwise."""

    @property
    def name(self) -> str:
        """Return "pyslurm" or "command"."""
        ...

    def snapshot(self) -> Snapshot:
        """Read all jobs and nodes, in at most two bulk RPCs.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        ...

    def submit(self, job: NewJob) -> int:
        """Submit a batch job as its user and return its id.

        Raises:
            GatewayError: Slurm refused it.
        """
        ...

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a pending job.

        Raises:
            NoSuchJobError: The job is gone.
            GatewayError: Slurm refused the change.
        """
        ...

    def hold(self, job_id: int) -> None:
        """Hold a pending job; holding a held one is no error."""
        ...

    def release(self, job_id: int) -> None:
        """Release a held job; releasing a released one is no error."""
        ...

    def requeue_hold(self, job_id: int) -> None:
        """End a running job, put it back into the queue and hold it."""
        ...

    def cancel(self, job_id: int) -> None:
        """Cancel a job; cancelling an ended one is no error."""
        ...

    def batch_script(self, job_id: int) -> str:
        """Return the text of a job's batch script.

        Raises:
            NoSuchJobError: The job is gone or has none.
        """
        ...

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        """Return the environment that a pending job was submitted with.

        Slurm offers no RPC for it; it is read from slurmctld's state directory when the controller runs
        beside slurmctld. None when it cannot be read.
        """
        ...
