"""How long a script takes to begin: without Muri, with `muri run` alone, and as a member of a group at work.

    python -m muri_lab.benchmarks.member_start --runs 15    # some six minutes

A sandbox of one node with one GPU. Each figure is the time from the first line of a job's batch script to the first
line of its Python script, the median of its runs. Members join a group whose runtime is ready. Leave the machine alone
meanwhile.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

from muri.slurm_plugin.records import comment_tags as tags
from muri_lab.benchmarks.bars import Bar, finish, tell
from muri_lab.benchmarks.fidelity_live import cluster, controller
from muri_lab.benchmarks.fidelity_workloads import STAGES, Workload
from sandbox.driver import Driver

RESULT: Final = Path(__file__).parent / "results" / "member_start.json"
MOST_MORE_S: Final = 0.2  # How much later than without Muri a member may begin
WAYS: Final = ("plain", "alone", "member")
_ITERATIONS: Final = 10
_AT_WORK: Final = ("load", "propagate")  # Kinds of the members that keep the group at work
_JOINS: Final = ("preprocess", "synchronize")

_TRAIN_PY: Final = """\
import time
first_s = time.time()
import os, sys
with open(os.path.expanduser(f"~/times/{os.environ['SLURM_JOB_ID']}"), "a") as file:
    file.write(f"first {first_s}\\n")
import muri
step = 0
while step < int(sys.argv[2]) or os.path.exists(os.path.expanduser(f"~/keep-{sys.argv[1]}")):
    step += 1
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.07 if stage == sys.argv[1] else 0.01)
"""

_TRAIN_SH: Final = """\
#!/bin/sh
echo "begun $(date +%s.%N)" >> ~/times/$SLURM_JOB_ID
exec "$@"
"""


def workload() -> Workload:
    """A cluster with one GPU; its controller knows the profiles of all four kinds of jobs."""
    times = {kind: tuple(0.07 if stage == kind else 0.01 for stage in STAGES) for kind in STAGES}
    return Workload(
        "member-start", 1, 1, {kind: (each[0], each[1], each[2], each[3]) for kind, each in times.items()}, ()
    )


def submit(driver: Driver, way: str, kind: str) -> int:
    """Submit a job of one kind, and return its id."""
    mark = {"plain": [], "alone": [f"--muri=model={kind},batch-size=8,alone=1"]}
    marked = mark.get(way, [f"--muri=model={kind},batch-size=8"])
    python = ["python"] if way == "plain" else ["muri", "run"]
    script = ["/home/alice/start.sh", *python, "/home/alice/start.py", kind, str(_ITERATIONS)]
    return driver.submit("--output=/dev/null", "--time=10", "--gres=gpu:1", *marked, *script)


def seconds(driver: Driver, job_id: int) -> float:
    """From the batch script's first line to the Python script's, once both are there, of the job's last run."""
    driver.wait_until(lambda: "first" in driver.read(f"/home/alice/times/{job_id}"), f"the start of job {job_id}")
    lines = [line.split() for line in driver.read(f"/home/alice/times/{job_id}").splitlines()]
    times = {words[0]: float(words[1]) for words in lines}
    return times["first"] - times["begun"]


def run_one(driver: Driver, way: str, kind: str) -> float:
    """Run a job to its end, and return how long its script took to begin."""
    job_id = submit(driver, way, kind)
    begin_s = seconds(driver, job_id)
    ended = driver.wait_state(job_id)
    if ended["JobState"] != "COMPLETED":
        raise click.ClickException(f"job {job_id} ended as {ended['JobState']}")
    if tags.is_member(ended.get("AdminComment", "")) is not (way == "member"):
        raise click.ClickException(f"job {job_id} was to run as {way}; its AdminComment is {ended.get('AdminComment')}")
    return begin_s


def measure(runs: int) -> dict[str, dict[str, Any]]:
    """Measure every way so often."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        driver = stack.enter_context(cluster(workload()))
        driver.write("start.py", _TRAIN_PY)
        driver.write("start.sh", _TRAIN_SH)
        found["plain"] = _series(driver, "plain", runs)
        log = Path("out", "member-start.log")
        log.parent.mkdir(exist_ok=True)
        stack.enter_context(controller(driver, log))
        found["alone"] = _series(driver, "alone", runs)
        for kind in _AT_WORK:
            driver.write(f"keep-{kind}", "")
        at_work = [submit(driver, "member", kind) for kind in _AT_WORK]
        for job_id in at_work:
            seconds(driver, job_id)
        found["member"] = _series(driver, "member", runs)
        driver.run("rm", *(f"/home/alice/keep-{kind}" for kind in _AT_WORK))
        for job_id in at_work:
            driver.wait_state(job_id)
    return {way: figures(each) for way, each in found.items()}


def _series(driver: Driver, way: str, runs: int) -> list[float]:
    series = []
    for number in range(runs):
        series.append(run_one(driver, way, _JOINS[number % len(_JOINS)]))
        tell(f"{way} {number + 1}: {series[-1]:.3f} s")
        time.sleep(1.0)
    return series


def figures(series: Sequence[float]) -> dict[str, Any]:
    """The figures of one way."""
    times_s = sorted(round(begin_s, 3) for begin_s in series)
    return {"median_s": round(median(times_s), 3), "least_s": times_s[0], "most_s": times_s[-1], "times_s": times_s}


def bars(found: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """The bound that has to be kept."""
    more_s = round(found["member"]["median_s"] - found["plain"]["median_s"], 3)
    return [Bar("member-start", "a member begins later by, s", more_s, f"under {MOST_MORE_S:g}", more_s < MOST_MORE_S)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", type=click.IntRange(min=1), default=15, show_default=True, help="Runs of each way.")
@click.option("--write/--no-write", "stored", default=True, help=f"Keep it in benchmarks/results/{RESULT.name}.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(runs: int, stored: bool, as_json: bool) -> None:
    """Measure how long scripts take to begin."""
    found = measure(runs)
    finish(RESULT, {"member-start": found}, bars(found), stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
