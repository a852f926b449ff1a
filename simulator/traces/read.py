"""Reading a trace of any known format."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from muri.profiler.records import StageProfile
from muri.simulator.model import Trace, TraceJob
from muri.simulator.traces.formats import Assignment, Format, Reading, assignment_of, to_trace_jobs
from muri.simulator.traces.log_formats import HELIOS, PAI, PHILLY, SACCT, TASK_FILE
from muri.simulator.traces.rows import BadRows, RowError, Source, TraceError, open_source, separator_hint
from muri.simulator.traces.schema import MURI, MURI_PAPER, REQUIRED, SYNERGY
from muri.text import nearest

Job = TypeVar("Job")

FORMATS = {item.name: item for item in (MURI, MURI_PAPER, SYNERGY, PHILLY, HELIOS, PAI, SACCT)}
"""All formats by name."""


class TraceReading(NamedTuple):
    """A trace, its format, and the rows of its file that were left out."""

    trace: Trace
    format: str
    left_out: dict[str, int]
    """Rows of jobs without GPUs or without an end, counted by reason."""


def read_trace(
    path: Path,
    format_name: str | None = None,
    *,
    skip_bad_rows: bool = False,
    seed: int = 0,
    profiles: Sequence[StageProfile] | None = None,
) -> Trace:
    """Read a trace.

    Args:
        path: The file; "-" reads the standard input.
        format_name: One of `FORMATS`; None: guessed from the content.
        skip_bad_rows: Whether invalid rows are left out and counted; otherwise they are an error.
        seed: For the assignment of stage profiles to jobs whose trace has no stage times.
        profiles: The assigned profiles; None: the profiles of the Muri paper's eight models.

    Raises:
        TraceError: The file cannot be read, is of another format, or has bad rows.
    """
    return read_with_notes(path, format_name, skip_bad_rows=skip_bad_rows, seed=seed, profiles=profiles).trace


def read_with_notes(
    path: Path,
    format_name: str | None = None,
    *,
    skip_bad_rows: bool = False,
    seed: int = 0,
    profiles: Sequence[StageProfile] | None = None,
) -> TraceReading:
    """Like `read_trace`, with the format and the rows left out."""
    wanted = None if format_name is None else find_format(format_name)
    assignment = assignment_of(profiles, seed)
    with open_source(_file_of(path)) as source:
        chosen = _checked(source, wanted)
        reading = Reading(source, BadRows(skip_bad_rows))
        jobs = _jobs(chosen, reading, assignment)
        reading.bad_rows.finish(source.name, len(jobs))
    if not jobs:
        raise TraceError(f"{source.name}: no jobs to simulate{_reasons(reading.left_out)}")
    trace = Trace(source.trace_name, tuple(jobs), reading.bad_rows.count)
    return TraceReading(trace, chosen.name, reading.left_out)


def _file_of(path: Path) -> Path:
    """The file to look at first: a folder is PAI's tables."""
    if not path.is_dir():
        return path
    if not (path / TASK_FILE).exists():
        raise TraceError(f"{path} is a folder without {TASK_FILE}; give a file, or a folder with PAI's tables")
    return path / TASK_FILE


def _jobs(chosen: Format, reading: Reading, assignment: Assignment) -> list[TraceJob]:
    if chosen.read_log is not None:
        logged = _unique(reading, chosen.read_log(reading), lambda job: job.job_id)
        return to_trace_jobs(list(logged), assignment)
    if chosen.read is None:
        raise TypeError(f"the format {chosen.name} has no reader")
    found = _unique(reading, chosen.read(reading), lambda job: job.job_id)
    return sorted(found, key=lambda job: (job.submit_s, job.job_id))


def find_format(name: str) -> Format:
    """The format of a name (TraceError: there is none of that name)."""
    if name not in FORMATS:
        near = nearest(name, FORMATS)
        hint = f" (is it {near[0]}?)" if near else ""
        raise TraceError(f"unknown trace format {name!r}{hint}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _checked(source: Source, wanted: Format | None) -> Format:
    """The format to read it with: the wanted one, unless the content clearly has another."""
    if not source.head:
        raise TraceError(f"{source.name}: the file is empty")
    likely = [item for item in FORMATS.values() if item.looks_like(source.head)]
    if wanted is None:
        if not likely:
            raise TraceError(
                f"{source.name}:1: not a trace of a known format; name its format with --from, "
                f"one of {', '.join(FORMATS)}\n  the file starts with: {source.head[0].strip()[:60]}"
                f"{separator_hint(source.head[0].strip())}\n"
                f"  a table of your own needs the columns {', '.join(REQUIRED)} (docs/traces.md)"
            )
        return likely[0]
    if likely and wanted not in likely:
        raise TraceError(
            f"{source.name}:1: not a trace of format {wanted.name}; it looks like {', '.join(i.name for i in likely)}: "
            f"try --from {likely[0].name}"
        )
    return wanted


def _unique(reading: Reading, jobs: Iterable[tuple[int, Job]], id_of: Callable[[Job], Hashable]) -> Iterator[Job]:
    """The jobs without those that repeat an id, which count as bad rows."""
    seen: dict[Hashable, int] = {}
    for line, job in jobs:
        job_id = id_of(job)
        if job_id in seen:
            reading.bad(line, RowError("job_id", f"{job_id} is also the id of the job in line {seen[job_id]}"))
        else:
            seen[job_id] = line
            yield job


def _reasons(left_out: dict[str, int]) -> str:
    return "".join(f"; {count} {reason}" for reason, count in sorted(left_out.items()))
