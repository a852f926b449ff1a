"""Experiments of a paper, and how their figures are kept."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muri_lab.benchmarks.bars import describe_machine

ROOT = Path(__file__).parents[4]
RESULTS = Path(__file__).parents[1] / "results" / "papers"
GAVELS = "the table of pairs that Gavel's authors measured on a V100"

Figure = float | str | None
"""A number, or words where a number would say too much ("≤ 1.3", "0.9 to 1.1"); None: there is none."""


class MissingDataError(Exception):
    """A trace or table that the published figures are of is not at hand."""


def needed(path: Path, what: str) -> Path:
    """The path of published data."""
    if not path.is_file():
        raise MissingDataError(f"{what} is not at hand: there is no {path}")
    return path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    case: str  # What was run, as "4 kinds, trace1, srtf"
    figure: str  # What the number is, as "average JCT over that of muri-s"
    unit: str  # Its unit ("×", "h", "%"); "" where it has none
    published: Figure  # The paper's
    ours: Figure  # Ours


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot: y over x, two sequences of equal length."""

    name: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of an experiment."""

    rows: tuple[Row, ...]  # Its figures
    difference: str  # Why ours differ from the published ones; a short paragraph
    curves: tuple[Curve, ...] = ()  # What to draw; none where the rows say it all


@dataclass(frozen=True, slots=True)
class Experiment:
    """A figure or table of a paper that one command repeats."""

    name: str  # As "synergy-fig7"; the command's argument and the name of the result file
    place: str  # Its place in the paper, as "Figure 7"
    title: str  # compared quantities
    split: str  # On which data something was fitted or tuned, and on which it is judged
    run: Callable[[bool], Outcome]  # Runs it; True: only a small part that takes seconds, for the tests
    run_on: Callable[[Sequence[Path]], Outcome] | None = None  # runs it on other traces than the published ones


def document_of(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """An outcome as --json prints it."""
    return {
        "name": experiment.name,
        "place": experiment.place,
        "title": experiment.title,
        "split": experiment.split,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in outcome.rows],
        "difference": outcome.difference,
        "curves": [asdict(curve) for curve in outcome.curves],
    }


def keep(experiment: Experiment, outcome: Outcome) -> Path:
    """Store an outcome, its curves as a plot; returns the path of the figures."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{experiment.name}.json"
    names = list(dict.fromkeys(curve.name for curve in outcome.curves))
    document = document_of(experiment, outcome) | {"curves": names}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if outcome.curves:
        _draw(experiment, outcome.curves)
    return path


def shown(figure: Figure, unit: str) -> str:
    """A figure for people: three significant digits, or thousands in whole numbers; "-" where there is none."""
    if figure is None:
        return "-"
    number = figure if isinstance(figure, str) else f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"
    return f"{number} {unit}".rstrip()


def _draw(experiment: Experiment, curves: tuple[Curve, ...]) -> None:
    """One panel for each pair of axes."""
    from matplotlib.figure import Figure as Sheet

    axes_labels = list(dict.fromkeys((curve.x_label, curve.y_label) for curve in curves))
    sheet = Sheet(figsize=(7, 3.2 * len(axes_labels)), layout="constrained")
    for number, (x_label, y_label) in enumerate(axes_labels, 1):
        axes = sheet.add_subplot(len(axes_labels), 1, number)
        for curve in curves:
            if (curve.x_label, curve.y_label) == (x_label, y_label):
                axes.plot(curve.x, curve.y, label=curve.name, linewidth=1.3)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    sheet.suptitle(f"{experiment.place}: {experiment.title}", fontsize="medium")
    sheet.savefig(RESULTS / f"{experiment.name}.png", dpi=80)
