"""The few Slurm commands that run on compute nodes, in the user's name, inside a job."""

import subprocess
from collections.abc import Sequence

from muri.slurm_plugin.gateway import GatewayError, NoSuchJobError, SlurmUnreachableError

_TIMEOUT_S = 30.0
_UNREACHABLE = ("Unable to contact slurm controller", "Connection refused", "timed out", "Zero Bytes were transmitted")


def run_slurm(arguments: Sequence[str]) -> str:
    """Run a Slurm command and return its standard output.

    Raises:
        NoSuchJobError: Slurm does not know the job.
        SlurmUnreachableError: slurmctld does not answer.
        GatewayError: The command is missing or failed; the text carries Slurm's words.
    """
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise GatewayError(f"the command {arguments[0]} is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachableError(f"{arguments[0]} did not answer within {_TIMEOUT_S:g} s") from error
    if done.returncode == 0:
        return done.stdout
    words = done.stderr.strip() or f"exit status {done.returncode}"
    if "Invalid job id" in words:
        raise NoSuchJobError(f"{arguments[0]}: {words}")
    if any(sign in words for sign in _UNREACHABLE):
        raise SlurmUnreachableError(f"{arguments[0]}: {words}")
    raise GatewayError(f"{arguments[0]}: {words}")


def active_jobs(job_ids: Sequence[int]) -> dict[int, str]:
    """Return the state of those of the jobs that still wait or run.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    try:
        text = run_slurm(["squeue", "--noheader", "--format=%i %T", f"--jobs={','.join(map(str, job_ids))}"])
    except NoSuchJobError:
        # squeue says so when it knows none of them any more.
        return {}
    pairs = (line.split() for line in text.splitlines() if line.strip())
    return {int(job_id): state for job_id, state in pairs if job_id.isdigit() and state not in _ENDED}


_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}


def job_field(job_id: int, field: str) -> str:
    """Return one long text field of a job as `squeue --Format` names it ("comment", "admin_comment").

    Raises:
        NoSuchJobError: Slurm does not know the job.
        SlurmUnreachableError: slurmctld does not answer.
    """
    # The width is stated because squeue cuts a field at 20 characters otherwise.
    text = run_slurm(["squeue", "--noheader", f"--Format={field}:8192", f"--jobs={job_id}", "--states=all"])
    value = text.rstrip("\n").rstrip()
    return "" if value == "(null)" else value


def set_comment(job_id: int, comment: str) -> None:
    """Replace the comment of one of the user's own jobs.

    Raises:
        GatewayError: Slurm refused it.
    """
    run_slurm(["scontrol", "update", f"jobid={job_id}", f"comment={comment}"])
