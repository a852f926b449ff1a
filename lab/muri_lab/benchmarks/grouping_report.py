"""Measure all cases of grouping, store the figures, and plot seconds against jobs for every solver.

    python -m muri_lab.benchmarks.grouping_report                 measures (about five minutes), writes both files
    python -m muri_lab.benchmarks.grouping_report --plot-only     plots the stored figures

Each case runs in a process of its own, so that its memory is its own. Figures go to
benchmarks/results/grouping.json, the plot to docs/images/grouping.png.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).with_name("results") / "grouping.json"
PLOT = ROOT / "docs" / "images" / "grouping.png"

PAIRS = (50, 100, 200, 400, 700, 1000)
PAIRS_WITHOUT_PEERS = (2000, 4000)
GROUPS = (100, 250, 500, 1000)
GROUPS_WITHOUT_PEERS = (4000, 20000)
PLANS = (1000, 10_000, 100_000)


def run_case(*arguments: str) -> dict[str, Any]:
    """Figures of one case, measured in a new process."""
    print("measuring", *arguments, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "muri_lab.benchmarks.grouping", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure() -> dict[str, list[dict[str, Any]]]:
    """All cases."""
    pairs = [run_case("--jobs", str(jobs), "--peers") for jobs in PAIRS]
    pairs += [run_case("--jobs", str(jobs)) for jobs in PAIRS_WITHOUT_PEERS]
    four = ["--profiles", "64", "--group-size", "4"]
    groups = [run_case("--jobs", str(jobs), *four, "--peers") for jobs in GROUPS]
    groups += [run_case("--jobs", str(jobs), *four) for jobs in GROUPS_WITHOUT_PEERS]
    plans = [run_case("--jobs", str(jobs), *four, "--buckets", "6", "--gpus", str(jobs // 5)) for jobs in PLANS]
    return {"pairs": pairs, "groups_of_4": groups, "plans": plans}


def curves(cases: list[dict[str, Any]], own: str) -> dict[str, tuple[list[int], list[float]]]:
    """Jobs and seconds by solver."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for case in cases:
        solvers = {own: case, **case.get("peers", {})}
        for name, figures in solvers.items():
            jobs, seconds = found.setdefault(name, ([], []))
            jobs.append(case["jobs"])
            seconds.append(figures["solver_s"])
    return found


def plot(results: dict[str, list[dict[str, Any]]]) -> None:
    """Seconds against jobs, both on logarithmic axes."""
    import matplotlib as mpl  # only the report needs it

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("pairs", "certified", "Pairs, all profiles distinct"),
        ("groups_of_4", "optimal (all groups of ≤ 4)", "Groups of 4, 64 profiles"),
        ("plans", "whole plan", "Whole plans, 64 profiles, 6 GPU counts"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    for axis, (key, own, title) in zip(axes, panels, strict=True):
        for name, (jobs, seconds) in curves(results[key], own).items():
            axis.plot(jobs, seconds, marker="o", label=name, linewidth=2.5 if name == own else 1.2)
        axis.set(xscale="log", yscale="log", xlabel="jobs", title=title)
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("seconds")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    print(f"wrote {PLOT.relative_to(ROOT)}", file=sys.stderr)


def main() -> int:
    """Measure and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot-only", action="store_true", help="plot what was measured before")
    if not parser.parse_args().plot_only:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    plot(json.loads(RESULTS.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
