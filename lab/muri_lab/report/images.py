"""The plots as PNG files for papers and slides, drawn by matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from muri.files import whole_file
from muri.profiler.records import RESOURCES
from muri.simulator.model import SimulationResult
from muri.simulator.summary import PolicySummary, TraceSummary
from muri_lab.report import series
from muri_lab.report.series import GROUP_COLOURS, Curve, colour, time_unit

_SIZE_INCHES = (7.0, 4.2)


def write_images(summary: TraceSummary, folder: Path) -> tuple[Path, ...]:
    """Draw one trace's plots into a folder; the timeline of each policy has a file of its own."""
    paths = [folder / "jct-cdf.png", *write_curves(summary, folder)]
    _draw_cdf(summary.policies, paths[0])
    for policy in summary.policies:
        if policy.outcomes[0].result.spans:
            paths.append(folder / f"timeline-{policy.label}.png")
            _draw_timeline(policy, paths[-1])
    return tuple(paths)


def write_curves(summary: TraceSummary, folder: Path) -> tuple[Path, ...]:
    """Draw what happens over time on one trace: waiting jobs, blocking index, busy resources."""
    drawings: dict[str, Callable[[Path], None]] = {
        "queue-length.png": lambda path: _draw_steps(summary.policies, series.queue_length, "waiting jobs", path),
        "blocking-index.png": lambda path: _draw_steps(summary.policies, series.blocking_index, "blocking index", path),
        "utilization.png": lambda path: _draw_utilization(summary.policies, path),
    }
    for name, draw in drawings.items():
        draw(folder / name)
    return tuple(folder / name for name in drawings)


def _results(policies: Sequence[PolicySummary]) -> list[tuple[str, str, SimulationResult]]:
    return [(policy.label, colour(index), policy.outcomes[0].result) for index, policy in enumerate(policies)]


def _save(figure: Figure, path: Path) -> None:
    with whole_file(path) as draft:
        figure.savefig(draft, dpi=150, metadata={"Software": None})


def _axes(figure: Figure, x_title: str, y_title: str) -> Axes:
    axes = figure.add_subplot()
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.grid(visible=True, alpha=0.3)
    return axes


def _draw_cdf(policies: Sequence[PolicySummary], path: Path) -> None:
    curves = [(label, shade, series.jct_cdf(result)) for label, shade, result in _results(policies)]
    size_s, unit = time_unit(max(curve.x[-1] for _, _, curve in curves))
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = _axes(figure, f"completion time ({unit})", "share of jobs")
    for label, shade, curve in curves:
        axes.plot([x / size_s for x in curve.x], curve.y, color=shade, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.legend()
    _save(figure, path)


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


def _draw_timeline(policy: PolicySummary, path: Path) -> None:
    result = policy.outcomes[0].result
    bars, left_out = series.timeline(result)
    size_s, unit = time_unit(max(bar.span.end_s for bar in bars))
    figure = Figure(figsize=(_SIZE_INCHES[0], 5.2), layout="constrained")
    axes = _axes(figure, f"time ({unit})", "GPU")
    boxes = [
        Rectangle((bar.span.start_s / size_s, bar.lane), (bar.span.end_s - bar.span.start_s) / size_s, bar.drawn_height)
        for bar in bars
    ]
    shades = [GROUP_COLOURS[min(len(bar.span.members), len(GROUP_COLOURS)) - 1] for bar in bars]
    axes.add_collection(PatchCollection(boxes, facecolors=shades, linewidths=0))
    axes.set_xlim(0, max(bar.span.end_s for bar in bars) / size_s)
    axes.set_ylim(result.cluster.gpu_count, 0)
    words = ("alone", "2 jobs", "3 jobs", "4 jobs")
    handles = [Patch(color=shade, label=word) for shade, word in zip(GROUP_COLOURS, words, strict=True)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    shown = f" ({left_out:,} small stays are not drawn)" if left_out else ""
    axes.set_title(policy.label + shown, fontsize=10)
    _save(figure, path)
