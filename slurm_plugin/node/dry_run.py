"""The dry-run job's own process: run a waiting job's script until its model is measured, then end it.

It reads the batch script from Slurm, as the user: no other process handles that text. `muri run` inside the script
measures and leaves its result in a file; the script is ended right then, so that nothing after the training command
runs. The result goes into the comment of the waiting job, where it stays until the controller has read it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from muri.errors import MuriError
from muri.inherited import PUBLIC, settle_own
from muri.profiler.dryrun.messages import FULL_MEMORY_VARIABLE, NO_JOB, DryRunRequest, Limits
from muri.profiler.dryrun.runner import end, last_words, wait_until
from muri.profiler.errors import SensitivityError
from muri.profiler.sensitivity import CpuSensitivity, Measured, bisect
from muri.profiler.sweep import STEADY_S, Window, cores, environment, usable_cpus, watched_throughput
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError
from muri.slurm_plugin.node.slurm_calls import batch_script, job_record, set_comment
from muri.slurm_plugin.records.comment_reports import SWEEP, comment_with, sweep_figures, with_foreign_python
from muri.slurm_plugin.records.comment_tags import decode_words
from muri.text import json_of

_SLURM_COUNTS: Final = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE")
_LIMITED: Final = "import os, sys; os.sched_setaffinity(0, {cores}); os.execv(sys.argv[1], sys.argv[1:])"


def measure(
    script: bytes, arguments: Sequence[str], limits: Limits, cpus: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Run a batch script until `muri run` in it has measured enough.

    With `cpus`, those that the job asks for and those of the dry run, the script runs again on other numbers of CPUs.

    Returns:
        What `DryRunResult.from_dict` reads, with the CPU axis where it was measured, or {"error": why}.
    """
    with tempfile.TemporaryDirectory(prefix="muri-dryrun-") as folder:
        path = Path(folder, "script")
        path.write_bytes(script)
        path.chmod(0o700)
        command = [str(path), *arguments]
        if cpus is None:
            return _stages(command, limits, Path(folder), None)
        # Of the CPUs that Slurm gave, no more than this machine has can be measured.
        own, most = (max(1, min(given, usable_cpus())) for given in cpus)
        result = _stages(command, limits, Path(folder), own)
        if "error" in result:
            return result
        try:
            return {**result, SWEEP: sweep_figures(_sweep_cpus(command, most, limits.time_limit_s))}
        except MuriError as error:  # the stages are known all the same
            print(f"muri: how it follows its CPUs was not measured: {error}", file=sys.stderr)
            return result


def _stages(command: Sequence[str], limits: Limits, folder: Path, cpus: int | None) -> dict[str, Any]:
    request, output = DryRunRequest(limits, folder / "result.json"), folder / "output"
    variables = {**(os.environ if cpus is None else _with_cpus(cpus, os.environ)), **request.environment()}
    with output.open("wb") as stream:
        try:
            process = _start(command if cpus is None else _limited(command, cpus), variables, stream)
        except OSError as error:  # no such interpreter, or a temporary directory mounted noexec
            return {"error": f"its script cannot be started from {folder}: {error.strerror}"}
        try:
            in_time = wait_until(process, limits.time_limit_s, request.result_path.exists)
        finally:
            end(process)  # and everything it started: its later commands must not run
    return _read(request, process.returncode, output, in_time=in_time)


def _start(command: Sequence[str], variables: Mapping[str, str], output: BinaryIO) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
    )


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


def _with_cpus(count: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Slurm's variables say that a job has so many CPUs."""
    return {**base, **{name: str(count) for name in _SLURM_COUNTS if name in base}}


def _limited(command: Sequence[str], count: int) -> list[str]:
    """A command that affinity keeps on so many cores."""
    return [sys.executable, "-c", _LIMITED.format(cores=sorted(cores(count))), *command]


def _sweep_cpus(command: Sequence[str], most: int, time_limit_s: float) -> CpuSensitivity:
    """Find the CPUs that saturate a script's throughput: it runs once on each of at most eight numbers of CPUs.

    Slurm's variables tell it the number, as they will when a plan gives the job so many.
    """
    deadline_s = time.monotonic() + time_limit_s

    def measure_on(count: int) -> Measured:
        left_s = deadline_s - time.monotonic()
        if left_s < 2 * STEADY_S:
            raise SensitivityError(f"no time is left to measure {count} CPUs")
        window = Window.of_workers(count, STEADY_S, left_s)
        # Ended, a script with checkpoints saves itself; the next run must not resume from there.
        with tempfile.TemporaryDirectory(prefix="muri-sweep-") as checkpoints:
            variables = _with_cpus(count, environment(count, os.environ)) | {
                "MURI_CHECKPOINT_DIR": checkpoints,
                FULL_MEMORY_VARIABLE: os.environ.get("SLURM_JOB_ID", NO_JOB),
            }
            limited = _limited(command, count)
            return watched_throughput(lambda told, output: _start(limited, told, output), variables, window)

    return bisect(measure_on, most)


def publish(target: int, token: str, result: dict[str, Any]) -> None:
    """Put a result into the comment of the job that it was measured for, keeping the user's text.

    Where that job has ended, the dry run's own comment takes it.
    """
    try:
        record = job_record(target)
        set_comment(record.name, comment_with(record.comment, token, result))
    except NoSuchJobError:
        own = job_record(int(os.environ["SLURM_JOB_ID"]))
        print(f"job {target} is gone; the result is in the comment of job {own.name}", file=sys.stderr)
        set_comment(own.name, comment_with(own.comment, token, result))


@click.command()
@click.option("--target", type=int, required=True, help="The waiting job, with the script and for the result.")
@click.option("--token", required=True, help="Name of this dry run.")
@click.option("--limits", "text", required=True, help="How much is measured, as in MURI_DRY_RUN.")
@click.option("--time-limit-s", type=float, required=True, help="Give up after this long.")
@click.option("--words", default="", help="The script's arguments as in the job's facts.")
@click.option("--sweep", type=(int, int), metavar="OWN MOST", help="Measure on up to MOST CPUs; the job asks for OWN.")
def main(*, target: int, token: str, text: str, time_limit_s: float, words: str, sweep: tuple[int, int] | None) -> None:
    """Measure a model with the batch script of a waiting job."""
    limits = replace(Limits.parse(text), time_limit_s=time_limit_s)
    try:
        result = measure(batch_script(target), decode_words(words), limits, sweep)
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
