"""Eleven short jobs on one GPU of which no model is known, under the shipped defaults: plain Slurm and Muri in turn.

    python -m muri_lab.benchmarks.cold --rounds 3    # some twenty minutes

The jobs take 5 to 25 s alone, as the demo's scripts do: bound to storage, network, CPU and (a core in its place) GPU.
Each round is a fresh sandbox of one node; users do not say how long their jobs take. A figure is the median of its
rounds. Leave the machine alone meanwhile.
"""

import os
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

from examples.demo.cluster import CHECKOUT, Cluster, JobRecord, controller, fresh_cluster
from muri_lab.benchmarks.bars import Bar, finish, tell

RESULT: Final = Path(__file__).parent / "results" / "cold.json"
ASKED_FACTOR: Final = 1.2
SIDES: Final = ("plain", "muri")
_BATCH_SIZES: Final = {"storage": 18, "network": 72, "cpu": 16, "gpu": 4}
_ITERATION_S: Final = 0.05  # Approximate time of the scripts' iterations alone
_COUNT: Final = 11

_SHORTEST_S, _LONGEST_S = 5.0, 25.0

_LIMIT_S: Final = 900.0
_POLL_S: Final = 3.0  # Seldom enough not to take the jobs' two cores


def kinds() -> list[tuple[str, int]]:
    """The jobs in the order of submission: the kind of each, and its iterations; drawn, but always the same."""
    step_s = (_LONGEST_S - _SHORTEST_S) / (_COUNT - 1)
    times_s = [_SHORTEST_S + number * step_s for number in range(_COUNT)]
    random.Random("cold").shuffle(times_s)
    names = list(_BATCH_SIZES)
    return [(names[number % len(names)], round(time_s / _ITERATION_S)) for number, time_s in enumerate(times_s)]


def submit(cluster: Cluster, jobs: Sequence[tuple[str, int]], *, muri: bool) -> list[int]:
    """Submit the jobs at once, and return their ids."""
    ids = []
    for number, (kind, iterations) in enumerate(jobs):
        size = str(_BATCH_SIZES[kind])
        mark = [f"--muri=model={kind},batch-size={size}"] if muri else []
        options = [*mark, "--gres=gpu:1", f"--job-name={kind}-{number}", "--chdir=/home/alice"]
        script = [str(CHECKOUT / "examples/train.sh"), str(CHECKOUT / f"examples/train_{kind}.py")]
        counts = ["--iterations", str(iterations), "--batch-size", size, "--seed", str(number)]
        ids.append(cluster.submit(options, [*script, *counts]))
    return ids


def ended(cluster: Cluster, ids: Sequence[int]) -> list[JobRecord]:
    """Wait until all jobs have ended, and return what became of them."""
    end_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < end_s:
        time.sleep(_POLL_S)
        jobs = cluster.jobs()
        if all(jobs[job_id].ended for job_id in ids):
            return [jobs[job_id] for job_id in ids]
    raise click.ClickException(f"the jobs did not end within {_LIMIT_S:.0f} s")


def run_round(jobs: Sequence[tuple[str, int]], side: str) -> dict[str, Any]:
    """Run the jobs on a fresh cluster; return its figures."""
    begun = os.getloadavg()[0]
    log = CHECKOUT / "out" / "cold" / "controller.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with_muri = side == "muri"
    # Nothing is set in muri.yaml.
    with fresh_cluster("cold") as cluster, controller(cluster, "", log) if with_muri else nullcontext():
        found = ended(cluster, submit(cluster, jobs, muri=with_muri))
    failed = [f"{job.name}: {job.state}" for job in found if job.state != "COMPLETED"]
    if failed:
        raise click.ClickException(f"not all jobs completed: {', '.join(failed)}")
    first_s = min(job.submit_s for job in found)
    return {
        "makespan_s": max(job.end_s for job in found) - first_s,
        "average_jct_s": round(sum(job.jct_s for job in found) / len(found), 1),
        "jobs": {job.name: [job.start_s - first_s, job.end_s - first_s] for job in found},
        "load_before": round(begun, 1),
    }


def ratios(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """How many times better Muri's medians are."""
    medians = {side: {name: median(each[name] for each in rounds[side]) for name in _FIGURES} for side in SIDES}
    return {name: round(medians["plain"][name] / medians["muri"][name], 3) for name in _FIGURES}


_FIGURES: Final = ("makespan_s", "average_jct_s")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", "count", type=click.IntRange(1, 9), default=3, show_default=True, help="Rounds of each side.")
@click.option(
    "--jobs",
    "job_count",
    type=click.IntRange(1, _COUNT),
    default=_COUNT,
    show_default=True,
    help="Only the first of the jobs, for a quick look; with --no-write.",
)
@click.option("--write/--no-write", "stored", default=True, help=f"Keep it in benchmarks/results/{RESULT.name}.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(count: int, job_count: int, stored: bool, as_json: bool) -> None:
    """Compare Muri, which knows no model, with plain Slurm on eleven short jobs."""
    if stored and job_count < _COUNT:
        raise click.UsageError("figures of fewer jobs are not kept: add --no-write")
    jobs, rounds = kinds()[:job_count], {side: [] for side in SIDES}
    for number in range(count):
        for side in SIDES:
            rounds[side].append(figures := run_round(jobs, side))
            tell(f"round {number + 1}, {side}: makespan {figures['makespan_s']:.0f} s, "
                 f"average JCT {figures['average_jct_s']:.1f} s")  # fmt: skip
    factors = ratios(rounds)
    bar = Bar("cold", "makespan, times better", factors["makespan_s"], f"at least {ASKED_FACTOR}",
              factors["makespan_s"] >= ASKED_FACTOR)  # fmt: skip
    finish(RESULT, {"cold": {"factors": factors, "rounds": rounds}}, [bar], stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
