"""Figures and tables of the Muri paper: `muri simulate --experiment`, kept for docs/papers.md."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.papers.frame import ROOT, Experiment, Outcome, Row
from muri.simulator.experiments.experiment import (
    experiment_names,
    find_traces,
    load_experiment,
    runs_of_experiment,
)
from muri.simulator.experiments.page import METRICS, Comparison, compare
from muri.simulator.model import Trace
from muri.simulator.sweep.runs import sweep
from muri.simulator.sweep.summary import summarise
from muri.simulator.traces.read import read_trace

TRACES: Final = ROOT.parent / "shared" / "traces"
SMALL: Final = ROOT / "examples" / "traces" / "short-and-crowded.csv"
QUICK_JOBS: Final = 60
SPLIT: Final = "Nothing is fitted: the simulator's constants are the public simulator's or stated in docs/simulator.md."


def simulated(name: str, quick: bool) -> Outcome:
    """Run an experiment of the simulator on the paper's traces, or on the first jobs of one of our own.

    Raises:
        ExperimentError: The paper's traces are not at hand.
    """
    experiment = load_experiment(name)
    if quick:
        small = read_trace(SMALL)
        traces = [replace(small, jobs=small.jobs[:QUICK_JOBS])]
    else:
        files = find_traces(experiment, TRACES, ()).files
        traces = [_named(path, trace) for trace, path in files.items()]
    summaries = summarise(sweep(runs_of_experiment(experiment, traces)))
    rows = tuple(_row(cell, "×" if experiment.relative_to else "h") for cell in compare(experiment, summaries))
    return Outcome(rows, " ".join(experiment.about.split()))


def _named(path: Path, name: str) -> Trace:
    return replace(read_trace(path), name=name)


def _row(cell: Comparison, unit: str) -> Row:
    scale = 3600.0 if unit == "h" else 1.0
    ours = None if cell.ours is None else cell.ours / scale
    published = None if cell.published is None else cell.published / scale
    words = f"≤ {published:.3g}" if cell.at_most and published is not None else published
    return Row(f"{cell.trace}, {cell.variant}", METRICS[cell.metric], unit, words, ours)


EXPERIMENTS: Final = tuple(
    Experiment(f"muri-{name}", experiment.figure, experiment.title, SPLIT, partial(simulated, name))
    for name in experiment_names()
    for experiment in [load_experiment(name)]
)
