"""The folder of `--out`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.simulator.comparison import Comparison
from muri.simulator.experiment import Experiment
from muri.simulator.report.experiment_page import html_page, markdown_page
from muri.simulator.report.files import write_files
from muri.simulator.summary import TraceSummary

_UNSAFE: Final = re.compile(r"[^\w.+-]+")


class ReportError(MuriError):
    """The report cannot be written."""


def write_report(summaries: Sequence[TraceSummary], folder: Path) -> Path:
    """Write results.json, metrics.csv, jobs.csv, plots as PNG (of several traces in a folder each) and report.html.

    Returns:
        The page's path.

    Raises:
        ReportError: A plotting library is missing, or the folder can't be written to.
    """
    with _written_to(folder):
        from muri.simulator.report.images import write_images
        from muri.simulator.report.page import report_page

        write_files(summaries, folder)
        for summary in summaries:
            target = folder if len(summaries) == 1 else folder / safe_name(summary.name)
            target.mkdir(exist_ok=True)
            write_images(summary, target)
        path = folder / "report.html"
        path.write_text(report_page(summaries), encoding="utf-8")
    return path


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
    with _written_to(folder):
        write_files(summaries, folder)
        (folder / "experiment.md").write_text(markdown_page(experiment, cells, missing), encoding="utf-8")
        (folder / "experiment.html").write_text(html_page(experiment, cells, missing), encoding="utf-8")


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except ModuleNotFoundError as error:
        raise ReportError(f"--out needs {error.name}: pip install 'muri[report]'") from error
    except OSError as error:
        raise ReportError(
            f"{error.filename or folder}: {error.strerror}; free space or choose another folder"
        ) from error


def safe_name(name: str) -> str:
    """A trace's name as that of a folder."""
    return _UNSAFE.sub("-", name).strip("-.") or "trace"
