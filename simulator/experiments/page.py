"""An experiment's page, as Markdown and as HTML: ours, the published figure and the ratio, cell by cell."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from muri.simulator.experiments.experiment import Experiment, Metric, Published, Variant, published_runs
from muri.simulator.report.html import Cell, page, table
from muri.simulator.report.write import write_files, written_to
from muri.simulator.sweep.metrics import duration
from muri.simulator.sweep.summary import PolicySummary, TraceSummary

METRICS: Final = {
    "avg_jct_s": "average JCT",
    "median_jct_s": "median JCT",
    "p99_jct_s": "p99 JCT",
    "makespan_s": "makespan",
}

_HEADER: Final = ("Variant", "Figure", "Ours", "Published", "Ours / published")
_NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell of an experiment.

    Attributes:
        trace: Name of the trace, with a prime if all jobs are submitted at its start.
        variant: Name of the variant.
        metric: Name of the metric.
        ours: Seconds, or the ratio to another variant where the experiment says so; None: there are no jobs.
        published: The published figure in the same unit; None: there is none.
        at_most: Whether the published figure is an upper bound.
        ratio: Ours over the published one.
    """

    trace: str
    variant: str
    metric: Metric
    ours: float | None
    published: float | None = None
    at_most: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours over the published figure."""
        return self.ours / self.published if self.ours is not None and self.published else None

    def as_json(self) -> dict[str, Any]:
        """All of it as a mapping."""
        return {**asdict(self), "ratio": self.ratio}


def compare(experiment: Experiment, summaries: Sequence[TraceSummary]) -> tuple[Comparison, ...]:
    """All cells: traces × variants × metrics, in this order."""
    cells: list[Comparison] = []
    published = _Published(experiment)
    for summary in summaries:
        of_name = {policy.label: policy for policy in summary.policies}
        base = of_name[experiment.relative_to] if experiment.relative_to else None
        for variant in experiment.variants:
            for metric in experiment.metrics:
                ours = _ours(of_name[variant.name], base, metric)
                figure, at_most = published.find(summary.name, variant, metric)
                cells.append(Comparison(summary.name, variant.name, metric, ours, figure, at_most))
    return tuple(cells)


def _ours(policy: PolicySummary, base: PolicySummary | None, metric: Metric) -> float | None:
    own: float = policy.figures[metric]
    if base is None:
        return own
    return own / base.figures[metric] if base.figures[metric] else None


class _Published:
    """Looks up published figures: the experiment's own, then those of the public simulator's runs."""

    def __init__(self, experiment: Experiment) -> None:
        self._own = {(one.trace, one.variant): one for one in experiment.published}
        self._runs: dict[tuple[str, str], Published] = published_runs() if experiment.published_runs else {}

    def find(self, trace: str, variant: Variant, metric: Metric) -> tuple[float | None, bool]:
        """The figure, and whether it is an upper bound."""
        places = (self._own.get((trace, variant.name)), self._own.get((None, variant.name)))
        for place in (*places, self._run(trace, variant)):
            if place is not None and place.figure(metric) is not None:
                return place.figure(metric), place.at_most
        return None, False

    def _run(self, trace: str, variant: Variant) -> Published | None:
        changed = variant.options or variant.profile_noise or variant.bottleneck_types
        return None if changed else self._runs.get((trace, variant.policy))


def write_experiment(
    experiment: Experiment,
    cells: Sequence[Comparison],
    missing: Sequence[str],
    summaries: Sequence[TraceSummary],
    folder: Path,
) -> None:
    """Write an experiment's page as experiment.md and experiment.html, and its runs as results.json and CSV files.

    Raises:
        ReportError: The folder can't be written to.
    """
    with written_to(folder):
        write_files(summaries, folder)
        (folder / "experiment.md").write_text(markdown_page(experiment, cells, missing), encoding="utf-8")
        (folder / "experiment.html").write_text(html_page(experiment, cells, missing), encoding="utf-8")


def markdown_page(experiment: Experiment, cells: Sequence[Comparison], missing: Sequence[str]) -> str:
    """The page as Markdown."""
    lines = [
        f"# {experiment.figure}: {experiment.title}",
        "",
        experiment.about.strip(),
        "",
        *_notes(experiment, missing),
    ]
    for trace, rows in _by_trace(cells):
        lines += [f"## {trace}", "", _markdown_line(_HEADER), "|---|---|---:|---:|---:|"]
        lines += [_markdown_line(texts) for texts in map(_texts(experiment), rows)]
        lines.append("")
    return "\n".join(lines)


def html_page(experiment: Experiment, cells: Sequence[Comparison], missing: Sequence[str]) -> str:
    """The page as HTML that opens offline."""
    title = f"{experiment.figure}: {experiment.title}"
    notes = " ".join(_notes(experiment, missing))
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(experiment.about)}</p>", f"<p>{escape(notes)}</p>"]
    for trace, rows in _by_trace(cells):
        parts.append(f"<h2>{escape(trace)}</h2>")
        parts.append(table(_HEADER, [_html_row(texts) for texts in map(_texts(experiment), rows)]))
    return page(title, "\n".join(parts))


def _notes(experiment: Experiment, missing: Sequence[str]) -> Iterator[str]:
    yield (
        f"Model {experiment.model}, {experiment.nodes} × {experiment.gpus_per_node} GPUs, "
        + (f"a plan every {experiment.interval_s:g} s." if experiment.interval_s else "a plan at every event.")
    )
    if experiment.relative_to:
        yield f"Figures are divided by those of {experiment.relative_to}; above 1 is longer."
    yield f"“{_NONE}”: no figure has been published for this cell."
    if missing:
        yield f"Not run, for their traces were not given: {', '.join(missing)}."
    yield ""


def _by_trace(cells: Sequence[Comparison]) -> Iterator[tuple[str, list[Comparison]]]:
    for trace, group in groupby(cells, key=lambda cell: cell.trace):
        yield trace, list(group)


def _texts(experiment: Experiment) -> Callable[[Comparison], tuple[str, ...]]:
    def figure(value: float | None) -> str:
        if value is None:
            return _NONE
        return f"{value:.3f}" if experiment.relative_to else f"{value:,.0f} s ({duration(value)})"

    def texts(cell: Comparison) -> tuple[str, ...]:
        published = ("≤ " if cell.at_most else "") + figure(cell.published)
        ratio = "-" if cell.ratio is None else f"{cell.ratio:.4f}"
        return cell.variant, METRICS[cell.metric], figure(cell.ours), published, ratio

    return texts


def _markdown_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _html_row(texts: tuple[str, ...]) -> list[Cell]:
    return [Cell(text, word=index == 1) for index, text in enumerate(texts)]
