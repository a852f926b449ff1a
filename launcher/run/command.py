"""The command `muri run`: alone it is `python script.py`; in a group it attaches to the runtime."""

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

import click

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError, UsageError
from muri.inherited import give_back
from muri.launcher.job.environment import (
    attach_timeout_s,
    hang_timeout_s,
    missing_variables,
    requeue_wait_s,
    run_of,
    task_of,
    wait_for_end,
)
from muri.launcher.job.scheduler import Membership, load_membership
from muri.launcher.run.client import (
    OutOfMemoryBesideOthersError,
    RuntimeLostError,
    attach,
    await_earlier_run,
    build_request,
    find_runtime,
    wait_for_runtime,
)
from muri.launcher.run.python_line import PythonLine, read_line
from muri.launcher.script import script_clock, solo
from muri.launcher.script.hooks import AUTOMATIC_VARIABLE
from muri.launcher.script.trace import require_writable
from muri.launcher.wire.protocol import ISOLATION_VARIABLE, ProtocolError
from muri.profiler.dryrun.messages import DRY_RUN_VARIABLE, DryRunRequest
from muri.pythons import PYTHON_VARIABLE, ScriptPython, script_python, with_library
from muri.rendezvous import RendezvousError

REQUEUE_DELAYS_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)

EPILOG = """
\b
Examples:
  muri run train.py --lr 0.1          as python train.py --lr 0.1
  muri run -m my.training --epochs 3  as python -m my.training --epochs 3
  muri run python -u train.py         the same as muri run -u train.py
  muri run torchrun train.py          a Python program of PATH
  muri run --timing train.py          stage times on stderr at the end
  muri run --trace t.json train.py    every stage, for ui.perfetto.dev

Everything after SCRIPT belongs to the script. Stages of PyTorch scripts are found by
themselves; muri.stage("load"), "preprocess", "propagate", "synchronize" and
muri.batches(loader) mark them by hand.
"""


class _AsPython(click.Command):
    """A command whose line is Python's, with options of its own before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the line; click reads the command's own options."""
        if ctx.resilient_parsing:  # a shell asks for completions: the line is not whole yet
            return super().parse_args(ctx, [])
        own = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        valued = {name for option in own if not option.is_flag for name in option.opts}
        try:
            line = read_line(args, valued, {name for option in own for name in option.opts} - valued)
        except click.NoSuchOption as error:
            error.ctx = ctx
            raise
        super().parse_args(ctx, list(line.own))
        if not line.target:
            raise click.UsageError("Missing argument 'SCRIPT'.", ctx)
        ctx.params["line"] = line
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Say what follows the options."""
        return [*super().collect_usage_pieces(ctx), "[-m MODULE | -c CODE | - | SCRIPT]", "[ARGUMENTS]..."]


@click.command(cls=_AsPython, epilog=EPILOG)
@click.option("--no-attach", is_flag=True, help="Run alone even when the group's runtime is there.")
@click.option(
    "--isolation",
    type=click.Choice(["thread", "process"]),
    envvar=ISOLATION_VARIABLE,
    help="process: never a thread of its group's runtime; thread: as the scheduler planned (or set MURI_ISOLATION).",
)
@click.option(
    "--no-automatic",
    is_flag=True,
    expose_value=False,
    callback=lambda _context, _option, given: _leave_hooks_out(given),
    help="Only stages that the script marks (or set MURI_AUTOMATIC=0).",
)
@click.option("--timing", is_flag=True, help="Print stage times on stderr at the end (or set MURI_TIMING=1).")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a trace of all stages to FILE, for Perfetto.")
def run(no_attach: bool, isolation: str | None, timing: bool, trace: str | None, line: PythonLine) -> int:
    """Run a training script; inside a group, interleave it with its partners.

    Alone this is `python SCRIPT …`. Before SCRIPT may stand `python` itself and its options -b -B -d -O -P -q -R -s -u
    -v -W -X; SCRIPT may be a Python program of PATH, such as torchrun. When the job is a member of a Muri group, the
    script runs on the group's GPUs, in your own Python: output, signals and the exit code are passed through.
    """
    for duration_s in (hang_timeout_s, attach_timeout_s, requeue_wait_s):
        duration_s(os.environ)  # refuse a malformed value now rather than overlook it later
    if isolation is not None:
        os.environ[ISOLATION_VARIABLE] = isolation
    if timing:
        os.environ[script_clock.TIMING_VARIABLE] = "1"
    if trace is not None:
        os.environ[script_clock.TRACE_VARIABLE] = str(Path(trace).absolute())
    require_writable(os.environ.get(script_clock.TRACE_VARIABLE, ""))
    if line.python and (os.sep in line.python or (not os.environ.get(PYTHON_VARIABLE) and shutil.which(line.python))):
        os.environ[PYTHON_VARIABLE] = line.python
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id and not no_attach and not os.environ.get(DRY_RUN_VARIABLE):
        code = _run_in_group(job_id, line)
        if code is not None:
            return code
    return _run_alone(script_python(os.environ), line)


def _leave_hooks_out(given: bool) -> None:
    if given:
        os.environ[AUTOMATIC_VARIABLE] = "0"


def _run_alone(python: ScriptPython, line: PythonLine) -> int:
    hooks, several_ranks = solo.wants_stages(os.environ), task_of(os.environ)[1] > 1
    if hooks and python.why_too_old:
        raise UsageError(python.why_too_old)
    runner = ["-m", "muri.launcher.script.solo"] if hooks or (several_ranks and not python.why_too_old) else []
    module = ["-m"] if line.module else []
    command = [python.executable, *line.options, *runner, *module, line.target, *line.arguments]
    request = DryRunRequest.from_environment(os.environ)
    os.environ.update(missing_variables(os.environ))
    if not python.is_own:
        os.environ.update(with_library(os.environ))
    if request is None:
        sys.stdout.flush()
        sys.stderr.flush()
        give_back()
        os.execv(python.executable, command)  # this process becomes the script's
    from muri.launcher.run.dry_run import supervise

    return supervise(command, request, python)


def _run_in_group(job_id: str, line: PythonLine) -> int | None:
    """The exit code of the script in the group's runtime, None when the job should run alone."""
    membership: Membership | None = None
    try:
        if run_of(os.environ):
            await_earlier_run(os.environ, job_id)
            connection = None
        else:
            connection = _trusted_runtime(job_id)
        if connection is None and may_be_member(os.environ):
            membership = load_membership()
            connection = wait_for_runtime(os.environ, job_id, membership)
        if connection is None:
            return None
        return _attach(connection, job_id, line)
    except RuntimeLostError as error:
        give_up(job_id, error, membership or load_membership())
    except OutOfMemoryBesideOthersError as error:
        return try_with_more_memory(job_id, error, membership or load_membership())


def _attach(connection: socket.socket, job_id: str, line: PythonLine) -> int:
    """As `attach`; under a Python in which Muri cannot run, the job goes back and runs alone."""
    python = script_python(os.environ)
    if python.why_too_old:
        connection.close()
        raise RuntimeLostError(python.why_too_old)
    return attach(connection, build_request(job_id, line, python))


def _trusted_runtime(job_id: str) -> socket.socket | None:
    """A connection to the job's runtime; None if it cannot be trusted: no job may fail for what others have made."""
    try:
        return find_runtime(os.environ, job_id)
    except (RendezvousError, ProtocolError) as error:
        then = "" if may_be_member(os.environ) else ". The script runs alone."
        click.echo(f"muri: {error}{then}", err=True)
        return None


def may_be_member(environment: Mapping[str, str]) -> bool:
    """Whether a job with this environment could be a member that is still without its runtime.

    The controller removes a member's own request for GPUs, so a member sees none.
    """
    if not environment.get("MURI_JOB"):
        return False
    seen = [environment.get(name) for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES")]
    return all(value in {None, "", "NoDevFiles", "-1"} for value in seen)


def try_with_more_memory(job_id: str, error: OutOfMemoryBesideOthersError, membership: Membership) -> int:
    """Requeue the job if it may try again; else, and where Slurm refuses, it fails as it would have alone.

    Returns:
        The script's exit code.
    """
    try:
        if membership.requeue_for_memory(job_id):
            wait_for_end(os.environ)
    except MuriError as failure:
        click.echo(f"muri: {error}, and the job could not be requeued: {failure}", err=True)
    return error.exit_code


def give_up(job_id: str, error: RuntimeLostError, membership: Membership, clock: Clock = MACHINE_CLOCK) -> NoReturn:
    """Requeue the job and wait to be ended; the script must neither end as if done nor run twice.

    Raises:
        RuntimeLostError: Always, when nothing ended this process in the meantime.
    """
    click.echo(f"muri: {error}; requeueing job {job_id}", err=True)
    for delay_s in (*REQUEUE_DELAYS_S, None):
        try:
            membership.requeue(job_id, str(error))
            break
        except MuriError as failure:
            if delay_s is None or not getattr(failure, "worth_retrying", True):
                raise RuntimeLostError(f"{error}; and the job could not be requeued: {failure}") from failure
            clock.sleep(delay_s)
    wait_for_end(os.environ, clock)
    raise RuntimeLostError(f"{error}; job {job_id} was requeued but this process was not ended") from error
