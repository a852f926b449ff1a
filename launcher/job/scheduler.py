"""What the launcher asks of the scheduler: is this job a member of a group, and requeue it.

A script's own process asks through Muri's own Python (`python -m` this module): only there is what speaks Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from muri.errors import MuriError
from muri.inherited import settle
from muri.pythons import own_command

if TYPE_CHECKING:
    from muri.group_spec import Place

ENTRY_POINTS: Final = "muri.schedulers"
"""Group of the entry points by which a scheduler makes itself known (pyproject.toml)."""

OWN: Final = ("slurm", "muri.slurm_plugin.node.membership:SlurmMembership")
"""Muri's own scheduler, for a Python that finds Muri through PYTHONPATH and so knows no entry points."""

MODULE: Final = "muri.launcher.job.scheduler"
REQUEUE_STOPPED: Final = "requeue-stopped"
REQUEUE_FOR_MEMORY: Final = "requeue-for-memory"
DECLARE_CHECKPOINT: Final = "declare-checkpoint"
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


class Membership:
    """A job's standing with the scheduler; each method raises a `MuriError` when the scheduler cannot do it now.

    This one stands in where there is no scheduler: there are no groups, and no job can be requeued.
    """

    def await_place(self, job_id: str) -> Place | None:
        """As `place_of`, but ask until the scheduler answers: running alone could mean running twice."""
        return None

    def requeue(self, job_id: str, reason: str) -> None:
        """Put the job back into the queue; the scheduler then ends its processes."""
        raise MembershipError(f"job {job_id} cannot be requeued: Muri's Slurm part is not installed here")

    def place_of(self, job_id: str) -> Place | None:
        """The place of the job in the group that it was released to run in, None when it is in none."""
        return None

    def runs(self, job_id: str) -> bool:
        """Whether the job runs and is not being ended; a job that cannot be requeued counts as not running."""
        return False

    def requeue_for_memory(self, job_id: str) -> bool:
        """Requeue a job that ran out of GPU memory beside others, to ask for more or run alone then.

        False where no controller would plan it again, or it was put back too often.
        """
        return False

    def requeue_stopped(self, job_id: str, run: int) -> None:
        """Requeue a job that was saved in its run number `run`, so that it resumes later; its processes are ended."""
        self.requeue(job_id, "")

    def declare_checkpoint(self, job_id: str, run: int) -> None:
        """Tell the controller that this run of the job can be stopped and resumed."""

    def groups(self) -> list[dict[str, Any]]:
        """The caller's running groups on all nodes, each in the form of a runtime's status file, as far as is known."""
        return []


def load_membership() -> Membership:
    """Return the scheduler that is installed here by an entry point, Muri's own where there is none.

    Raises:
        MembershipError: Several are installed, or the one cannot be used.
    """
    # Costs tens of milliseconds, which most runs of `muri run` can save.
    from importlib.metadata import EntryPoint, entry_points

    points = tuple(entry_points(group=ENTRY_POINTS)) or (EntryPoint(*OWN, ENTRY_POINTS),)
    if len(points) > 1:
        names = ", ".join(f"{point.name} ({point.value})" for point in points)
        raise MembershipError(f"several schedulers are installed for Muri: {names}; uninstall all but one")
    try:
        return cast("Membership", points[0].load()())
    except (ImportError, AttributeError) as error:
        raise MembershipError(
            f"the scheduler {points[0].name} ({points[0].value}) cannot be used: {error}; install Muri anew"
        ) from error


def requeue_stopped(job_id: str, run: int) -> bool:
    """Requeue a job that was saved, from the script's own process; return False if it is being ended anyway.

    Raises:
        SchedulerCallError: The scheduler did not accept it.
    """
    return _call(REQUEUE_STOPPED, job_id, run) == DONE


def requeue_for_memory(job_id: str, run: int) -> bool:
    """Requeue a job that ran out of GPU memory beside others, from the script's own process; see `Membership`.

    Raises:
        SchedulerCallError: The scheduler did not accept it.
    """
    return _call(REQUEUE_FOR_MEMORY, job_id, run) == DONE


def declare_checkpoint(job_id: str, run: int) -> None:
    """Tell the controller, from the script's own process, that this run of the job can be stopped and resumed.

    Raises:
        SchedulerCallError: The scheduler did not accept it.
    """
    _call(DECLARE_CHECKPOINT, job_id, run)


def _call(what: str, job_id: str, run: int) -> int:
    command = [*own_command(os.environ, MODULE), what, job_id, str(run)]
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    return code


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
