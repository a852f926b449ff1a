"""An experiment's page, as Markdown and as HTML: ours, the published figure and the ratio, cell by cell."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from muri.files import whole_file
from muri.profiler.records import RESOURCES
from muri.simulator.metrics import PolicySummary, TraceSummary, duration
from muri_lab.experiments.experiment import Experiment, Metric, Published, PublishedRange, Variant, published_runs
from muri_lab.report.html import Cell, page, table
from muri_lab.report.write import write_files, written_to

METRICS: Final = {
    "avg_jct_s": "average JCT",
    "median_jct_s": "median JCT",
    "p99_jct_s": "p99 JCT",
    "makespan_s": "makespan",
    "queue_length_mean": "waiting jobs",
    "blocking_index_mean": "blocking index",
    **{f"{name}_busy": f"{name} busy" for name in RESOURCES},
}

_HEADER: Final = ("Variant", "Figure", "Ours", "Published", "Ours / published")
_NONE: Final = "none"
_BUSY: Final = "_busy"
_SECONDS: Final = "_s"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell of an experiment."""

    trace: str  # Name of the trace, with a prime if all jobs are submitted at its start
    variant: str  # Name of the variant
    metric: Metric  # Name of the metric
    ours: float | None  # In the metric's unit, or divided by another variant's figure; None: that is 0
    published: float | None = None  # The published figure in the same unit; None: there is none
    at_most: bool = False  # Whether the published figure is an upper bound
    over: str | None = None  # Our figure is divided by that of this variant; None: it is in the metric's unit

    @property
    def ratio(self) -> float | None:
        """Ours over the published figure."""
        return self.ours / self.published if self.ours is not None and self.published else None

    def as_json(self) -> dict[str, Any]:
        """All of it as a mapping."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True, slots=True)
class RangeComparison:
    """The least and the largest ratio of a metric, over all traces and variants."""

    metric: Metric  # Name of the metric
    over: str  # The figures of the other variants are divided by those of this one
    ours: tuple[float, float]  # Least and largest
    published: tuple[float, float]  # Likewise

    def as_json(self) -> dict[str, Any]:
        """All of it as a mapping."""
        return asdict(self)


def compare(experiment: Experiment, summaries: Sequence[TraceSummary]) -> tuple[Comparison, ...]:
    """All cells: traces × variants × metrics, in this order."""
    cells: list[Comparison] = []
    published = _Published(experiment)
    for summary in summaries:
        of_name = {policy.label: policy for policy in summary.policies}
        for variant in experiment.variants:
            over = experiment.base_of(variant)
            for metric in experiment.metrics:
                ours = _ours(of_name[variant.name], of_name[over] if over else None, metric)
                figure, at_most = published.find(summary.name, variant, metric)
                cells.append(Comparison(summary.name, variant.name, metric, ours, figure, at_most, over))
    return tuple(cells)


def compare_ranges(experiment: Experiment, summaries: Sequence[TraceSummary]) -> tuple[RangeComparison, ...]:
    """The published ranges, and ours over the same traces; none where other traces were run."""
    wanted = {trace + "'" * zero for trace in experiment.traces for zero in experiment.submit_at_zero}
    if wanted != {summary.name for summary in summaries}:
        return ()
    return tuple(
        RangeComparison(one.metric, one.over, (min(ratios), max(ratios)), (one.low, one.high))
        for one in experiment.ranges
        if (ratios := [ratio for summary in summaries for ratio in _ratios(one, summary)])
    )


def _ratios(wanted: PublishedRange, summary: TraceSummary) -> Iterator[float]:
    of_name = {policy.label: policy for policy in summary.policies}
    for name, policy in of_name.items():
        ratio = _ours(policy, of_name[wanted.over], wanted.metric)
        if name != wanted.over and ratio is not None:
            yield ratio


def _ours(policy: PolicySummary, base: PolicySummary | None, metric: Metric) -> float | None:
    own = _figure(policy, metric)
    if base is None:
        return own
    divisor = _figure(base, metric)
    return own / divisor if divisor else None


def _figure(policy: PolicySummary, metric: Metric) -> float:
    resource = metric.removesuffix(_BUSY)
    value: float = policy.figures["utilization"][resource] if resource != metric else policy.figures[metric]
    return value


class _Published:
    """Looks up published figures: the experiment's own, then those of the public simulator's runs."""

    def __init__(self, experiment: Experiment) -> None:
        self._own = {(one.trace, one.variant): one for one in experiment.published}
        self._runs: dict[tuple[str, str], Published] = published_runs() if experiment.published_runs else {}

    def find(self, trace: str, variant: Variant, metric: Metric) -> tuple[float | None, bool]:
        """The figure, and whether it is an upper bound."""
        for place in (self._own.get((trace, variant.name)), self._run(trace, variant)):
            if place is not None and place.figure(metric) is not None:
                return place.figure(metric), place.at_most
        return None, False

    def _run(self, trace: str, variant: Variant) -> Published | None:
        changed = variant.options or variant.profile_noise or variant.bottleneck_types
        return None if changed else self._runs.get((trace, variant.policy))


@dataclass(frozen=True, slots=True)
class Findings:
    """An experiment's outcome beside what is published."""

    experiment: Experiment  # What was run
    cells: tuple[Comparison, ...]  # All cells
    ranges: tuple[RangeComparison, ...] = ()  # Over all traces
    missing: tuple[str, ...] = ()  # Traces that were not given

    @classmethod
    def of(cls, experiment: Experiment, summaries: Sequence[TraceSummary], missing: Sequence[str] = ()) -> "Findings":
        """Compare the runs of an experiment with what is published."""
        cells, ranges = compare(experiment, summaries), compare_ranges(experiment, summaries)
        return cls(experiment, cells, ranges, tuple(missing))

    def as_json(self) -> dict[str, Any]:
        """The cells and ranges as a mapping."""
        ranges = {"ranges": [one.as_json() for one in self.ranges]} if self.ranges else {}
        return {"cells": [cell.as_json() for cell in self.cells], **ranges}


def write_experiment(findings: Findings, summaries: Sequence[TraceSummary], folder: Path) -> None:
    """Write experiment.md, experiment.html, runs as results.json and CSV files, and curves as PNG files."""
    with written_to(folder):
        write_files(summaries, folder)
        for name, page in (("experiment.md", markdown_page), ("experiment.html", html_page)):
            with whole_file(folder / name) as draft:
                draft.write_text(page(findings), encoding="utf-8")
        if findings.experiment.curves:
            from muri_lab.report.images import write_curves

            write_curves(summaries, folder)


def markdown_page(findings: Findings) -> str:
    """The page as Markdown."""
    experiment = findings.experiment
    lines = [f"# {_title(experiment)}", "", experiment.about.strip(), "", *_notes(findings)]
    for heading, rows in _tables(findings):
        lines += [f"## {heading}", "", _markdown_line(_HEADER), "|---|---|---:|---:|---:|"]
        lines += [_markdown_line(texts) for texts in rows]
        lines.append("")
    return "\n".join(lines)


def html_page(findings: Findings) -> str:
    """The page as HTML that opens offline."""
    title = _title(findings.experiment)
    notes = " ".join(_notes(findings))
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(findings.experiment.about)}</p>", f"<p>{escape(notes)}</p>"]
    for heading, rows in _tables(findings):
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts.append(table(_HEADER, [_html_row(texts) for texts in rows]))
    return page(title, "\n".join(parts))


def _title(experiment: Experiment) -> str:
    return f"{experiment.figure}: {experiment.title}"


def _notes(findings: Findings) -> Iterator[str]:
    experiment = findings.experiment
    yield (
        f"Model {experiment.model}, {experiment.nodes} × {experiment.gpus_per_node} GPUs, "
        + (f"a plan every {experiment.interval_s:g} s." if experiment.interval_s else "a plan at every event.")
    )
    if experiment.relative_to:
        yield f"Figures are divided by those of {experiment.relative_to}; above 1 is longer."
    yield f"“{_NONE}”: no figure has been published for this cell."
    if findings.missing:
        yield f"Not run, for their traces were not given: {', '.join(findings.missing)}."
    yield ""


def _tables(findings: Findings) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Heading and rows: one table for each trace, and one for the ranges."""
    base = findings.experiment.relative_to
    for trace, group in groupby(findings.cells, key=lambda cell: cell.trace):
        yield trace, [_cell_texts(cell, base) for cell in group]
    if findings.ranges:
        yield "All traces: the least and the largest ratio", [_range_texts(one) for one in findings.ranges]


def _cell_texts(cell: Comparison, base: str | None) -> tuple[str, ...]:
    name = f"{cell.variant} ÷ {cell.over}" if cell.over and cell.over != base else cell.variant
    published = ("≤ " if cell.at_most else "") + _figure_text(cell, cell.published)
    ratio = "-" if cell.ratio is None else f"{cell.ratio:.4f}"
    return name, METRICS[cell.metric], _figure_text(cell, cell.ours), published, ratio


def _range_texts(one: RangeComparison) -> tuple[str, ...]:
    ours, published = (f"{low:.2f} to {high:.2f}" for low, high in (one.ours, one.published))
    ratio = ", ".join(f"{own / their:.4f}" for own, their in zip(one.ours, one.published, strict=True))
    return f"others ÷ {one.over}", METRICS[one.metric], ours, published, ratio


def _figure_text(cell: Comparison, value: float | None) -> str:
    if value is None:
        return _NONE
    if cell.over or not cell.metric.endswith(_SECONDS):
        return f"{value:.3f}"
    return f"{value:,.0f} s ({duration(value)})"


def _markdown_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _html_row(texts: tuple[str, ...]) -> list[Cell]:
    return [Cell(text, word=index == 1) for index, text in enumerate(texts)]
