"""Models measured while they train: against loops with known stage times, alone in their group and in company."""

import json
import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from muri.group_spec import GroupSpec, MemberSpec
from muri.profiler.dryrun.messages import DryRunResult
from muri_lab.benchmarks.machine import describe_machine
from muri_lab.benchmarks.runtime_process import MURI_RUN, BenchmarkError, socket_folder, start_runtime

HERE = Path(__file__).parent
RESULT = HERE / "results" / "in_place.json"
JOB = HERE / "dry_run_job.py"
LIMIT_S = 180.0

CASES = {
    "storage": (70, 10, 12, 8),
    "cpu": (10, 60, 15, 10),
    "gpu": (8, 12, 75, 10),
    "network": (8, 10, 12, 55),
}
"""Milliseconds of each stage."""

GROUPS = (("storage",), ("cpu",), ("gpu",), ("network",), ("storage", "gpu"), ("gpu", "gpu"), tuple(CASES))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--write/--no-write", "stored", default=True, help=f"Keep it in benchmarks/results/{RESULT.name}.")
def main(stored: bool) -> None:
    """Measure how well a member's first iterations tell its stage times, whatever its company."""
    rows = [row for group in GROUPS for row in measure(group)]
    for row in rows:
        click.echo(
            f"{row['case']:<8} of {len(row['group'])}: waits {row['wait_share']:4.0%}, "
            f"iteration {row['iteration_error']:+.1%}, worst stage {row['stage_error']:+.1%} of the iteration, "
            f"{row['iterations']} iterations, sure {row['confidence']:.0%}"
        )
    if stored:
        RESULT.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


def measure(group: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train some loops in one group until all are measured."""
    ids = [str(101 + number) for number in range(len(group))]
    spec = GroupSpec(members=tuple(MemberSpec(job_id=job_id) for job_id in ids), discipline="fair")
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        runtime = start_runtime(folder, spec)
        stack.callback(_end, runtime)
        for job_id, case in zip(ids, group, strict=True):
            stack.callback(_end, _member(folder, job_id, case))
        members = _measured(folder, ids)
    return [_row(case, group, members[job_id]) for job_id, case in zip(ids, group, strict=True)]


def _member(folder: Path, job_id: str, case: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "SLURM_JOB_ID": job_id, "MURI_RUN_DIR": str(socket_folder(folder))}
    with (folder / f"{job_id}.out").open("wb") as out:
        command = [*MURI_RUN, str(JOB), *map(str, CASES[case])]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()


def _measured(folder: Path, ids: list[str]) -> dict[str, Any]:
    """The members' status once all are measured.

    Raises:
        BenchmarkError: That takes too long.
    """
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        members = json.loads((folder / "status.json").read_text())["members"]
        if all((members[job_id]["measured"] or {}).get("iteration_s") for job_id in ids):
            return dict(members)
        time.sleep(0.2)
    raise BenchmarkError(f"not all of {', '.join(ids)} were measured: {(folder / 'runtime.out').read_text()}")


def _row(case: str, group: tuple[str, ...], member: dict[str, Any]) -> dict[str, Any]:
    """What was measured against what is known."""
    found, known_s = DryRunResult.from_dict(member["measured"]), [value / 1000 for value in CASES[case]]
    iteration_s = sum(known_s)
    errors = [(told - known) / iteration_s for told, known in zip(found.stage_s, known_s, strict=True)]
    return {
        "case": case,
        "group": group,
        "wait_share": sum(member["wait_s"].values()) / member["iteration_s"],
        "iteration_error": found.iteration_s / iteration_s - 1,
        "stage_error": max(errors, key=abs),
        "iterations": found.iterations,
        "confidence": found.detail.confidence,
    }


if __name__ == "__main__":
    main()
