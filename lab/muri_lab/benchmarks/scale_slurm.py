"""A large cluster on a real slurmctld: thousands of nodes without a slurmd, and as many jobs as are asked for.

    sudo .venv/bin/python -m muri_lab.benchmarks.scale_slurm up --name big --cloud-nodes 2000
    sudo .venv/bin/python -m muri_lab.benchmarks.scale_slurm occupy --name big
    sudo .venv/bin/python -m muri_lab.benchmarks.scale_slurm fill --name big --jobs 10000
    sudo bin/muri-sandbox run --name big --user root -- muri-controller --once
    sudo bin/muri-sandbox down --name big

Jobs are submitted with `--muri`, one by one, by several users, some hundred a second. All their 64 models have stored
profiles. They wait behind the gate's license. Group jobs that start on nodes without a slurmd stay in CONFIGURING. An
ordinary job that occupies every GPU leaves a cycle nothing to start.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Final

import click

from muri_lab.benchmarks.scale_clusters import GPU_COUNTS, MODELS, Size, profiles
from sandbox import lifecycle
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.support import Progress, SandboxError

STATE_DIR: Final = "/var/lib/muri"
GATE_S: Final = 8 * 3600
_USERS: Final = tuple(f"user{number}" for number in range(1, 9))

_KNOW_PY: Final = """\
import json, sys
from pathlib import Path
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.private_files import make_private_directory

make_private_directory(Path(sys.argv[1]))
with ProfileStore(Path(sys.argv[1], "profiles.db")) as store:
    for key, figures in json.loads(sys.stdin.read()):
        store.put(StageProfile(ProfileKey(**key), **figures))
"""

_TRY_PY: Final = """\
import sys; from dataclasses import asdict; from pathlib import Path
from muri.files import atomic_json
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.gpu_removal import place_for
from muri.slurm_plugin.records.limits import NOT_TRIED

gateway = CommandGateway()
snapshot = gateway.snapshot()
found = gateway.gpu_removal(NOT_TRIED, place_for(snapshot.nodes, ()), None, snapshot.taken_s)
atomic_json(Path(sys.argv[1]), asdict(found))
"""

_TRAIN_PY: Final = """\
import sys, time
import muri

for _ in range(int(sys.argv[1])):
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.02)
"""

_TRAIN_SH: Final = "#!/bin/sh\nexec muri run ~/train.py 100\n"

_SUBMIT_SH: Final = """\
while read -r gpus model duration; do
    sbatch --quiet --output=/dev/null --time=60 --gres=gpu:"$gpus" --cpus-per-task=1 --mem="${gpus}G" \
        --muri=model="$model",batch-size=8,duration="$duration"s ~/train.sh || exit
done
"""


_CYCLE_PY: Final = """\
import json, logging, resource, sys, time
logging.disable(logging.CRITICAL)
from muri.slurm_plugin.controller.assemble import open_controller, open_gateway, read_config

def used_s():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime

def timed(work):
    start_s = used_s()
    found = work()
    return round(used_s() - start_s, 3), found

config = read_config(None).model_copy(update={"gateway": sys.argv[1]})
with open_controller(config) as controller:
    first_s, _ = timed(controller.cycle)
    cpu_s, status = timed(controller.cycle)
gateway = open_gateway(sys.argv[1])
gateway.snapshot()
snapshot_s, snapshot = timed(gateway.snapshot)
who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
rss_mib = [round(resource.getrusage(each).ru_maxrss / 1024, 1) for each in who]
print(json.dumps({
    "cpu_s": cpu_s, "first_cpu_s": first_s, "snapshot_cpu_s": snapshot_s, "peak_rss_mib": max(rss_mib),
    "jobs": len(status.jobs), "nodes": len(snapshot.nodes), "calls": dict(status.slurm_calls),
}))
"""
"""One cycle after another that finds nothing to do; the first one also learns all that 10,000 new jobs ask for."""


def cycling(gateway: str) -> Callable[[], dict[str, Any]]:
    """A row of scale.py: one whole cycle of the controller on a real slurmctld, its commands counted."""

    def row() -> dict[str, Any]:
        try:
            driver = Driver.of("scale-10000-2000")
        except SandboxError:
            driver = start("scale-10000-2000", 2000)
            occupy(driver)
            fill(driver, 10_000)
        return dict(json.loads(driver.run("python", "-c", _CYCLE_PY, gateway, user="root").stdout))

    return row


def start(name: str, cloud_nodes: int, suite: str = "forky", **config: Any) -> Driver:
    """Start a sandbox with a large cluster whose profiles Muri knows."""
    lifecycle.up(name, SUITES[suite], Shape(gpus_per_node=8, cloud_nodes=cloud_nodes), Progress())
    driver = Driver.of(name)
    places = {"state_dir": STATE_DIR, "status_dir": f"{STATE_DIR}-status", "profiling": {"mode": "dry-run"}}
    driver.write("/etc/muri/muri.yaml", json.dumps(places | config), user="root", mode="0644")
    known = [[asdict(each.key), _figures(each)] for each in _profiles()]
    driver.run("python", "-c", _KNOW_PY, STATE_DIR, user="root", stdin=json.dumps(known))
    driver.run("python", "-c", _TRY_PY, f"{STATE_DIR}/gpu-removal.json", user="root")
    for user in _USERS:
        driver.run("useradd", "--create-home", user, user="root")
        driver.write("train.py", _TRAIN_PY, user=user)
        driver.write("train.sh", _TRAIN_SH, user=user)
    withhold_gate(driver)
    return driver


def _profiles() -> Iterator[Any]:
    for profile in profiles(Size(0)):
        yield replace(profile, key=replace(profile.key, gpu_type="gpu"))


def _figures(profile: Any) -> Mapping[str, Any]:
    names = ("load_s", "preprocess_s", "propagate_s", "synchronize_s", "iteration_s", "gpu_mem_gib", "iterations")
    return {name: getattr(profile, name) for name in names}


def withhold_gate(driver: Driver) -> None:
    """Keep all jobs waiting for hours, as a controller that is at work does from cycle to cycle."""
    create = "create reservation flags=LICENSE_ONLY licenses=muri_gate:1000000 user=root starttime=now duration=120"
    # job_submit sees a reservation that was just made with its next change.
    update = f"scontrol update reservationname=muri_gate endtime=now+{GATE_S}"
    driver.run("sh", "-c", f"scontrol {create} reservationname=muri_gate && sleep 1; {update}", user="root")


def fill(driver: Driver, jobs: int, users: int = len(_USERS), seed: int = 1) -> None:
    """Submit jobs, several users at a time."""
    rng = random.Random(seed)
    lines: dict[str, list[str]] = {user: [] for user in _USERS[:users]}
    for number in range(jobs):
        model, duration_s = rng.randrange(MODELS), int(rng.lognormvariate(7.5, 1.5)) + 60
        lines[_USERS[number % users]].append(f"{rng.choice(GPU_COUNTS)} model{model} {duration_s}\n")
    with ThreadPoolExecutor(max_workers=4) as pool:
        for done in [pool.submit(_submit, driver, user, "".join(each)) for user, each in lines.items()]:
            done.result()


def _submit(driver: Driver, user: str, lines: str) -> None:
    driver.run("sh", "-c", _SUBMIT_SH, user=user, stdin=lines, timeout_s=3600)


def occupy(driver: Driver) -> int:
    """Give every GPU to one ordinary job, so that nothing can start; returns its id once it has them."""
    nodes = driver.run("sinfo", "--noheader", "--format=%D", user="root").stdout.split()
    job = driver.submit(
        f"--nodes={sum(map(int, nodes))}", "--gres=gpu:8", "--mem=1", "--output=/dev/null", "--time=600",
        "--job-name=ordinary", "--wrap=exec sleep 36000",
    )  # fmt: skip
    driver.wait_until(lambda: driver.job(job)["JobState"] in ("CONFIGURING", "RUNNING"), f"the start of job {job}")
    return job


@click.group(help=__doc__)
def main() -> None:
    """Choose what to do."""


@main.command("up")
@click.option("--name", required=True, help="The sandbox's name.")
@click.option("--cloud-nodes", default=2000, show_default=True, help="Nodes without a slurmd.")
@click.option("--suite", type=click.Choice(list(SUITES)), default="forky", show_default=True, help="Release of Slurm.")
def up(name: str, cloud_nodes: int, suite: str) -> None:
    """Start the cluster."""
    start(name, cloud_nodes, suite)


@main.command("occupy")
@click.option("--name", required=True, help="The sandbox's name.")
def occupy_command(name: str) -> None:
    """Give every GPU to one ordinary job."""
    click.echo(f"job {occupy(Driver.of(name))} has all GPUs")


@main.command("fill")
@click.option("--name", required=True, help="The sandbox's name.")
@click.option("--jobs", required=True, type=int, help="How many jobs.")
@click.option(
    "--users", default=len(_USERS), show_default=True, type=click.IntRange(1, len(_USERS)), help="Of how many."
)
@click.option("--seed", default=1, show_default=True, help="Seeds what the jobs ask for.")
def fill_command(name: str, jobs: int, users: int, seed: int) -> None:
    """Submit jobs."""
    start_s = time.monotonic()
    fill(Driver.of(name), jobs, users, seed)
    click.echo(f"{jobs} jobs of {users} users wait after {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
