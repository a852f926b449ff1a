"""Reading a trace of any known format."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from muri.simulator.model import Trace, TraceJob
from muri.simulator.traces import muri_paper, schema
from muri.simulator.traces.formats import Format, Reading
from muri.simulator.traces.problems import BadRows, RowError, TraceError, one_of
from muri.simulator.traces.source import Source, open_source

FORMATS = {
    item.name: item
    for item in (
        schema.FORMAT,
        muri_paper.FORMAT,
    )
}
"""All formats by name."""


def read_trace(path: Path, format: str | None = None, *, skip_bad_rows: bool = False, seed: int = 0) -> Trace:  # noqa: A002
    """Read a trace.

    Args:
        path: The file; "-" reads the standard input.
        format: One of `FORMATS`; None: guessed from the content.
        skip_bad_rows: Whether rows that are no job are left out and counted; otherwise they are an error.
        seed: For the assignment of stage profiles to jobs whose trace has no stage times.

    Returns:
        The trace, its jobs by submit time, then id.

    Raises:
        TraceError: The file cannot be read, is of another format, or has bad rows.
    """
    wanted = None if format is None else find_format(format)
    with open_source(path) as source:
        chosen = _checked(source, wanted)
        reading = Reading(source, BadRows(skip_bad_rows), seed)
        jobs = tuple(sorted(_unique(reading, chosen.read(reading)), key=lambda job: (job.submit_s, job.job_id)))
    reading.bad_rows.finish(source.name, len(jobs))
    if not jobs:
        raise TraceError(f"{source.name}: no jobs{_reasons(reading.left_out)}")
    return Trace(source.trace_name, jobs, reading.bad_rows.count)


def find_format(name: str) -> Format:
    """The format of a name.

    Args:
        name: What the user asked for.

    Returns:
        The format.

    Raises:
        TraceError: There is none of that name.
    """
    if name not in FORMATS:
        nearest = get_close_matches(name, FORMATS, n=1)
        hint = f" (is it {nearest[0]}?)" if nearest else ""
        raise TraceError(f"unknown trace format {name!r}{hint}; choose one of {one_of(FORMATS)}")
    return FORMATS[name]


def _checked(source: Source, wanted: Format | None) -> Format:
    """The format to read it with: the wanted one unless the content clearly is another's."""
    if not source.head:
        raise TraceError(f"{source.name}: the file is empty")
    likely = [item for item in FORMATS.values() if item.looks_like(source.head)]
    if wanted is None:
        if not likely:
            raise TraceError(
                f"{source.name}:1: not a trace of a known format; name its format with --from, "
                f"one of {one_of(FORMATS)}\n  the file starts with: {source.head[0].strip()[:60]}"
            )
        return likely[0]
    if likely and wanted not in likely:
        raise TraceError(
            f"{source.name}:1: not a trace of format {wanted.name}; it looks like {one_of(i.name for i in likely)}: "
            f"try --from {likely[0].name}"
        )
    return wanted


def _unique(reading: Reading, jobs: Iterable[tuple[int, TraceJob]]) -> Iterator[TraceJob]:
    """The jobs, without those whose id has been there before."""
    seen: dict[int, int] = {}
    for line, job in jobs:
        first = seen.setdefault(job.job_id, line)
        if first == line:
            yield job
        else:
            reading.bad(line, RowError("job_id", f"{job.job_id} is also the id of the job in line {first}"))


def _reasons(left_out: dict[str, int]) -> str:
    return "".join(f"; {count} {reason}" for reason, count in left_out.items())
