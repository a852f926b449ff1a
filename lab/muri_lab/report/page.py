"""report.html: a table of the policies, then interactive plots of each trace."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import plotly.graph_objects as go

from muri.profiler.records import RESOURCES
from muri.simulator.metrics import PolicySummary, TraceSummary, count, duration, percent, ratio
from muri.simulator.model import Settings, SimulationResult
from muri.text import counted
from muri_lab.report import series
from muri_lab.report.html import Cell, page, plot_script, table
from muri_lab.report.series import GROUP_COLORS, color, time_unit

_HEADER: Final = (
    "Policy", "Average JCT", "Median JCT", "p99 JCT", "Makespan", "Queue", "Storage", "CPU", "GPU", "Network",
    "Speed-up",
)  # fmt: skip

_TIMES: Final = ("avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s", "queue_length_mean")

_NOTE: Final = (
    "JCT: time from a job's submission to its end. Queue: mean number of waiting jobs. Storage to network: busy share "
    "of each resource. Speed-up: how many times shorter the average JCT is than under the first policy. "
    "The best figure of a column is green."
)

_PLOT_CONFIG: Final = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "responsive": True,
}

_LEGEND: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
_DECADES: Final = {"type": "log", "exponentformat": "power"}
_WORDS: Final = {"storage": "Storage", "cpu": "CPU", "gpu": "GPU", "network": "Network"}


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its heading and caption."""

    key: str  # Short name, part of its element's id
    title: str  # Heading
    caption: str  # How to read it
    figure: Any  # A plotly figure


def report_page(summaries: Sequence[TraceSummary]) -> str:
    """The whole page as HTML, scripts and styles inside."""
    names = ", ".join(summary.name for summary in summaries)
    parts = [f"<h1>Simulation of {escape(names)}</h1>", f"<p>{escape(_NOTE)}</p>"]
    for number, summary in enumerate(summaries):
        parts.extend(_tables(number, summary))
    for number, summary in enumerate(summaries):
        parts.extend(_plots(number, summary, several=len(summaries) > 1))
    parts.append("<footer>Made by muri simulate. This page holds all that it shows and loads nothing.</footer>")
    return page(f"Muri: {names}", "\n".join(parts), scripts=plot_script())


def _tables(number: int, summary: TraceSummary) -> Iterator[str]:
    yield f'<h2 id="trace-{number}">{escape(summary.name)}</h2>'
    yield f"<p>{escape(_circumstances(summary))}</p>"
    yield table(_HEADER, [_cells(summary, policy) for policy in summary.policies])


def _circumstances(summary: TraceSummary) -> str:
    run = summary.policies[0].outcomes[0].run
    cluster, settings = run.cluster, run.settings
    words = [
        f"{len(run.trace.jobs):,} jobs on {cluster.node_count} × {cluster.gpus_per_node} GPUs",
        f"model {settings.model}",
        *_settings_words(settings),
    ]
    seeds = len(summary.policies[0].outcomes)
    if seeds > 1:
        words.append(f"the table is the mean of {seeds} seeds, the plots show the first")
    if run.first is not None:
        words.append(f"figures are of jobs {run.first} to {(run.last or 0) - 1}, the plots of all")
    if summary.skipped_rows:
        words.append(f"{counted(summary.skipped_rows, 'bad row')} left out")
    return "; ".join(words) + "."


def _settings_words(settings: Settings) -> Iterator[str]:
    yield f"a plan every {settings.interval_s:g} s" if settings.interval_s else "a plan at every event"
    if settings.model == "default":
        yield f"{settings.restart_s:g} s for a restart"
    if not settings.durations_known:
        yield "durations unknown"
    if settings.profile_noise:
        yield f"profile noise {settings.profile_noise:g}"
    if settings.outages:
        yield f"{len(settings.outages)} outages"


def _cells(summary: TraceSummary, policy: PolicySummary) -> list[Cell]:
    figures = policy.figures
    formats = (*[duration] * 4, count)
    times = [
        Cell(write(figures[name]), best=_is_least(name, policy, summary.policies))
        for name, write in zip(_TIMES, formats, strict=True)
    ]
    busy = [Cell(percent(figures["utilization"][name])) for name in ("storage", "cpu", "gpu", "network")]
    return [Cell(policy.label), *times, *busy, Cell(ratio(summary.speedup(policy)))]


def _is_least(name: str, policy: PolicySummary, policies: Sequence[PolicySummary]) -> bool:
    return len(policies) > 1 and policy.figures[name] == min(other.figures[name] for other in policies)


def _plots(number: int, summary: TraceSummary, *, several: bool) -> Iterable[str]:
    if several:
        yield f"<h2>Plots of {escape(summary.name)}</h2>"
    for plot in plots_of(summary):
        yield _section(number, plot)


def _section(number: int, plot: Plot) -> str:
    drawing = plot.figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"plot-{number}-{plot.key}", config=_PLOT_CONFIG
    )
    return f'<section class="plot"><h3>{escape(plot.title)}</h3><p>{escape(plot.caption)}</p>{drawing}</section>'


def plots_of(summary: TraceSummary) -> tuple[Plot, ...]:
    """All plots of one trace, of the first seed."""
    plots = [_jct_plot(summary.policies), _queue_plot(summary.policies), _utilization_plot(summary.policies)]
    if len(summary.policies) > 1:
        plots.append(_speedup_plot(summary.policies))
    plots += [_timeline_plot(index, policy) for index, policy in enumerate(summary.policies) if _first(policy).spans]
    return tuple(plots)


def _first(policy: PolicySummary) -> SimulationResult:
    return policy.outcomes[0].result


def _line(policy: PolicySummary, index: int, curve: series.Curve, size_s: float, **more: Any) -> Any:
    x = [value / size_s for value in curve.x]
    line = {"color": color(index), "width": 2}
    return go.Scatter(x=x, y=curve.y, name=policy.label, mode="lines", line=line, **more)


def _layout(figure: Any, x_title: str, y_title: str, height_px: int = 420) -> Any:
    figure.update_layout(
        template="none",
        height=height_px,
        margin={"l": 64, "r": 16, "t": 40, "b": 56},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        legend=_LEGEND,
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "orientation": "h"},
    )
    figure.update_xaxes(title_text=x_title, zeroline=False)
    figure.update_yaxes(title_text=y_title, zeroline=False)
    return figure


def _jct_plot(policies: Sequence[PolicySummary]) -> Plot:
    curves = [series.jct_cdf(_first(policy)) for policy in policies]
    size_s, unit = time_unit(max(curve.x[-1] for curve in curves))
    lines = [_line(*pair, size_s) for pair in _numbered(policies, curves)]
    figure = _layout(go.Figure(lines), f"completion time ({unit})", "share of jobs")
    figure.update_xaxes(**_DECADES)
    figure.update_yaxes(range=[0, 1.01], tickformat=".0%")
    caption = "Share of the jobs that are done within a time of their submission; further left and up is better."
    return Plot("jct", "Job completion times", caption, figure)


def _queue_plot(policies: Sequence[PolicySummary]) -> Plot:
    curves = [series.queue_length(_first(policy)) for policy in policies]
    size_s, unit = time_unit(_end_s(curves))
    lines = [_line(*pair, size_s, line_shape="hv") for pair in _numbered(policies, curves)]
    figure = _layout(go.Figure(lines), f"time ({unit})", "waiting jobs")
    figure.update_yaxes(rangemode="tozero")
    return Plot("queue", "Queue length", "Jobs that wait for GPUs; lower is better.", figure)


def _utilization_plot(policies: Sequence[PolicySummary]) -> Plot:
    from plotly.subplots import make_subplots

    curves = [series.utilization(_first(policy)) for policy in policies]
    size_s, unit = time_unit(_end_s([one["gpu"] for one in curves]))
    titles = [_WORDS[name] for name in RESOURCES]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.12)
    for position, name in enumerate(RESOURCES):
        place = {"row": position // 2 + 1, "col": position % 2 + 1}
        for policy, index, curve in _numbered(policies, [one[name] for one in curves]):
            line = _line(
                policy, index, curve, size_s, line_shape="hv", legendgroup=policy.label, showlegend=not position
            )
            figure.add_trace(line, **place)
    _layout(figure, "", "", height_px=560)
    figure.update_yaxes(range=[0, 1.01], tickformat=".0%")
    figure.update_xaxes(title_text=f"time ({unit})", row=2)
    figure.update_layout(legend={**_LEGEND, "y": 1.08})
    caption = "Busy share of each resource of the whole cluster; interleaved jobs keep several busy at the same time."
    return Plot("utilization", "Utilisation", caption, figure)


def _speedup_plot(policies: Sequence[PolicySummary]) -> Plot:
    base = policies[0]
    points = [series.job_speedups(_first(base), _first(policy)) for policy in policies[1:]]
    size_s, unit = time_unit(max((point.base_jct_s for each in points for point in each), default=0.0))
    figure = go.Figure([_dots(policy, index + 1, points[index], size_s) for index, policy in enumerate(policies[1:])])
    _layout(figure, f"completion time under {base.label} ({unit})", "speed-up")
    figure.update_xaxes(**_DECADES)
    figure.update_yaxes(**_DECADES, ticksuffix="×")
    figure.add_hline(y=1, line_dash="dot", line_color="#7A7A7A")
    caption = f"Each dot is a job: above the dotted line it is done sooner than under {base.label}, below it later."
    return Plot("speedup", "Speed-up of each job", caption, figure)


def _dots(policy: PolicySummary, index: int, points: Sequence[series.JobPoint], size_s: float) -> Any:
    words = [
        f"job {point.job_id}, {point.gpu_count} GPUs<br>{duration(point.base_jct_s)} → {duration(point.jct_s)}"
        for point in points
    ]
    return go.Scatter(
        x=[point.base_jct_s / size_s for point in points],
        y=[point.speedup for point in points],
        name=policy.label,
        mode="markers",
        marker={"color": color(index), "size": 5, "opacity": 0.6},
        text=words,
        hovertemplate="%{text}<br>%{y:.2f}×",
    )


def _timeline_plot(index: int, policy: PolicySummary) -> Plot:
    result = _first(policy)
    bars, left_out = series.timeline(result)
    size_s, unit = time_unit(max(bar.span.end_s for bar in bars))
    sizes = sorted({len(bar.span.members) for bar in bars})
    figure = go.Figure([_bars(size, [bar for bar in bars if len(bar.span.members) == size], size_s) for size in sizes])
    _layout(figure, f"time ({unit})", "GPU", height_px=min(900, 260 + 6 * result.cluster.gpu_count))
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_yaxes(range=[result.cluster.gpu_count, 0])
    shown = f" {left_out:,} small stays are not drawn." if left_out else ""
    caption = f"Who holds which GPUs when; the color says how many jobs share them.{shown}"
    return Plot(f"timeline-{index}", f"Groups over time: {policy.label}", caption, figure)


def _bars(size: int, bars: Sequence[series.Bar], size_s: float) -> Any:
    return go.Bar(
        orientation="h",
        base=[bar.span.start_s / size_s for bar in bars],
        x=[(bar.span.end_s - bar.span.start_s) / size_s for bar in bars],
        y=[bar.lane + bar.height / 2 for bar in bars],
        width=[bar.drawn_height for bar in bars],
        name="alone" if size == 1 else f"{size} jobs",
        marker={"color": GROUP_COLORS[min(size, len(GROUP_COLORS)) - 1], "line": {"width": 0}},
        text=["jobs " + ", ".join(map(str, bar.span.members)) for bar in bars],
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )


def _numbered(
    policies: Sequence[PolicySummary], curves: Sequence[series.Curve]
) -> list[tuple[PolicySummary, int, series.Curve]]:
    return [(policy, index, curve) for index, (policy, curve) in enumerate(zip(policies, curves, strict=True))]


def _end_s(curves: Sequence[series.Curve]) -> float:
    return max((curve.x[-1] for curve in curves if curve.x), default=0.0)
