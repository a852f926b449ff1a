"""Curves over time as PNG files, drawn by matplotlib."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muri.files import whole_file
from muri.profiler.records import RESOURCES
from muri.simulator.metrics import PolicySummary, TraceSummary
from muri.simulator.model import SimulationResult
from muri_lab.report import series
from muri_lab.report.series import Curve, color, time_unit

_UNSAFE: Final = re.compile(r"[^\w.+-]+")
_SIZE_INCHES: Final = (7.0, 4.2)


def write_curves(summaries: Sequence[TraceSummary], folder: Path) -> None:
    """Draw waiting jobs, blocking index and busy resources over time, each of several traces in a folder of its own."""
    for summary in summaries:
        target, policies = folder if len(summaries) == 1 else folder / safe_name(summary.name), summary.policies
        target.mkdir(exist_ok=True)
        _draw_steps(policies, series.queue_length, "waiting jobs", target / "queue-length.png")
        _draw_steps(policies, series.blocking_index, "blocking index", target / "blocking-index.png")
        _draw_utilization(policies, target / "utilization.png")


def safe_name(name: str) -> str:
    """A trace's name as that of a folder."""
    return _UNSAFE.sub("-", name).strip("-.") or "trace"


def _results(policies: Sequence[PolicySummary]) -> list[tuple[str, str, SimulationResult]]:
    return [(policy.label, color(index), policy.outcomes[0].result) for index, policy in enumerate(policies)]


def _save(figure: Figure, path: Path) -> None:
    with whole_file(path) as draft:
        figure.savefig(draft, dpi=150, metadata={"Software": None})


def _axes(figure: Figure, x_title: str, y_title: str) -> Axes:
    axes = figure.add_subplot()
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.grid(visible=True, alpha=0.3)
    return axes


def _draw_steps(
    policies: Sequence[PolicySummary], curve_of: Callable[[SimulationResult], Curve], y_title: str, path: Path
) -> None:
    curves = [(label, shade, curve_of(result)) for label, shade, result in _results(policies)]
    size_s, unit = time_unit(max((curve.x[-1] for _, _, curve in curves if curve.x), default=0.0))
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = _axes(figure, f"time ({unit})", y_title)
    for label, shade, curve in curves:
        axes.step([x / size_s for x in curve.x], curve.y, where="post", color=shade, label=label)
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(figure, path)


def _draw_utilization(policies: Sequence[PolicySummary], path: Path) -> None:
    results = _results(policies)
    curves = [series.utilization(result) for _, _, result in results]
    size_s, unit = time_unit(max((one["gpu"].x[-1] for one in curves if one["gpu"].x), default=0.0))
    figure = Figure(figsize=(_SIZE_INCHES[0], 5.6), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, RESOURCES, strict=True):
        for (label, shade, _), curve in zip(results, curves, strict=True):
            points = curve[name]
            axes.step([x / size_s for x in points.x], points.y, where="post", color=shade, label=label, linewidth=0.9)
        axes.set_title(name, fontsize=10)
        axes.set_ylim(0, 1.01)
        axes.grid(visible=True, alpha=0.3)
    figure.supxlabel(f"time ({unit})", fontsize=10)
    figure.supylabel("busy share", fontsize=10)
    grid.flat[0].legend(fontsize=8)
    _save(figure, path)
