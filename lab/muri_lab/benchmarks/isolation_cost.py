"""What a group of four costs until all its scripts have PyTorch, as threads of one process and as processes.

Memory is the proportional set size of the runtime, the members' `muri run` and all that they started: what they share
counts once. Processor time tells the cost of a start more surely than a clock, because other programs do not count.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click
import psutil

from muri.group_spec import GroupSpec, MemberSpec
from muri.units import MIB
from muri_lab.benchmarks.machine import describe_machine
from muri_lab.benchmarks.runtime_process import MURI_RUN, START_LIMIT_S, BenchmarkError, socket_folder, start_runtime

RESULT = Path(__file__).parent / "results" / "isolation_cost.json"
KINDS: tuple[Literal["thread", "process"], ...] = ("thread", "process")
SCRIPT = """
import sys, time, torch
model = torch.nn.Linear(256, 256)
model(torch.ones(8, 256)).sum().backward()
open(sys.argv[1], "w").close()
time.sleep(1000)
"""


def measure(kind: Literal["thread", "process"], members: int) -> dict[str, float]:
    """Start a group; returns what it held and had used once all scripts had done a backward pass."""
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name, ExitStack() as started:
        folder, ids = Path(name), [str(101 + index) for index in range(members)]
        ready = [folder / f"{each}.ready" for each in ids]
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        group = GroupSpec(members=tuple(MemberSpec(job_id=each, isolation=kind) for each in ids))
        begin_s = time.perf_counter()
        processes = [start_runtime(folder, group)]
        started.callback(_end, processes)
        err = started.enter_context((folder / "members.err").open("wb"))
        for job_id, path in zip(ids, ready, strict=True):
            own = {"SLURM_JOB_ID": job_id, "MURI_RUN_DIR": str(socket_folder(folder)), "OMP_NUM_THREADS": "1"}
            command, env = [*MURI_RUN, str(script), str(path)], os.environ | own
            processes.append(subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stderr=err))
        while not all(each.exists() for each in ready):
            if time.perf_counter() - begin_s > START_LIMIT_S * members:
                raise BenchmarkError(f"the scripts did not start as {kind}: {(folder / 'runtime.out').read_text()}")
            time.sleep(0.1)
        whole = list(_with_descendants(processes))
        times = [each.cpu_times() for each in whole]
        return {
            "pss_mib": round(sum(each.memory_full_info().pss for each in whole) / MIB, 1),
            "cpu_s": round(sum(each.user + each.system for each in times), 2),
        }


def _with_descendants(processes: "list[subprocess.Popen[bytes]]") -> Iterator[psutil.Process]:
    for process in processes:
        root = psutil.Process(process.pid)
        yield root
        yield from root.children(recursive=True)


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        process.wait(timeout=60)


@click.command()
@click.option("--members", default=4, show_default=True, help="Members of the group.")
@click.option("--rounds", default=3, show_default=True, help="Groups of each kind, in turns; medians count.")
def main(members: int, rounds: int) -> None:
    """Measure both kinds and keep the result."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS:
            found[kind].append(measure(kind, members))
            click.echo(f"round {number + 1}, {kind}: {found[kind][-1]}")
    figures: dict[str, Any] = {
        kind: {name: median(each[name] for each in runs) for name in runs[0]} for kind, runs in found.items()
    }
    result = {"machine": describe_machine(), "members": members, "rounds": rounds, **figures}
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
