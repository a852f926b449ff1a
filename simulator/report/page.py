"""report.html: a table of the policies first, the plots below."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

from muri.simulator import units
from muri.simulator.model import Settings
from muri.simulator.report.figures import Plot, plots_of
from muri.simulator.report.html import Cell, page, plot_script, table
from muri.simulator.summary import PolicySummary, TraceSummary

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
        words.append(f"{summary.skipped_rows} bad rows were left out")
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
    formats = (*[units.duration] * 4, units.count)
    times = [
        Cell(write(figures[name]), best=_is_least(name, policy, summary.policies))
        for name, write in zip(_TIMES, formats, strict=True)
    ]
    busy = [Cell(units.percent(figures["utilization"][name])) for name in ("storage", "cpu", "gpu", "network")]
    return [Cell(policy.label), *times, *busy, Cell(units.ratio(summary.speedup(policy)))]


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
