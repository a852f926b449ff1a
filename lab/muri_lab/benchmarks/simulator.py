"""How long simulations take, each in a process of its own.

    python -m muri_lab.benchmarks.simulator --json                              all cases but those of a trace file
    python -m muri_lab.benchmarks.simulator --trace muri_trace1.csv --json      and that of the paper, reference model
    python -m muri_lab.benchmarks.simulator --case 100000-jobs --json           one case

Times are of one run, in seconds. `wall_s` is the simulation alone, without reading or making the trace; `decision_s` is
the part of it that the policy took. benchmarks/results/simulator.json has what the second line printed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from muri.simulator.metrics import metrics_of
from muri.simulator.model import Cluster, Settings, Trace
from muri.simulator.run import simulate
from muri.simulator.traces.generator import Durations, Recipe, generate
from muri.simulator.traces.read import read_trace
from muri_lab.benchmarks.machine import describe_machine, peak_rss_mib

GPU_MIX = {1: 70.0, 2: 10.0, 4: 8.0, 8: 8.0, 16: 2.5, 32: 1.5}
AN_HOUR = Durations(floor_s=0.0, median_s=3600.0, sigma=1.2, longest_s=30 * 86_400.0)
"""Log-normal about an hour with a heavy tail: two hours on average."""


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    Attributes:
        jobs: Jobs of the made trace; 0: the trace comes from a file.
        policy: Who decides.
        nodes: Nodes of 8 GPUs.
        model: Which simulator.
        interval_s: Seconds between plans; 0: at every arrival and completion.
        load: Arriving work over the cluster's capacity without sharing.
    """

    jobs: int
    policy: str
    nodes: int
    model: Literal["default", "reference"] = "default"
    interval_s: float = 0.0
    load: float = 1.0


CASES = {
    "trace": Case(0, "muri-s", 8, "reference"),
    "5755-jobs-reference": Case(5_755, "muri-s", 8, "reference"),
    "5755-jobs": Case(5_755, "muri-s", 8, interval_s=360.0),
    "100000-jobs": Case(100_000, "muri-l", 512, interval_s=360.0),
}


def trace_of(case: Case, file: Path | None) -> Trace:
    """The trace of a case."""
    if file is not None and not case.jobs:
        return read_trace(file)
    recipe = Recipe(case.jobs, case.nodes * 8, case.load, seed=1, gpu_mix=GPU_MIX, durations=AN_HOUR)
    return generate(recipe)


def measure(name: str, file: Path | None, tell: Callable[[float], None] | None) -> dict[str, Any]:
    """Run one case in this process."""
    case = CASES[name]
    trace = trace_of(case, file)
    settings = Settings(model=case.model, interval_s=case.interval_s)
    result = simulate(trace, case.policy, Cluster(case.nodes, 8), settings, progress=tell)
    figures = metrics_of(result)
    return {
        "trace": trace.name,
        "jobs": figures.jobs,
        "policy": case.policy,
        "model": case.model,
        "gpus": case.nodes * 8,
        "interval_s": case.interval_s,
        "wall_s": round(result.wall_s, 3),
        "decision_s": round(sum(result.decision_s), 3),
        "decisions": figures.decisions,
        "decision_mean_s": figures.decision_mean_s,
        "decision_p99_s": figures.decision_p99_s,
        "avg_jct_s": figures.avg_jct_s,
        "makespan_s": figures.makespan_s,
        "gpus_held_share": figures.gpus_held_share,
        "queue_length_mean": figures.queue_length_mean,
        "peak_rss_mib": peak_rss_mib(),
    }


def in_a_process(name: str, file: Path | None) -> dict[str, Any]:
    """Run one case in a process of its own, whose memory is its own."""
    command = [sys.executable, __file__, "--case", name, "--json", *(["--trace", str(file)] if file else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["cases"][name]
    return found


def tell(share: float) -> None:
    """Progress, for people."""
    print(f"\r{share:7.1%}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), help="only this one, in this process")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="trace of the case 'trace', for 8 nodes of 8 GPUs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.case == "trace" and given.trace is None:
        parser.error("--case trace needs --trace FILE")
    return given


def main() -> int:
    """Run cases and print their figures."""
    given = arguments()
    if given.case:
        cases = {given.case: measure(given.case, given.trace, tell if sys.stderr.isatty() else None)}
    else:
        names = [name for name, case in CASES.items() if case.jobs or given.trace]
        cases = {name: in_a_process(name, given.trace) for name in names}
    if given.json:
        print(json.dumps({"cases": cases, "machine": describe_machine()}, indent=1))
        return 0
    for name, found in cases.items():
        print(f"{name}: {found['wall_s']} s, {found['decisions']} plans, {found['peak_rss_mib']} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
