"""What happens to a script with a checkpoint that is asked to stop, alone and in a group."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Final, NoReturn

from muri.errors import MuriError
from muri.launcher.checkpoints.registry import Checkpointer
from muri.launcher.job.environment import wait_for_end
from muri.launcher.job.scheduler_call import declare_checkpoint, requeue_stopped
from muri.launcher.job.script import wait_for_gloo_at_exit
from muri.launcher.threads import current_script

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's own SIGTERM, and what users choose for `--signal`."""

STOPPED_CODE: Final = 128 + signal.SIGTERM
"""Exit code of a script that was stopped after it had been saved."""

_RUN_VARIABLE: Final = "SLURM_RESTART_COUNT"


class ScriptStoppedError(SystemExit):
    """Ends a script after its state was saved; its `finally` blocks run."""


def watch(checkpointer: Checkpointer) -> None:
    """Let stop signals ask for a checkpoint, and tell the controller that the job has one.

    A handler that the script has set is called as well. In a group the runtime delivers the signals.
    """
    environment = dict(os.environ)
    if current_script() is None:
        wait_for_gloo_at_exit()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                _chain(number, checkpointer)
    if environment.get("SLURM_JOB_ID") and wants_requeue(environment) and checkpointer.is_first_rank:
        threading.Thread(target=_declare, args=(environment,), name="declare-checkpoint", daemon=True).start()


def end_script(iteration: int) -> NoReturn:
    """End the calling script, which was saved; alone, requeue its job if its submit option asks for that.

    Raises:
        ScriptStoppedError: Always.
    """
    print(f"muri: saved at iteration {iteration}, the script stops", file=sys.stderr, flush=True)
    requeue_if_wanted()
    raise ScriptStoppedError(STOPPED_CODE)


def requeue_if_wanted() -> None:
    """Requeue a job that runs alone; in a group the member's own process does it."""
    if current_script() is None:
        conclude(os.environ)


def wants_requeue(environment: Mapping[str, str]) -> bool:
    """Whether the job was submitted with `--muri=checkpoint`; a step has the option as its user typed it."""
    items = environment.get("MURI_JOB", "").lower().split(",")
    return not {"checkpoint", *(f"checkpoint={yes}" for yes in ("1", "yes", "on", "true"))}.isdisjoint(items)


def conclude(environment: Mapping[str, str]) -> None:
    """Requeue a job that was saved before its time limit; leave one that Slurm is ending already alone.

    Waits for Slurm to end this process, so that the batch script does not go on meanwhile.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id or not wants_requeue(environment) or environment.get("SLURM_PROCID", "0") != "0":
        return
    try:
        if not requeue_stopped(job_id, run_of(environment)):
            return
    except MuriError as error:
        print(f"muri: job {job_id} was saved but could not be requeued: {error}", file=sys.stderr, flush=True)
        return
    print(f"muri: job {job_id} goes back to the queue", file=sys.stderr, flush=True)
    with contextlib.suppress(ValueError):  # only the main thread can
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    wait_for_end(environment)


def run_of(environment: Mapping[str, str]) -> int:
    """How often the job was requeued before this run."""
    text = environment.get(_RUN_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def _chain(number: int, checkpointer: Checkpointer) -> None:
    before = signal.getsignal(number)
    if before == signal.SIG_IGN:
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        checkpointer.ask_stop()
        if callable(before):
            before(signum, frame)

    signal.signal(number, stop)


def _declare(environment: Mapping[str, str]) -> None:
    """Tell the controller; if that fails, the job is never preempted, and nothing else is lost."""
    with contextlib.suppress(MuriError):
        declare_checkpoint(environment["SLURM_JOB_ID"], run_of(environment))
