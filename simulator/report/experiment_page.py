"""An experiment's page, as Markdown and as HTML: ours, the published figure and the ratio, cell by cell."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final

from muri.simulator import units
from muri.simulator.comparison import Comparison
from muri.simulator.experiment import Experiment
from muri.simulator.report.html import Cell, page, table

_METRICS: Final = {
    "avg_jct_s": "average JCT",
    "median_jct_s": "median JCT",
    "p99_jct_s": "p99 JCT",
    "makespan_s": "makespan",
}
_HEADER: Final = ("Variant", "Figure", "Ours", "Published", "Ours / published")
_NONE: Final = "none"


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
        lines += [f"## {trace}", "", _line(_HEADER), "|---|---|---:|---:|---:|"]
        lines += [_line(texts) for texts in map(_texts(experiment), rows)]
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
        return f"{value:.3f}" if experiment.relative_to else f"{value:,.0f} s ({units.duration(value)})"

    def texts(cell: Comparison) -> tuple[str, ...]:
        published = ("≤ " if cell.at_most else "") + figure(cell.published)
        ratio = "-" if cell.ratio is None else f"{cell.ratio:.4f}"
        return cell.variant, _METRICS[cell.metric], figure(cell.ours), published, ratio

    return texts


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _html_row(texts: tuple[str, ...]) -> list[Cell]:
    return [Cell(text, word=index == 1) for index, text in enumerate(texts)]
