"""The dry-run job's own process: run a script until its model is measured, then end it.

The user's batch script arrives on standard input. `muri run` inside it measures and leaves its result in a
file; the script is ended right then, so that nothing after the training command runs. The result goes into
the comment of the waiting job, where it stays until the controller has read it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from muri.slurm_plugin import tags
from muri.slurm_plugin.gateway import GatewayError, NoSuchJobError
from muri.slurm_plugin.node_commands import job_field, set_comment

_TICK_S = 0.05
_GRACE_S = 5.0
_ERROR_CHARACTERS = 300
_OUTPUT_TAIL_BYTES = 400


def measure(
    script: bytes, arguments: Sequence[str], iterations: int, warmup: int, time_limit_s: float
) -> dict[str, Any]:
    """Run a batch script until `muri run` in it has measured enough.

    Args:
        script: The batch script.
        arguments: Its arguments.
        iterations: Iterations to run, warm-up included.
        warmup: Iterations that are dropped.
        time_limit_s: Give up after this long.

    Returns:
        The figures of a StageProfile, or {"error": why}.
    """
    with tempfile.TemporaryDirectory(prefix="muri-dryrun-") as folder:
        path, result, output = Path(folder, "script"), Path(folder, "result.json"), Path(folder, "output")
        path.write_bytes(script)
        path.chmod(0o700)
        environment = {**os.environ, "MURI_DRY_RUN": f"{iterations}:{warmup}", "MURI_DRY_RUN_RESULT": str(result)}
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )
            try:
                _wait(process, result, time_limit_s)
            finally:
                _end(process)
        return _read(result, process.returncode, output, time_limit_s)


def _wait(process: "subprocess.Popen[bytes]", result: Path, time_limit_s: float) -> None:
    deadline_s = time.monotonic() + time_limit_s
    while process.poll() is None and not result.exists() and time.monotonic() < deadline_s:
        time.sleep(_TICK_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the script and everything it started; its later commands must not run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _read(result: Path, code: int, output: Path, time_limit_s: float) -> dict[str, Any]:
    try:
        value = json.loads(result.read_text())
    except FileNotFoundError:
        late = code == -signal.SIGTERM
        error = f"no result within {time_limit_s:g} s" if late else f"the script ended with code {code} too early"
        value = {"error": error}
    except ValueError:
        value = {"error": "the launcher left an unreadable result"}
    if "error" in value:
        tail = output.read_bytes()[-_OUTPUT_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        value["error"] += f"; its last words: {tail[-1]}" if tail else ""
    return dict(value)


def publish(target: int, token: str, result: dict[str, Any]) -> None:
    """Put a result into the comment of the job that it was measured for, keeping the user's text.

    Where that job has ended, the dry run's own comment takes it.

    Raises:
        GatewayError: Slurm refused it.
    """
    if "error" in result:
        result = {"error": str(result["error"])[:_ERROR_CHARACTERS]}
    text = tags.format_json({**result, "token": token})
    try:
        set_comment(target, tags.with_token(job_field(target, "comment"), tags.PROFILE_PREFIX, text))
    except NoSuchJobError:
        own = int(os.environ["SLURM_JOB_ID"])
        print(f"job {target} is gone; the result stands in the comment of job {own}", file=sys.stderr)
        set_comment(own, tags.with_token(job_field(own, "comment"), tags.PROFILE_PREFIX, text))


@click.command()
@click.option("--target", type=int, required=True, help="The waiting job whose comment takes the result.")
@click.option("--token", required=True, help="Name of this dry run.")
@click.option("--iterations", type=int, required=True, help="Iterations to run, warm-up included.")
@click.option("--warmup", type=int, required=True, help="Iterations that are dropped.")
@click.option("--time-limit-s", type=float, required=True, help="Give up after this long.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(
    target: int, token: str, iterations: int, warmup: int, time_limit_s: float, arguments: tuple[str, ...]
) -> None:
    """Measure a model with the batch script on standard input, called with ARGUMENTS."""
    result = measure(sys.stdin.buffer.read(), arguments, iterations, warmup, time_limit_s)
    print(json.dumps(result))
    try:
        publish(target, token, result)
    except GatewayError as error:
        print(f"muri: cannot publish the result: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(1 if "error" in result else 0)


if __name__ == "__main__":
    main()
