"""Draw docs/images/scale.png: CPU seconds of a cycle's decision against the jobs that wait.

    python -m muri_lab.benchmarks.scale_picture              measure all points, keep and draw them (some minutes)
    python -m muri_lab.benchmarks.scale_picture --draw       draw what was measured last

Each point is a process of its own, as in benchmarks/scale.py.
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, Final

import click
from matplotlib.figure import Figure

from muri_lab.benchmarks.bars import tell
from muri_lab.benchmarks.machine import describe_machine
from muri_lab.benchmarks.scale import deciding
from muri_lab.benchmarks.scale_clusters import Size

CURVES: Final = Path(__file__).with_name("results") / "scale_curves.json"
PICTURE: Final = Path(__file__).parents[3] / "docs" / "images" / "scale.png"

JOBS: Final = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
LINES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "auto, all GPUs taken": ("auto", {"full": True}),
    "auto, 2,000 groups to join": ("auto", {"full": True, "groups": 2_000}),
    "auto, all GPUs free": ("auto", {}),
    "muri-jct, all GPUs free": ("muri-jct", {}),
    "muri-hybrid, all GPUs free": ("muri-hybrid", {}),
}
"""Each line's policy, and what its cluster is like; all have 2,000 nodes and 100 users."""


def measure() -> dict[str, Any]:
    """Measure every point, each in a process of its own."""
    lines: dict[str, list[dict[str, Any]]] = {line: [] for line in LINES}
    for line, jobs in product(LINES, JOBS):
        command = [sys.executable, __file__, "--point", line, str(jobs)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines[line].append({"jobs": jobs, **json.loads(done.stdout)})
        tell(f"{line}, {jobs} jobs: {lines[line][-1]['cpu_s']} s of CPU")
    return {"machine": describe_machine(), "lines": lines}


def draw(curves: dict[str, Any]) -> None:
    """Draw all lines on logarithmic axes."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for line, points in curves["lines"].items():
        axes.plot([point["jobs"] for point in points], [point["cpu_s"] for point in points], marker="o", label=line)
    axes.set(
        xscale="log", yscale="log", xlabel="waiting jobs", ylabel="CPU seconds of a decision",
        title="A cycle's decision on 2,000 nodes with 16,000 GPUs",
    )  # fmt: skip
    axes.set_xticks(JOBS, [f"{jobs:,}" for jobs in JOBS])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=120)
    tell(f"wrote {PICTURE}")


@click.command(help=__doc__)
@click.option("--draw", "only_draw", is_flag=True, help="Measure nothing.")
@click.option("--point", type=(str, int), hidden=True, help="Measure one point of a line and print it.")
def main(*, only_draw: bool, point: tuple[str, int] | None) -> None:
    """Measure and draw."""
    if point:
        policy, cluster = LINES[point[0]]
        click.echo(json.dumps(deciding(Size(point[1], **cluster), policy)()))
        return
    if not only_draw:
        CURVES.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(CURVES.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
