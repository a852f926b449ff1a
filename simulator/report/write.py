"""The folder of `--out`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from muri.errors import MuriError
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
    try:
        from muri.simulator.report.files import write_files  # noqa: PLC0415
        from muri.simulator.report.images import write_images  # noqa: PLC0415
        from muri.simulator.report.page import report_page  # noqa: PLC0415

        folder.mkdir(parents=True, exist_ok=True)
        write_files(summaries, folder)
        for summary in summaries:
            target = folder if len(summaries) == 1 else folder / safe_name(summary.name)
            target.mkdir(exist_ok=True)
            write_images(summary, target)
        path = folder / "report.html"
        path.write_text(report_page(summaries), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ReportError(f"--out needs {error.name}: pip install 'muri[report]'") from error
    except OSError as error:
        raise ReportError(
            f"{error.filename or folder}: {error.strerror}; free space or choose another folder"
        ) from error
    return path


def safe_name(name: str) -> str:
    """A trace's name as that of a folder."""
    return _UNSAFE.sub("-", name).strip("-.") or "trace"
