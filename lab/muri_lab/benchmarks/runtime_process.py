"""Starts a group's runtime for a benchmark."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from muri.group_spec import GroupSpec
from muri.launcher.protocol import NO_JOB, PILOT_VARIABLE

START_LIMIT_S = 90.0
MURI_RUN = (sys.executable, "-c", "from muri.cli import main; main()", "run")
"""In front of a script and its arguments: the command of a member."""


class BenchmarkError(Exception):
    """A job or the runtime failed; the text says which and how."""


def socket_folder(folder: Path) -> Path:
    """The run directory of the runtime that works in this folder."""
    return folder / "run"


def as_member(folder: Path, job_id: str) -> dict[str, str]:
    """Return the variables by which a job finds this folder's runtime, as they are set in a member's job."""
    return {"SLURM_JOB_ID": job_id, "MURI_RUN_DIR": str(socket_folder(folder)), PILOT_VARIABLE: NO_JOB}


def start_runtime(
    folder: Path,
    group: GroupSpec,
    *options: str,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> "subprocess.Popen[bytes]":
    """Start a runtime and wait until members can come; it is the caller's to end."""
    status, output = folder / "status.json", folder / "runtime.out"
    command = [python, "-m", "muri.launcher.runtime.main", "--group", group.to_text()]
    command += ["--run-dir", str(socket_folder(folder)), "--status-file", str(status), *options]
    with output.open("wb") as out:
        # Not in a checkout: `python -m` looks there first, where `muri/` hides the other rooms.
        runtime = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        _await(status, runtime, output)
    except BaseException:
        runtime.kill()
        runtime.wait()
        raise
    return runtime


def _await(status: Path, runtime: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while not status.exists():
        if runtime.poll() is not None or time.monotonic() > deadline_s:
            raise BenchmarkError(f"the runtime did not start: {output.read_text()}")
        time.sleep(0.05)
