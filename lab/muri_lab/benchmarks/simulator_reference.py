"""The reference model beside the published results of the Muri paper's public simulator.

    python -m muri_lab.benchmarks.simulator_reference --traces DIR --published FILE --json > reference.json

Every row of the file of published results is simulated once, on 8 nodes with 8 GPUs; `muri-jct` with and without known
durations stands beside muri-s and muri-l. `ratio` is ours over published, `wall_s` and `cpu_s` are of one run. Where
the default model knows the policy, `default_avg_jct_s` is the average JCT there, with a plan at every event.
"""

import csv
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from muri.policies.registry import policy_names
from muri.simulator.model import Cluster, Settings, SimulationResult, Trace
from muri.simulator.run import simulate
from muri.simulator.traces.read import read_trace
from muri_lab.benchmarks.published_results import compare_with_published

FIGURES = ("avg_jct_s", "makespan_s", "p99_jct_s")
BESIDE = {"muri-s": True, "muri-l": False}
"""Published policies that muri-jct is compared with, and whether it then knows durations."""


def figures_of(result: SimulationResult) -> dict[str, float]:
    """The figures that are published; p99 is the 99 % smallest, without interpolation, as there."""
    jct_s = sorted(record.jct_s for record in result.records)
    makespan_s = max(record.end_s for record in result.records)
    return dict(zip(FIGURES, (sum(jct_s) / len(jct_s), makespan_s, jct_s[int(0.99 * len(jct_s))]), strict=True))


def compare(trace: Trace, policy: str, settings: Settings, published: dict[str, str]) -> dict[str, Any]:
    """One simulation beside one published row."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    result = simulate(trace, policy, Cluster(8, 8), settings)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    ours = figures_of(result)
    return {
        "trace": published["trace"],
        "policy": policy,
        "beside": published["policy"],
        "ours": {name: round(value, 3) for name, value in ours.items()},
        "ratio": {name: round(ours[name] / float(published[name]), 6) for name in FIGURES},
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
    }


def comparisons(traces: Path, published: Path) -> Iterator[dict[str, Any]]:
    """All rows whose trace is in the folder, as TRACE.csv or muri_TRACE.csv."""
    with published.open() as file:
        rows = list(csv.DictReader(file))
    read: dict[str, Trace] = {}
    for row in rows:
        paths = [traces / f"{prefix}{row['trace']}.csv" for prefix in ("", "muri_")]
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            print(f"{row['trace']}: neither {paths[0]} nor {paths[1]} is there; left out", file=sys.stderr)
            continue
        trace = read[row["trace"]] = read.get(row["trace"]) or read_trace(path)
        found = compare(trace, row["policy"], Settings(model="reference"), row)
        if row["policy"] in policy_names():
            default = simulate(trace, row["policy"], Cluster(8, 8), Settings(any_user=True))
            found["default_avg_jct_s"] = round(figures_of(default)["avg_jct_s"], 3)
        yield found
        if row["policy"] in BESIDE:
            known = Settings(model="reference", durations_known=BESIDE[row["policy"]])
            yield compare(trace, "muri-jct", known, row)


def line(found: Mapping[str, Any]) -> str:
    """One comparison for people."""
    ratios = "  ".join(f"{name} {found['ratio'][name]:.4f}" for name in FIGURES)
    return f"{found['trace']} {found['policy']:22} / {found['beside']:22} {ratios}  {found['cpu_s']:.2f} s"


def main() -> int:
    """Run all comparisons."""
    return compare_with_published(__doc__, "--traces", "folder with the traces", comparisons, line)


if __name__ == "__main__":
    sys.exit(main())
