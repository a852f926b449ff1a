"""The reference model of Synergy beside the published results of its public simulator.

    python -m muri_lab.benchmarks.synergy_reference --trace ../shared/traces/synergy_single_gpu_load9.csv \\
      --published ../shared/reference/results_synergy.csv
    python -m muri_lab.benchmarks.synergy_reference --trace FILE --published FILE --json \\
      > lab/muri_lab/benchmarks/results/synergy_reference.json

Every row of the file of published results is one `muri simulate` in a process of its own, on 16 nodes with 8 GPUs,
24 CPUs and 500 GB each, with the steady state of jobs 4,000 to 4,999. `wall_s` is that process from start to exit, the
trace read and the figures printed, `cpu_s` its CPU time; `public_code_wall_s` is what the public simulator took. p99
is interpolated between neighbors, as there; `muri simulate` itself prints the one at index ⌊0.99 n⌋, so it is taken
from a second simulation in this process.
"""

import csv
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from muri.simulator.model import Cluster, Settings, Trace
from muri.simulator.run import simulate
from muri.simulator.traces.read import read_trace
from muri_lab.benchmarks.published_results import compare_with_published

FIRST, LAST = 4_000, 5_000
CLUSTER = Cluster(16, 8, cpus_per_node=24, mem_gib_per_node=500)
FIGURES = ("avg_jct_h", "p50_jct_h", "p99_jct_h")
HOUR_S = 3_600.0
MURI = Path(sys.executable).with_name("muri")


def command(trace: Path, options: Mapping[str, str]) -> list[str]:
    """The command line that is timed."""
    sizes = ["--nodes", "16", "--gpus-per-node", "8", "--cpus-per-node", "24", "--mem-gb-per-node", "500"]
    chosen = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
    rest = ["--model", "reference", "--steady-state", f"{FIRST}:{LAST}", "--json"]
    return [str(MURI), "simulate", str(trace), "--policy", "synergy", *chosen, *sizes, *rest]


def children_cpu_s() -> float:
    """CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures_of(trace: Trace, options: Mapping[str, str]) -> dict[str, float]:
    """The figures that are published, of the jobs of the steady state."""
    result = simulate(trace, "synergy", CLUSTER, Settings(model="reference", until=LAST), options)
    records = sorted(result.records, key=lambda record: (record.job.submit_s, record.job.job_id))
    jct_h = np.array([record.jct_s for record in records[FIRST:LAST]]) / HOUR_S
    return dict(zip(FIGURES, map(float, (jct_h.mean(), np.median(jct_h), np.percentile(jct_h, 99))), strict=True))


def compare(path: Path, trace: Trace, row: dict[str, str]) -> dict[str, Any]:
    """One simulation beside one published row."""
    options = {"mechanism": row["mechanism"], "order": row["policy"].lower()}
    start_s, start_cpu_s = time.perf_counter(), children_cpu_s()
    printed = subprocess.run(command(path, options), capture_output=True, text=True, check=True).stdout
    wall_s, cpu_s = time.perf_counter() - start_s, children_cpu_s() - start_cpu_s
    avg_jct_h = json.loads(printed)["policies"]["synergy"]["avg_jct_s"] / HOUR_S
    ours = {**figures_of(trace, options), "avg_jct_h": avg_jct_h}
    published = {name: float(row[name]) for name in FIGURES}
    public_code_wall_s = float(row["public_code_wall_s"])
    return {
        "policy": f"synergy-{options['mechanism']}-{options['order']}",
        "published": published,
        "ours": ours,
        "relative_error": {name: ours[name] / published[name] - 1 for name in FIGURES},
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "public_code_wall_s": public_code_wall_s,
        "times_faster": round(public_code_wall_s / wall_s, 1),
    }


def comparisons(trace: Path, published: Path) -> Iterator[dict[str, Any]]:
    """All rows of the published results."""
    read = read_trace(trace)
    with published.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        yield compare(trace, read, row)


def line(found: Mapping[str, Any]) -> str:
    """One comparison for people."""
    errors = "  ".join(f"{name} {found['relative_error'][name]:+.2e}" for name in FIGURES)
    return f"{found['policy']:26} {errors}  {found['wall_s']:.1f} s, public {found['public_code_wall_s']:.0f} s"


def main() -> int:
    """Run all comparisons."""
    trace_help = "Synergy's single-GPU workload at 9 jobs an hour"
    return compare_with_published(__doc__, "--trace", trace_help, comparisons, line)


if __name__ == "__main__":
    sys.exit(main())
