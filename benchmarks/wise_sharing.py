"""SJF-BSBF beside its baselines: average job completion time of 240 and of 480 jobs on 64 GPUs.

    python benchmarks/wise_sharing.py                       simulate, compare, keep the figures, draw them
    python benchmarks/wise_sharing.py --seeds 1 --dry       one workload of each kind; nothing is kept
    python benchmarks/wise_sharing.py --plot-only           draw what was measured before

Pair speeds are those of a table of measured pairs (`gavel_pairs_v100.csv`). The published workloads are not
available; these are synthetic ones like them, as far as they are known. The assumptions:

- 16 nodes of 4 GPUs with 16 GiB; 480 jobs come in the time in which 240 come, so at twice the load.
- Durations alone are log-normal with a median of half an hour, σ = 1, at most 6 hours: a mean of about 0.8 hours, for
  the published SJF-BSBF ends jobs after 1.01 hours on average.
- GPU counts 1, 2, 4, 8 and 16 with shares of 50, 15, 20, 10 and 5 %.
- Every job trains one of the table's 26 configurations; memory and batches as in `simulator/traces/models.py`.
- A start after the first one costs 30 s, the simulator's default.

The load was first assumed to be 1 and 2 ("-first-guess"). At that load jobs hardly queue: policies here fill gaps
behind a job that does not fit, and SJF ends jobs after 0.9 instead of 1.25 hours. So the load was raised to 1.5 and 3,
where SJF is nearer to its published averages; what sjf-bsbf does at 1.4 and 2.8 was known by then. Both are kept; the
second are judged.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bars import Bar, keep, tell, verdict

from muri.errors import MuriError
from muri.policies.registry import policy_names
from muri.policies.speed.measured import PairSpeed, parse_interference
from muri.simulator.model import Cluster, Settings, Trace
from muri.simulator.run import simulate
from muri.simulator.sweep.metrics import metrics_of
from muri.simulator.traces.generator import Durations, Recipe, generate
from muri.simulator.traces.models import models_of_pairs

ROOT: Final = Path(__file__).parents[1]
PAIRS: Final = ROOT.parent / "shared" / "reference" / "gavel_pairs_v100.csv"
RESULT: Final = ROOT / "benchmarks" / "results" / "wise_sharing.json"
PLOT: Final = ROOT / "docs" / "images" / "wise-sharing.png"

CLUSTER: Final = Cluster(16, 4, gpu_mem_gib=16.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs, and GPU-seconds that they ask for over those that there are while they come."""

    jobs: int
    load: float


WORKLOADS: Final = {
    "240-jobs": Workload(240, 1.5),
    "480-jobs": Workload(480, 3.0),
    "240-jobs-first-guess": Workload(240, 1.0),
    "480-jobs-first-guess": Workload(480, 2.0),
}
JUDGED: Final = ("240-jobs", "480-jobs")
GPU_MIX: Final = {1: 0.50, 2: 0.15, 4: 0.20, 8: 0.10, 16: 0.05}
DURATIONS: Final = Durations(floor_s=60.0, median_s=1800.0, sigma=1.0, longest_s=6 * 3600.0)
PUBLISHED_H: Final = {
    "fifo": (2.34, 7.52),
    "sjf": (1.25, 2.55),
    "tiresias": (1.51, 5.09),
    "pollux": (1.04, 4.69),
    "sjf-ffs": (1.23, 1.89),
    "sjf-bsbf": (1.01, 1.57),
}
"""Average JCT, hours, of 240 and 480 jobs: SJF-BSBF, Tables III and IV."""

BEATEN: Final = ("sjf", "tiresias", "sjf-ffs")
MOST_DECISION_S: Final = 0.02


def trace_of(workload: Workload, seed: int, lines: list[str]) -> Trace:
    """The synthetic workload."""
    recipe = Recipe(
        workload.jobs,
        CLUSTER.gpu_count,
        workload.load,
        seed=seed,
        gpu_mix=GPU_MIX,
        users=1,
        opportunistic=0.0,
        durations=DURATIONS,
        models=models_of_pairs(lines),
        name=f"{workload.jobs} jobs, load {workload.load:g}, seed {seed}",
    )
    return generate(recipe)


def measure(name: str, seeds: int, lines: list[str], rows: tuple[PairSpeed, ...]) -> dict[str, Any]:
    """Every policy on every seed's workload."""
    workload = WORKLOADS[name]
    place = sorted({item.jobs for item in WORKLOADS.values()}).index(workload.jobs)
    found: dict[str, Any] = {}
    for policy in (name for name in PUBLISHED_H if name in policy_names()):
        runs = [run(policy, trace_of(workload, seed, lines), rows) for seed in range(seeds)]
        averages = [figures["avg_jct_h"] for figures in runs]
        decisions = [seconds for figures in runs for seconds in figures.pop("decision_s")]
        found[policy] = {
            "avg_jct_h": round(statistics.fmean(averages), 3),
            "published_avg_jct_h": PUBLISHED_H[policy][place],
            "by_seed": runs,
            "decision_mean_s": round(statistics.fmean(decisions), 5),
            "decision_p99_s": round(sorted(decisions)[int(0.99 * len(decisions))], 5),
        }
        published = found[policy]["published_avg_jct_h"]
        tell(f"{name:21} {policy:9}  average JCT {found[policy]['avg_jct_h']:6.2f} h  (published {published} h)")
    return found


def run(policy: str, trace: Trace, rows: tuple[PairSpeed, ...]) -> dict[str, Any]:
    """One simulation."""
    result = simulate(trace, policy, CLUSTER, Settings(interference=rows))
    figures = metrics_of(result)
    return {
        "trace": trace.name,
        "avg_jct_h": round(figures.avg_jct_s / 3600, 4),
        "p99_jct_h": round(figures.p99_jct_s / 3600, 3),
        "makespan_h": round(figures.makespan_s / 3600, 3),
        "queueing_delay_h": round(figures.queueing_delay_s / 3600, 4),
        "decision_s": result.decision_s,
    }


def judge(cases: dict[str, dict[str, Any]]) -> list[Bar]:
    """What has to hold: SJF-BSBF ends jobs sooner than each of three others, the more so the higher the load."""
    bars, gains = [], {}
    for case in JUDGED:
        own = cases[case]["sjf-bsbf"]
        for name in BEATEN:
            gain = gains[case, name] = round(cases[case][name]["avg_jct_h"] / own["avg_jct_h"], 3)
            bars.append(Bar(case, f"average JCT of {name} over that of sjf-bsbf", gain, "> 1", gain > 1))
        slow = own["decision_p99_s"]
        bars.append(Bar(case, "99 of 100 decisions take, s", slow, f"< {MOST_DECISION_S}", slow < MOST_DECISION_S))
    few, many = JUDGED
    for name in BEATEN:
        growth = round(gains[many, name] / gains[few, name], 3)
        bars.append(Bar(many, f"the gain over {name}, relative to {few}", growth, "> 1", growth > 1))
    return bars


def plot() -> None:
    """Average JCT by policy, simulated and published."""
    import matplotlib as mpl  # only the picture needs it

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    stored = json.loads(RESULT.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(1, len(JUDGED), figsize=(11, 4), layout="constrained")
    for axis, case in zip(axes, JUDGED, strict=True):
        policies = stored[case]["figures"]
        places = range(len(policies))
        for offset, key, label in ((-0.2, "avg_jct_h", "simulated"), (0.2, "published_avg_jct_h", "published")):
            heights = [item[key] for item in policies.values()]
            drawn = axis.bar([place + offset for place in places], heights, 0.4, label=label)
            axis.bar_label(drawn, fmt="%.2f", fontsize=8)
        axis.set_xticks(list(places), list(policies))
        axis.set(title=f"{WORKLOADS[case].jobs} jobs on 64 GPUs", ylabel="average JCT, hours")
        axis.legend()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    tell(f"wrote {PLOT.relative_to(ROOT)}")


def main() -> int:
    """Simulate, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="table of measured pairs")
    parser.add_argument("--seeds", type=int, default=5, help="workloads of each kind (5)")
    parser.add_argument("--dry", action="store_true", help="keep and draw nothing")
    parser.add_argument("--plot-only", action="store_true", help="draw what was measured before")
    arguments = parser.parse_args()
    if arguments.plot_only:
        plot()
        return 0
    if not arguments.pairs.exists():
        parser.error(f"there is no table of measured pairs {arguments.pairs}; give one with --pairs")
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; it must be at least 1")
    lines = arguments.pairs.read_text(encoding="utf-8").splitlines()
    try:
        rows = parse_interference(lines).rows
        cases = {name: measure(name, arguments.seeds, lines, rows) for name in WORKLOADS}
    except MuriError as err:
        parser.error(str(err))
    found = judge(cases)
    if not arguments.dry:
        keep(RESULT, cases, found)
        plot()
    return verdict(found)


if __name__ == "__main__":
    sys.exit(main())
