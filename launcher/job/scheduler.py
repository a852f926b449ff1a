"""What the launcher asks of Slurm: is this job a member of a group, and requeue it.

A script's own process asks through Muri's own Python (`python -m` this module): only there is what speaks Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from muri.errors import MuriError
from muri.inherited import settle
from muri.pythons import own_command

if TYPE_CHECKING:
    from muri.slurm_plugin.node.membership import SlurmMembership

    Membership = SlurmMembership
else:
    Membership = Any

MODULE: Final = "muri.launcher.job.scheduler"
REQUEUE_STOPPED: Final = "requeue-stopped"  # a job that was saved in this run
REQUEUE_FOR_MEMORY: Final = "requeue-for-memory"  # one that ran out of GPU memory beside others
DECLARE_CHECKPOINT: Final = "declare-checkpoint"  # tell the controller that this run can be stopped and resumed
DONE: Final = 0
NOT_DONE: Final = 3
"""Exit codes of the process, which prints it, too; with any other one the last line of its stderr says what failed."""

_LIMIT_S: Final = 300.0
"""Slurm's commands try again while slurmctld is away, but not for as long."""


class MembershipError(MuriError):
    """The scheduler's part is not installed or broken; trying again cannot help."""

    worth_retrying = False


class SchedulerCallError(MuriError):
    """The scheduler could not be asked, or refused."""


def load_membership() -> Membership:
    """Return what speaks Slurm; loading it takes tens of milliseconds, which most runs of `muri run` can save."""
    try:
        made: Membership = import_module("muri.slurm_plugin.node.membership").SlurmMembership()
    except ImportError as error:
        raise MembershipError(f"Muri's Slurm part cannot be used: {error}; install Muri anew") from error
    return made


def ask_slurm(what: str, job_id: str, run: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Ask for a script, with its variables; return False if its job is not requeued, because it ends or may not.

    Raises:
        SchedulerCallError: Slurm did not accept it.
    """
    command = [*own_command(environment, MODULE), what, job_id, str(run)]
    try:
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            limit = threading.Timer(_LIMIT_S, process.kill)
            limit.start()
            complaint = _pass_on(process)
            words = process.communicate()[0].split()
            limit.cancel()
    except OSError as error:
        raise SchedulerCallError(f"{command[0]}: {error}") from error
    code = int(words[-1]) if words else process.returncode or 1  # 0 where the script ignores SIGCHLD, whatever it was
    if code not in (DONE, NOT_DONE):
        raise SchedulerCallError(complaint or f"{command[0]} ended with exit code {code}")
    return code == DONE


def _pass_on(process: subprocess.Popen[str]) -> str:
    """Pass on at once what is said to the user, before Slurm may end this job; return the last line of all."""
    line = ""
    for line in process.stderr or ():
        if line.startswith("muri:"):
            sys.stderr.write(line)
            sys.stderr.flush()
    return line.strip()


def answer(arguments: Sequence[str]) -> int:
    """Do what the arguments from a script's process ask for, and return the exit code."""
    what, job_id, run = arguments
    try:
        membership = load_membership()
        if what == DECLARE_CHECKPOINT:
            membership.declare_checkpoint(job_id, int(run))
        elif what == REQUEUE_FOR_MEMORY:
            return DONE if membership.requeue_for_memory(job_id) else NOT_DONE
        elif membership.runs(job_id):
            membership.requeue_stopped(job_id, int(run))
        else:
            return NOT_DONE
    except MuriError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return DONE


if __name__ == "__main__":
    settle()
    exit_code = answer(sys.argv[1:])
    print(exit_code)
    sys.exit(exit_code)
