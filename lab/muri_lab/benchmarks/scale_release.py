"""What thousands of releases cost slurmctld and its other users: `squeue` of an ordinary user before, during and after.

    sudo .venv/bin/python -m muri_lab.benchmarks.scale_release                          5,000 releases on 2,004 nodes
    sudo .venv/bin/python -m muri_lab.benchmarks.scale_release --gateway command --jobs 1000
    sudo .venv/bin/python -m muri_lab.benchmarks.scale_release --idle       and Slurm starts what is released

It starts a sandbox of its own. One ordinary job has all GPUs, so that what is released waits; with --idle Slurm starts
it as fast as it can, which costs slurmctld far more than the releases do. Waits are wall-clock times: other work on the
machine makes all of them longer. CPU seconds and the number of RPCs are not disturbed.
"""

import json
from pathlib import Path
from typing import Any, Final

import click

from muri_lab.benchmarks.bars import Bar, finish, tell
from muri_lab.benchmarks.scale_slurm import occupy, start
from sandbox import lifecycle
from sandbox.support import Progress

RESULT: Final = Path(__file__).with_name("results") / "scale_release.json"

NAME: Final = "scale-release"

_SAMPLES: Final = "150"
"""How often squeue is asked before and after."""

_FILL_PY: Final = """\
import sys
import pyslurm

for number in range(int(sys.argv[1])):
    pyslurm.JobSubmitDescription(
        name=f"job{number}", script="#!/bin/sh\\nexec sleep 3600\\n", user_id=1001, group_id=1001, time_limit=60,
        gres_per_node="gpu:1", cpus_per_task=1, licenses="muri_gate:1", working_directory="/tmp",
        standard_output="/dev/null", admin_comment=f"muri:model=model{number % 64},batch-size=8 muri-gate:licence",
    ).submit()
"""
"""Submits jobs as job_submit leaves them, a thousand a second."""

_RELEASE_PY: Final = """\
import json, os, resource, subprocess, sys, tempfile, threading, time
from pathlib import Path
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_gateway, policy_of
from muri.slurm_plugin.execute.apply import apply
from muri.slurm_plugin.execute.executor import Executor
from muri.slurm_plugin.execute.apply import InterruptibleGateway
from muri.slurm_plugin.planning.actions import ReleaseSolo
from muri.slurm_plugin.records.journal import Journal
from muri.slurm_plugin.records.roles import Role, view_of

def cpu_s(who):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime

config, gateway = Config(), open_gateway(sys.argv[1])
view = view_of(gateway.queue())
why = ("a GPU of partition main can be given to it",)
actions = [ReleaseSolo(job.job_id, why) for job in view.having(Role.CANDIDATE)]
way, errors = InterruptibleGateway(gateway, threading.Event(), 3600.0), []
with tempfile.TemporaryDirectory() as place, Journal(Path(place, "journal.db")) as journal:
    executor = Executor(way, journal, None, config, policy_of(config), view, errors)
    print("begin", flush=True)
    sys.stdin.readline()
    begun_s, used_s = time.monotonic(), cpu_s(resource.RUSAGE_SELF) + cpu_s(resource.RUSAGE_CHILDREN)
    apply(actions, executor, way)
took_s = time.monotonic() - begun_s
used_s = cpu_s(resource.RUSAGE_SELF) + cpu_s(resource.RUSAGE_CHILDREN) - used_s
told = {"releases": len(actions), "calls": way.calls, "errors": len(errors), "took_s": took_s, "cpu_s": used_s}
print(json.dumps(told))
"""
"""Lets every waiting job go, as a cycle does."""

_SQUEUE_PY: Final = """\
import json, subprocess, sys, time

def ask(end):
    waits = []
    while not end(len(waits)):
        begun_s = time.monotonic()
        subprocess.run(["squeue", "--noheader"], stdout=subprocess.DEVNULL, check=True)
        waits.append(1000 * (time.monotonic() - begun_s))
        time.sleep(0.05)
    return sorted(waits)

def slurmctld_s():
    pid = subprocess.run(["pidof", "slurmctld"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0]
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100

def updates():
    text = subprocess.run(["sdiag"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return sum(int(line.split("count:")[1].split()[0]) for line in text.splitlines() if "REQUEST_UPDATE_JOB " in line)

least = int(sys.argv[1])
quiet = ask(lambda count: count >= least)
release = subprocess.Popen(
    [sys.executable, "-c", sys.stdin.read(), *sys.argv[2:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
assert release.stdout.readline() == "begin\\n"
used_s, asked = slurmctld_s(), updates()
release.stdin.write("\\n"); release.stdin.flush()
during = ask(lambda count: release.poll() is not None)
used_s, asked = slurmctld_s() - used_s, updates() - asked
after = ask(lambda count: count >= least)
print(json.dumps({"quiet": quiet, "during": during, "after": after, "slurmctld_s": used_s, "updates": asked,
                  **json.loads(release.stdout.read())}))
"""
"""Asks squeue again and again, and starts the releases in between."""


def measure(nodes: int, jobs: int, gateway: str, *, idle: bool) -> dict[str, Any]:
    """Release jobs in a sandbox and return the figures."""
    driver = start(NAME, nodes)
    try:
        if not idle:
            occupy(driver)
        driver.run("python", "-c", _FILL_PY, str(jobs), user="root")
        told = driver.run(
            "python", "-c", _SQUEUE_PY, _SAMPLES, gateway, user="root", stdin=_RELEASE_PY, timeout_s=3600.0
        )
    finally:
        lifecycle.down(NAME, Progress())
    return _figures(json.loads(told.stdout))


def _figures(told: dict[str, Any]) -> dict[str, Any]:
    count = told["releases"]
    waits = {
        f"squeue_{when}_p{share}_ms": round(_quantile(told[when], share / 100), 1)
        for when in ("quiet", "during", "after")
        for share in (50, 99)
    }
    return {
        "releases": count,
        "refused": told["errors"],
        "releases_per_s": round(count / told["took_s"], 1),
        "calls_per_release": told["calls"] / count,
        "updates_per_release": told["updates"] / count,
        "cpu_ms_per_release": round(1000 * told["cpu_s"] / count, 2),
        "slurmctld_ms_per_release": round(1000 * told["slurmctld_s"] / count, 2),
        "squeues_during": len(told["during"]),
        **waits,
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@click.command(help=__doc__)
@click.option("--cloud-nodes", default=2000, show_default=True, help="Nodes without a slurmd, beside four.")
@click.option("--jobs", default=5000, show_default=True, help="How many are released.")
@click.option("--gateway", type=click.Choice(["pyslurm", "command"]), default="pyslurm", show_default=True, help="How.")
@click.option("--idle", is_flag=True, help="GPUs are free, so that Slurm starts what is released.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--keep/--no-keep", "stored", default=True, help=f"Keep the figures in {RESULT.name}.")
def main(*, cloud_nodes: int, jobs: int, gateway: str, idle: bool, as_json: bool, stored: bool) -> None:
    """Measure."""
    figures = measure(cloud_nodes, jobs, gateway, idle=idle)
    name = f"{gateway}-{'idle' if idle else 'full'}"
    tell(f"{name}: {figures}")
    quiet_ms, during_ms = figures["squeue_quiet_p99_ms"], figures["squeue_during_p99_ms"]
    bars = [
        Bar(name, "calls per release", figures["calls_per_release"], "at most 1", figures["calls_per_release"] <= 1),
        Bar(name, "p99 of squeue", during_ms, f"at most twice {quiet_ms:g} ms", during_ms <= 2 * quiet_ms),
    ]
    finish(RESULT, {name: figures}, bars, stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
