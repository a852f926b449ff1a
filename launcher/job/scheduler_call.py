"""What a script's own process asks of the scheduler, through Muri's own Python: only there is what speaks Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from muri.errors import MuriError
from muri.pythons import own_command

MODULE: Final = "muri.launcher.job.scheduler"
REQUEUE_STOPPED: Final = "requeue-stopped"
DECLARE_CHECKPOINT: Final = "declare-checkpoint"
DONE: Final = 0
NOT_RUNNING: Final = 3
"""Exit codes of the process, which prints it, too; with any other one the last line of its stderr says what failed."""

_LIMIT_S: Final = 300.0
"""Slurm's commands try again while slurmctld is away, but not for as long."""


class SchedulerCallError(MuriError):
    """The scheduler could not be asked, or refused."""


def requeue_stopped(job_id: str, run: int) -> bool:
    """Requeue a job that was saved, so that it resumes later; the scheduler then ends its processes.

    Args:
        job_id: The job.
        run: How often it was requeued before.

    Returns:
        Whether it was; False where the scheduler is ending the job anyway.

    Raises:
        SchedulerCallError: The scheduler did not accept it.
    """
    return _call(REQUEUE_STOPPED, job_id, run) == DONE


def declare_checkpoint(job_id: str, run: int) -> None:
    """Tell the controller that this run of the job can be stopped and resumed.

    Raises:
        SchedulerCallError: The scheduler did not accept it.
    """
    _call(DECLARE_CHECKPOINT, job_id, run)


def _call(what: str, job_id: str, run: int) -> int:
    command = [*own_command(os.environ, MODULE), what, job_id, str(run)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SchedulerCallError(f"{command[0]}: {error}") from error
    words = done.stdout.split()
    code = int(words[-1]) if words else done.returncode or 1  # 0 where the script ignores SIGCHLD, whatever it was
    if code not in (DONE, NOT_RUNNING):
        said = done.stderr.strip().splitlines() or [f"{command[0]} ended with exit code {code}"]
        raise SchedulerCallError(said[-1])
    sys.stderr.write(done.stderr)
    return code
