"""The folder of `--out`: a page with plots, and results as files for other programs."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from muri.errors import MuriError
from muri.files import whole_file
from muri.pythons import THE_LAB
from muri.simulator.metrics import TraceSummary, document_of
from muri.simulator.model import JobRecord

_JOB_COLUMNS: Final = (
    "trace", "policy", "seed", "job_id", "user", "model", "gpu_count", "submit_s", "start_s", "end_s", "jct_s", "run_s",
    "shared_s", "restarts",
)  # fmt: skip


class ReportError(MuriError):
    """The report cannot be written."""


def write_report(summaries: Sequence[TraceSummary], folder: Path) -> Path:
    """Write results.json, metrics.csv, jobs.csv, curves as PNG and report.html with all plots; return its path."""
    with written_to(folder):
        from muri_lab.report.images import write_curves
        from muri_lab.report.page import report_page

        write_files(summaries, folder)
        write_curves(summaries, folder)
        path = folder / "report.html"
        with whole_file(path) as draft:
            draft.write_text(report_page(summaries), encoding="utf-8")
    return path


def write_files(summaries: Sequence[TraceSummary], folder: Path) -> tuple[Path, ...]:
    """Write all figures, one row for each run and one row for each job of each run."""
    paths = (folder / "results.json", folder / "metrics.csv", folder / "jobs.csv")
    with whole_file(paths[0]) as draft:
        draft.write_text(json.dumps(document_of(summaries), indent=1) + "\n", encoding="utf-8")
    rows = list(_metric_rows(summaries))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with whole_file(paths[1]) as draft, draft.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
    with whole_file(paths[2]) as draft, draft.open("w", newline="", encoding="utf-8") as stream:
        lines = csv.writer(stream)
        lines.writerow(_JOB_COLUMNS)
        lines.writerows(_job_rows(summaries))
    return paths


def _metric_rows(summaries: Iterable[TraceSummary]) -> Iterator[dict[str, Any]]:
    for summary in summaries:
        for policy in summary.policies:
            for outcome in policy.outcomes:
                who = {"trace": summary.name, "policy": policy.label, "seed": outcome.run.settings.seed}
                yield {**who, **_flat(outcome.metrics.as_json())}


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures as columns: `utilization.gpu`."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def _job_rows(summaries: Iterable[TraceSummary]) -> Iterator[tuple[object, ...]]:
    for summary in summaries:
        for policy in summary.policies:
            for outcome in policy.outcomes:
                who = (summary.name, policy.label, outcome.run.settings.seed)
                yield from ((*who, *_job_cells(record)) for record in outcome.result.records)


def _job_cells(record: JobRecord) -> tuple[object, ...]:
    job = record.job
    asked = (job.job_id, job.user, job.key.model, job.gpu_count, job.submit_s)
    return (*asked, record.start_s, record.end_s, record.jct_s, record.run_s, record.shared_s, record.restarts)


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Make the folder; errors while writing to it become a ReportError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except ModuleNotFoundError as error:
        raise ReportError(f"--out needs {error.name}: {THE_LAB}") from error
    except OSError as error:
        raise ReportError(
            f"{error.filename or folder}: {error.strerror}; free space or choose another folder"
        ) from error
