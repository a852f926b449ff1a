"""Every policy on every shipped trace: the figures of docs/policies.md and docs/simulator.md.

    python -m muri_lab.benchmarks.compare_policies                        all runs, about ten minutes on two cores
    python -m muri_lab.benchmarks.compare_policies --policy pollux        one policy anew, the others as they were
    python -m muri_lab.benchmarks.compare_policies --plain --limit 400    as `muri simulate` does

Default model, a plan every 360 s, durations known, restarts of 30 s, checkpoints, jobs of any user sharing. Nodes have
8 GPUs of 16 GiB, 24 CPUs and 500 GiB, so that CPUs and memory are worth sharing out; pairs that share are as fast as
their profiles say. With --plain neither CPUs nor memory are limited, and jobs share within a user. A run that is
refused or takes too long is kept with its reason.
"""

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from muri.errors import MuriError
from muri.simulator.model import Cluster, Run, Settings
from muri.simulator.run import run_one
from muri.simulator.traces.read import read_trace
from muri_lab.benchmarks import compare_policies_page as page
from muri_lab.benchmarks.bars import Bar, keep, tell, verdict

ROOT: Final = Path(__file__).parents[3]
TRACES: Final = ROOT / "examples" / "traces"
RESULTS: Final = Path(__file__).with_name("results")
RESULT: Final = RESULTS / "compare_policies.json"
PLAIN_RESULT: Final = RESULTS / "compare_policies_plain.json"
NODES: Final = {"philly-like": 8, "storage-heavy": 8, "short-and-crowded": 4, "mixed-appetites": 4}
"""Nodes of 8 GPUs that each trace was made for; see examples/traces/README.md."""

PLAIN_TRACES: Final = ("philly-like", "storage-heavy", "short-and-crowded")
PLAIN_POLICIES: Final = (
    *("fifo", "sjf", "srtf", "srsf", "las", "2d-las", "tiresias", "tiresias-gittins", "themis", "antman"),
    *("muri-s", "muri-l", "muri-jct"),
)
SETTINGS: Final = Settings(interval_s=360.0, any_user=True)
_HOUR_S: Final = 3600.0


def cluster_of(trace: str, *, plain: bool = False) -> Cluster:
    """The cluster that a trace runs on; a plain one limits GPUs alone."""
    if plain:
        return Cluster(NODES[trace], 8)
    return Cluster(NODES[trace], 8, gpu_mem_gib=16.0, cpus_per_node=24.0, mem_gib_per_node=500.0)


def attempt(trace: str, policy: str, limit_s: int, *, plain: bool = False) -> dict[str, Any]:
    """One simulation: its figures, or why there are none."""
    settings = replace(SETTINGS, any_user=not plain)
    name, options = page.case_of(policy)
    run = Run(policy, read_trace(TRACES / f"{trace}.csv"), name, cluster_of(trace, plain=plain), settings, options)
    try:
        with _no_longer_than(limit_s):
            figures = run_one(run).metrics
    except TimeoutError:
        return {"failed": f"takes more than {limit_s} s of computing"}
    except MuriError as error:
        return {"failed": str(error)}
    return {
        "avg_jct_h": round(figures.avg_jct_s / _HOUR_S, 4),
        "median_jct_h": round(figures.median_jct_s / _HOUR_S, 4),
        "p99_jct_h": round(figures.p99_jct_s / _HOUR_S, 3),
        "makespan_h": round(figures.makespan_s / _HOUR_S, 3),
        "queueing_delay_h": round(figures.queueing_delay_s / _HOUR_S, 4),
        "restarts_per_job": round(figures.restarts / figures.jobs, 3),
        "worst_slowdown": round(figures.finish_time_fairness_max, 3),
        "decision_mean_s": round(figures.decision_mean_s, 5),
        "wall_s": round(figures.wall_s, 2),
    }


@contextmanager
def _no_longer_than(limit_s: int) -> Iterator[None]:
    """Raise TimeoutError in the block when its CPU time is over; whatever else the machine does doesn't count."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def measure(
    traces: tuple[str, ...], policies: tuple[str, ...], jobs: int, limit_s: int, *, plain: bool = False
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Trace, policy and figures of each run, as they end."""
    wanted = [(trace, policy) for policy in policies for trace in traces]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {
            pool.submit(attempt, trace, policy, limit_s, plain=plain): (trace, policy) for trace, policy in wanted
        }
        for number, future in enumerate(as_completed(futures), 1):
            trace, policy = futures[future]
            figures = future.result()
            said = figures.get("failed") or f"average JCT {figures['avg_jct_h']:8.2f} h  ({figures['wall_s']} s)"
            tell(f"{number}/{len(wanted)}  {trace:18} {policy:28} {said}")
            yield trace, policy, figures


def merged(stored: Mapping[str, Any], trace: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new figures beside those stored of other policies, in the registry's order."""
    known = {**stored.get(trace, {}).get("figures", {}), **measured}
    return {policy: known[policy] for policy in page.names() if policy in known}


def judge(trace: str, figures: Mapping[str, Any], policies: tuple[str, ...]) -> list[Bar]:
    """Every policy has figures."""
    without = sum("failed" in found for found in figures.values()) + len(set(policies) - set(figures))
    return [Bar(trace, "policies without figures", without, "0", without == 0)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--policy", "policies", multiple=True, type=click.Choice(page.names()), help="Only this one; repeatable.")
@click.option("--trace", "traces", multiple=True, type=click.Choice(list(NODES)), help="Only this; repeatable.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1), help="Simulations at a time.")
@click.option(
    "--limit", "limit_s", default=40, show_default=True, type=click.IntRange(1), help="CPU seconds for each run."
)
@click.option("--plain", is_flag=True, help="Nothing but GPUs is limited, and jobs share within a user.")
def main(policies: tuple[str, ...], traces: tuple[str, ...], jobs: int, limit_s: int, *, plain: bool) -> None:
    """Simulate every policy on every shipped trace; python -m muri_lab.benchmarks.pages then writes the comparison.

    \b
    Examples:
      python -m muri_lab.benchmarks.compare_policies
      python -m muri_lab.benchmarks.compare_policies --policy pollux --trace mixed-appetites
      python -m muri_lab.benchmarks.compare_policies --plain --limit 400

    Exits with 1 while a policy has no figures.
    """
    found: dict[str, list[Bar]] = {}
    result = PLAIN_RESULT if plain else RESULT
    wanted = policies or (PLAIN_POLICIES if plain else page.names())
    for trace, policy, figures in measure(
        traces or (PLAIN_TRACES if plain else tuple(NODES)), wanted, jobs, limit_s, plain=plain
    ):
        case = merged(_stored(result), trace, {policy: figures})
        found[trace] = judge(trace, case, PLAIN_POLICIES if plain else page.names())
        keep(result, {trace: case}, found[trace])  # at once: a run of minutes may be cut off
    if not plain:
        page.draw(_stored(result), list(NODES))
    sys.exit(verdict(bar for of_trace in found.values() for bar in of_trace))


def _stored(result: Path) -> dict[str, Any]:
    return dict(json.loads(result.read_text(encoding="utf-8"))) if result.exists() else {}


if __name__ == "__main__":
    main()
