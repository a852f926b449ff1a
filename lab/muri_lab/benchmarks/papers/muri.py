"""Figures and tables of the Muri paper: `muri simulate --experiment`, kept for the papers page.

MURI_PAPER_TRACES names the folder of the paper's traces; otherwise they are looked for in ../shared/traces. Where one
of an experiment's traces is missing, nothing is run: a published figure is set only beside ours of the same trace.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from muri.profiler.records import RESOURCES
from muri.simulator.metrics import TraceSummary, summarize
from muri.simulator.model import Trace
from muri.simulator.run import sweep
from muri.simulator.traces.read import read_trace
from muri_lab.benchmarks.papers.frame import ROOT, Curve, Experiment, MissingDataError, Outcome, Row
from muri_lab.experiments.experiment import Experiment as SimulatorExperiment
from muri_lab.experiments.experiment import (
    ExperimentError,
    experiment_names,
    find_traces,
    load_experiment,
    runs_of_experiment,
)
from muri_lab.experiments.page import METRICS, Comparison, Findings, RangeComparison
from muri_lab.report import series

TRACES: Final = Path(os.environ.get("MURI_PAPER_TRACES", ROOT.parent / "shared" / "traces"))
SMALL: Final = ROOT / "examples" / "traces" / "short-and-crowded.csv"
QUICK_JOBS: Final = 60
CURVE_POINTS: Final = 150
SPLIT: Final = "Nothing is fitted: the simulator's constants are the public simulator's or stated in docs/simulator.md."
CHOSEN: Final = (
    "No number is fitted, but two switches were chosen by the published points: slow groups are dissolved for all "
    "kinds, and Tiresias's queues serve Muri-L with one kind alone, because ours come near to the figure so."
)
"""What Figure 13 has instead."""


def simulated(name: str, quick: bool) -> Outcome:
    """Run an experiment of the simulator on the paper's traces, or on the first jobs of one of our own."""
    experiment = load_experiment(name)
    if quick:
        small = read_trace(SMALL)
        return _outcome(experiment, [replace(small, jobs=small.jobs[:QUICK_JOBS])])
    try:
        found = find_traces(experiment, TRACES, ())
    except ExperimentError as error:
        raise MissingDataError(str(error)) from error
    if found.missing:
        names = ", ".join(found.missing)
        raise MissingDataError(f"{TRACES} has no trace {names}; MURI_PAPER_TRACES names another folder")
    return _outcome(experiment, [_named(path, trace) for trace, path in found.files.items()])


def simulated_on(name: str, given: Sequence[Path]) -> Outcome:
    """Run an experiment of the simulator on given traces."""
    experiment = load_experiment(name)
    files = find_traces(experiment, None, given).files
    return _outcome(experiment, [_named(path, trace) for trace, path in files.items()])


def _outcome(experiment: SimulatorExperiment, traces: Sequence[Trace]) -> Outcome:
    summaries = summarize(sweep(runs_of_experiment(experiment, traces)))
    findings = Findings.of(experiment, summaries)
    rows = (*map(_row, findings.cells), *map(_range_row, findings.ranges))
    curves = tuple(_curves(summaries[0])) if experiment.curves else ()
    return Outcome(rows, " ".join(experiment.about.split()), curves)


def _named(path: Path, name: str) -> Trace:
    return replace(read_trace(path), name=name)


def _row(cell: Comparison) -> Row:
    unit = "×" if cell.over else "h" if cell.metric.endswith("_s") else ""
    scale = 3600.0 if unit == "h" else 1.0
    ours = None if cell.ours is None else cell.ours / scale
    published = None if cell.published is None else cell.published / scale
    words = f"≤ {published:.3g}" if cell.at_most and published is not None else published
    over = f" ÷ {cell.over}" if cell.over and cell.over != cell.variant else ""
    return Row(f"{cell.trace}, {cell.variant}{over}", METRICS[cell.metric], unit, words, ours)


def _range_row(one: RangeComparison) -> Row:
    published, ours = (f"{low:.2f} to {high:.2f}" for low, high in (one.published, one.ours))
    return Row(f"all traces, others ÷ {one.over}", METRICS[one.metric], "×", published, ours)


def _curves(summary: TraceSummary) -> Iterator[Curve]:
    """Waiting jobs, blocking index and busy resources over time on one trace, as in Figures 8a and 8b."""
    for policy in summary.policies:
        result = policy.outcomes[0].result
        busy = series.utilization(result)
        lines = {
            "waiting jobs": series.queue_length(result),
            "blocking index": series.blocking_index(result),
            **{f"{resource} busy": busy[resource] for resource in RESOURCES[:3]},
        }
        known = "known" if policy.outcomes[0].run.settings.durations_known else "unknown"
        for label, line in lines.items():
            yield Curve(policy.label, "time (h)", f"{label}, durations {known}", *_even(line))


def _even(steps: series.Curve) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Middles (hours) and means of intervals of equal length."""
    times, values = np.array(steps.x), np.array(steps.y)
    passed = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(times))))
    edges = np.linspace(times[0], times[-1], CURVE_POINTS + 1)
    means = np.diff(np.interp(edges, times, passed)) / np.diff(edges)
    middles = (edges[1:] + edges[:-1]) / 2 / 3600
    return tuple(middles.round(2).tolist()), tuple(means.round(4).tolist())


EXPERIMENTS: Final = tuple(
    Experiment(
        f"muri-{name}",
        experiment.figure,
        experiment.title,
        CHOSEN if name == "fig13" else SPLIT,
        partial(simulated, name),
        partial(simulated_on, name),
    )
    for name in experiment_names()
    for experiment in [load_experiment(name)]
)
