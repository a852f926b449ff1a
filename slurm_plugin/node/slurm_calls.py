"""The few Slurm commands that run on compute nodes, in the user's name, inside a job, and the pauses between them.

Thousands of pilot jobs and members call them, so each is about one job and costs slurmctld well below a millisecond.
`squeue --jobs` with several ids fetches the whole job table. docs/operations.md counts the calls of a job's life.
Refusals of Slurm are GatewayErrors: a SlurmUnreachableError where slurmctld does not answer, a NoSuchJobError where the
job has ended, is ending, or is unknown.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from muri.slurm_plugin.gateway.base import NoSuchJobError, job_pending, passing_over
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands, decoded, encoded
from muri.slurm_plugin.records.cluster import JobState

_COMMANDS = SlurmCommands(timeout_s=30.0)

_TEXT_WIDTH: Final = 32768
"""Bytes; squeue cuts a longer text off."""

_WIDTHS: Final = {
    "JobID": 16, "ArrayJobID": 16, "ArrayTaskID": 32, "State": 32, "comment": _TEXT_WIDTH, "admin_comment": _TEXT_WIDTH,
}  # fmt: skip
"""Fields as `squeue --Format` names them, and their bytes."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What Slurm shows of one job."""

    name: str  # Its id for commands: the last task of an array has the array's id, which means all its tasks
    state: str  # Slurm's word, such as PENDING
    comment: str  # Its own comment
    admin_comment: str  # Its AdminComment

    @property
    def is_active(self) -> bool:
        """Whether it still waits or runs."""
        return JobState.__members__.get(self.state, JobState.UNKNOWN).is_active


def job_record(job_id: int) -> JobRecord:
    """Return what Slurm shows of one job, in one call."""
    fields = ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())
    # --local: the job runs in this cluster, so slurmctld need not be asked about a federation first.
    command = ["squeue", "--noheader", "--local", f"--Format={fields}", f"--jobs={job_id}", "--states=all"]
    text = _COMMANDS.run(f"read job {job_id}", command)
    # Records of a fixed number of bytes: users' texts may hold line ends. An array's id brings its other tasks, too.
    output, length = encoded(text), sum(_WIDTHS.values()) + 1
    for start in range(0, len(output), length):
        values, end = {}, start
        for name, width in _WIDTHS.items():
            value = decoded(output[end : end + width].rstrip())
            values[name], end = "" if value == "(null)" else value, end + width
        if values["JobID"] == str(job_id):
            is_task = values["ArrayJobID"] == str(job_id) and values["ArrayTaskID"].isdecimal()
            name = f"{job_id}_{values['ArrayTaskID']}" if is_task else str(job_id)
            return JobRecord(name, values["State"], values["comment"], values["admin_comment"])
    raise NoSuchJobError(f"cannot read job {job_id}: squeue does not show it")


def state_of(job_id: int) -> str:
    """Return the state of a job that waits or runs, "" for one that has ended."""
    try:
        record = job_record(job_id)
    except NoSuchJobError:
        return ""
    return record.state if record.is_active else ""


def batch_script(job_id: int) -> bytes:
    """Return the batch script of one of the user's own jobs, byte for byte."""
    script = _COMMANDS.run(f"read the script of job {job_id}", ["scontrol", "write", "batch_script", str(job_id), "-"])
    if not script:  # scontrol's exit code is 0 even then
        raise NoSuchJobError(f"cannot read the script of job {job_id}: it has ended, or has none")
    return encoded(script)


def set_comment(name: str, comment: str) -> None:
    """Replace the comment of one of the user's own jobs."""
    _COMMANDS.run(f"set the comment of job {name}", ["scontrol", "update", f"jobid={name}", f"comment={comment}"])


def requeue(name: str, *, held: bool = False) -> None:
    """Put one of the user's own running jobs back into the queue; one that is back there already stays as it is."""
    command = "requeuehold" if held else "requeue"
    with passing_over(job_pending):
        # Without "incomplete" Slurm runs a cancelled job again once its processes have ended.
        _COMMANDS.run(f"requeue job {name}", ["scontrol", command, "incomplete", name])


_SPREAD: Final = 0.2
"""By which share a pause may be shorter or longer."""


def growing_pauses(first_s: float, most_s: float, job_id: int) -> Iterator[float]:
    """Yield pauses between questions to Slurm, each twice as long as the one before, up to a limit.

    Thousands of jobs must not all ask at once, so pauses are a little off by chance: the same for the same job.
    """
    chance = random.Random(job_id)  # noqa: S311 (no secret)
    pause_s = min(first_s, most_s)
    while True:
        yield pause_s * chance.uniform(1 - _SPREAD, 1 + _SPREAD)
        pause_s = min(2 * pause_s, most_s)
