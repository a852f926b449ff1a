"""The few Slurm commands that run on compute nodes, in the user's name, inside a job."""

from collections.abc import Sequence
from functools import lru_cache

from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, job_pending
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands, decoded, encoded

_COMMANDS = SlurmCommands(timeout_s=30.0)

_ID_WIDTH = 16

_FIELD_WIDTH = 32768
"""Bytes; squeue cuts a longer text off."""

_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}


def active_jobs(job_ids: Sequence[int]) -> dict[int, str]:
    """Return the state of those of the jobs that still wait or run.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    try:
        text = _COMMANDS.run(
            "ask for the members' states",
            ["squeue", "--noheader", "--format=%A %T", f"--jobs={','.join(map(str, job_ids))}"],
        )
    except NoSuchJobError:
        # squeue says so when it knows none of them any more.
        return {}
    pairs = (line.split() for line in text.splitlines() if line.strip())
    return {int(job_id): state for job_id, state in pairs if job_id.isdigit() and state not in _ENDED}


@lru_cache(maxsize=64)
def name_of(job_id: int) -> str:
    """Return what commands call one job: the last task of an array has the array's id, which means all its tasks.

    Raises:
        NoSuchJobError: Slurm does not know the job.
        SlurmUnreachableError: slurmctld does not answer.
    """
    arguments = ["squeue", "--noheader", "--states=all", "--format=%A %F %K", f"--jobs={job_id}"]
    text = _COMMANDS.run(f"read the name of job {job_id}", arguments)
    tasks = (task for own, array, task in map(str.split, text.splitlines()) if own == array == str(job_id))
    return next((f"{job_id}_{task}" for task in tasks if task.isdecimal()), str(job_id))


def job_field(job_id: int, field: str) -> str:
    """Return one long text field of a job as `squeue --Format` names it ("comment", "admin_comment").

    Raises:
        NoSuchJobError: Slurm does not know the job.
        SlurmUnreachableError: slurmctld does not answer.
    """
    text = _COMMANDS.run(
        f"read the {field} of job {job_id}",
        ["squeue", "--noheader", f"--Format=JobID:{_ID_WIDTH},{field}:{_FIELD_WIDTH}", f"--jobs={job_id}",
         "--states=all"],
    )  # fmt: skip
    value = _field_of(job_id, text)
    return "" if value == "(null)" else value


def _field_of(job_id: int, text: str) -> str:
    """Return one job's field from records of a fixed number of bytes: users' texts may hold line ends."""
    output, length = encoded(text), _ID_WIDTH + _FIELD_WIDTH + 1
    for start in range(0, len(output), length):
        record = output[start : start + length]
        if record[:_ID_WIDTH].strip() == str(job_id).encode():
            return decoded(record[_ID_WIDTH:].rstrip())
    raise NoSuchJobError(f"cannot read job {job_id}: squeue does not show it")


def batch_script(job_id: int) -> bytes:
    """Return the batch script of one of the user's own jobs, byte for byte.

    Raises:
        NoSuchJobError: The job is gone or has none.
        SlurmUnreachableError: slurmctld does not answer.
    """
    script = _COMMANDS.run(f"read the script of job {job_id}", ["scontrol", "write", "batch_script", str(job_id), "-"])
    if not script:  # scontrol's exit code is 0 even then
        raise NoSuchJobError(f"cannot read the script of job {job_id}: it has ended, or has none")
    return encoded(script)


def set_comment(job_id: int, comment: str) -> None:
    """Replace the comment of one of the user's own jobs.

    Raises:
        GatewayError: Slurm refused it.
    """
    name = name_of(job_id)
    _COMMANDS.run(f"set the comment of job {name}", ["scontrol", "update", f"jobid={name}", f"comment={comment}"])


def requeue_hold(job_id: int) -> None:
    """Put one of the user's own running jobs back into the queue, held; one that is back there already stays as it is.

    Raises:
        NoSuchJobError: It has ended, or Slurm is ending it: its user cancelled it, perhaps with all others at once.
        GatewayError: Slurm refused it.
    """
    _requeue("requeuehold", job_id)


def requeue(job_id: int) -> None:
    """Put one of the user's own running jobs back into the queue; one that is back there already stays as it is.

    Raises:
        NoSuchJobError: It has ended, or Slurm is ending it.
        GatewayError: Slurm refused it.
    """
    _requeue("requeue", job_id)


def _requeue(command: str, job_id: int) -> None:
    try:
        # Without "incomplete" Slurm runs a cancelled job again once its processes have ended.
        name = name_of(job_id)
        _COMMANDS.run(f"requeue job {name}", ["scontrol", command, "incomplete", name])
    except GatewayError as error:
        if not job_pending(error):
            raise
