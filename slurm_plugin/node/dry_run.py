"""The dry-run job's own process: run a script until its model is measured, then end it.

It reads the waiting job's batch script from Slurm, as the user: no other process handles that text. `muri run` inside
the script measures and leaves its result in a file; the script is ended right then, so that nothing after the training
command runs. The result goes into the comment of the waiting job, where it stays until the controller has read it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from muri.errors import MuriError
from muri.foreign import json_of
from muri.inherited import PUBLIC, settle_own
from muri.profiler.dryrun.messages import DryRunRequest, Limits
from muri.profiler.dryrun.runner import end, last_words
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError
from muri.slurm_plugin.node.cpu_sweep import limited, most_cpus, sweep_cpus, told_cpus
from muri.slurm_plugin.node.slurm_calls import batch_script, job_record, set_comment
from muri.slurm_plugin.records.comment_reports import SWEEP, comment_with, sweep_figures, with_foreign_python
from muri.slurm_plugin.records.submission import decode_words

_TICK_S = 0.05


class Cpus(NamedTuple):
    """CPUs of a dry run that measures the CPU axis, too.

    Attributes:
        own: What the waiting job asks for, with which its stages are measured.
        most: What the dry run has.
    """

    own: int
    most: int


def measure(script: bytes, arguments: Sequence[str], limits: Limits, cpus: Cpus | None = None) -> dict[str, Any]:
    """Run a batch script until `muri run` in it has measured enough, and again on other numbers of CPUs.

    Args:
        script: The batch script.
        arguments: Its arguments.
        limits: How much it may take.
        cpus: How many there are for a sweep; None: no sweep.

    Returns:
        What `DryRunResult.from_dict` reads, with the CPU axis where it was measured, or {"error": why}.
    """
    with tempfile.TemporaryDirectory(prefix="muri-dryrun-") as folder:
        path = Path(folder, "script")
        path.write_bytes(script)
        path.chmod(0o700)
        command = [str(path), *arguments]
        result = _stages(command, limits, Path(folder), None if cpus is None else most_cpus(cpus.own))
        if cpus is None or "error" in result:
            return result
        try:
            return {**result, SWEEP: sweep_figures(sweep_cpus(command, cpus.most, limits.time_limit_s))}
        except MuriError as error:  # the stages are known all the same
            print(f"muri: how it follows its CPUs was not measured: {error}", file=sys.stderr)
            return result


def _stages(command: Sequence[str], limits: Limits, folder: Path, cpus: int | None) -> dict[str, Any]:
    request, output = DryRunRequest(limits, folder / "result.json"), folder / "output"
    environment = {**(os.environ if cpus is None else told_cpus(cpus, os.environ)), **request.environment()}
    with output.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command if cpus is None else limited(command, cpus),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:  # no such interpreter, or a temporary directory mounted noexec
            return {"error": f"its script cannot be started from {folder}: {error.strerror}"}
        try:
            in_time = _wait(process, request)
        finally:
            end(process)  # and everything it started: its later commands must not run
    return _read(request, process.returncode, output, in_time=in_time)


def _wait(process: "subprocess.Popen[bytes]", request: DryRunRequest) -> bool:
    """Wait for the result or the end of the script; False when it took too long."""
    deadline_s = time.monotonic() + request.limits.time_limit_s
    while process.poll() is None and not request.result_path.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_TICK_S)
    return True


def _read(request: DryRunRequest, code: int, output: Path, *, in_time: bool) -> dict[str, Any]:
    value: dict[str, Any] = {"error": f"the script ended with code {code} too early"}
    try:
        if not in_time:
            value = {"error": f"no result within {request.limits.time_limit_s:g} s"}
        elif request.result_path.exists():
            value = dict(json_of(request.result_path.read_text()))
    except ValueError:
        value = {"error": "the launcher left an unreadable result"}
    if "error" in value:
        words = last_words(output)
        value["error"] += f"; its last words: {words}" if words else ""
    return value


def publish(target: int, token: str, result: dict[str, Any]) -> None:
    """Put a result into the comment of the job that it was measured for, keeping the user's text.

    Where that job has ended, the dry run's own comment takes it.

    Raises:
        GatewayError: Slurm refused it.
    """
    try:
        _tell(target, token, result)
    except NoSuchJobError:
        own = int(os.environ["SLURM_JOB_ID"])
        print(f"job {target} is gone; the result is in the comment of job {own}", file=sys.stderr)
        _tell(own, token, result)


def _tell(job_id: int, token: str, result: dict[str, Any]) -> None:
    record = job_record(job_id)
    set_comment(record.name, comment_with(record.comment, token, result))


@click.command()
@click.option("--target", type=int, required=True, help="The waiting job, with the script and for the result.")
@click.option("--token", required=True, help="Name of this dry run.")
@click.option("--limits", "text", required=True, help="How much is measured, as in MURI_DRY_RUN.")
@click.option("--time-limit-s", type=float, required=True, help="Give up after this long.")
@click.option("--words", default=None, help="The arguments as in the job's facts, instead of ARGUMENTS.")
@click.option("--sweep", type=(int, int), metavar="OWN MOST", help="Measure on up to MOST CPUs; the job asks for OWN.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(
    *,
    target: int,
    token: str,
    text: str,
    time_limit_s: float,
    words: str | None,
    sweep: tuple[int, int] | None,
    arguments: tuple[str, ...],
) -> None:
    """Measure a model with the batch script of a waiting job, called with ARGUMENTS."""
    if words is not None:
        arguments = decode_words(words)
    limits = replace(Limits.parse(text), time_limit_s=time_limit_s)
    try:
        swept = Cpus(*sweep) if sweep else None
        result = measure(batch_script(target), arguments, limits, swept)
    except GatewayError as error:
        result = {"error": str(error)}
    result = with_foreign_python(result, sys.prefix)
    print(json.dumps(result))
    try:
        publish(target, token, result)
    except GatewayError as error:
        print(f"muri: cannot publish the result: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(1 if "error" in result else 0)


if __name__ == "__main__":
    settle_own(PUBLIC)
    main()
