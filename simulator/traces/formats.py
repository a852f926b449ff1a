"""What a trace format is to the reader: a name, how to tell it, how to read it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from muri.simulator.model import TraceJob
from muri.simulator.traces.problems import BadRows, RowError
from muri.simulator.traces.source import Source
from muri.simulator.traces.tables import Row, read_rows

Entry = TypeVar("Entry")
Job = TypeVar("Job")


class LeftOut(Exception):  # noqa: N818 -- not an error: the row is in order
    """Raised for a row that is no GPU job which ran to its end; its text is the reason."""


@dataclass
class Reading:
    """One reading of one trace: what the importers take and note.

    Attributes:
        source: Where the rows come from.
        bad_rows: Where bad rows go.
        left_out: Rows that are in order but no GPU job which ran to its end, counted by reason.
    """

    source: Source
    bad_rows: BadRows
    left_out: dict[str, int] = field(default_factory=dict)

    def parse(
        self, entries: Iterable[tuple[int, Entry | RowError]], to_job: Callable[[Entry], Job]
    ) -> Iterator[tuple[int, Job]]:
        """Turn entries into jobs; bad ones and those left out are counted and passed over.

        Args:
            entries: Lines and what stands there, or what is wrong with its shape.
            to_job: Makes the job; raises RowError or LeftOut.

        Yields:
            Lines and jobs.
        """
        for line, entry in entries:
            try:
                if isinstance(entry, RowError):
                    raise entry
                job = to_job(entry)
            except RowError as error:
                self.bad(line, error)
            except LeftOut as reason:
                self.left_out[str(reason)] = self.left_out.get(str(reason), 0) + 1
            else:
                yield line, job

    def bad(self, line: int, error: RowError) -> None:
        """Note a bad row."""
        self.bad_rows.add(self.source.name, line, error)


def read_table(
    reading: Reading, required: Iterable[str], to_job: Callable[[Row], Job], delimiter: str = ","
) -> Iterator[tuple[int, Job]]:
    """The jobs of a table with a header and one row per job.

    Args:
        reading: The reading.
        required: Columns that the header must have.
        to_job: Makes a row's job; raises RowError or LeftOut.
        delimiter: What separates cells; only the comma knows quotes.

    Yields:
        Lines and jobs.

    Raises:
        TraceError: The header is not as required.
    """
    rows = read_rows(reading.source.name, reading.source.lines(), required, delimiter=delimiter)
    yield from reading.parse(rows, to_job)


@dataclass(frozen=True, slots=True)
class LoggedJob:
    """A job as a cluster's log tells of it: how long it ran, but not what it did.

    Attributes:
        job_id: Its id, unique in the log.
        submit_s: Seconds since any fixed time.
        gpu_count: GPUs of the whole job.
        run_s: Seconds that it ran.
        user: Owner.
        rerun_key: What reruns of one experiment have in common, as far as the log knows.
        cpu_count: CPUs asked for, None when not logged.
        mem_gib: Host memory asked for, None when not logged.
        job_name: Its name, empty when not logged.
    """

    job_id: str
    submit_s: float
    gpu_count: int
    run_s: float
    user: str
    rerun_key: str
    cpu_count: float | None = None
    mem_gib: float | None = None
    job_name: str = ""


Found = Iterator[tuple[int, TraceJob]]
"""Lines and jobs of a trace that knows stage times or models."""

Logged = Iterator[tuple[int, LoggedJob]]
"""Lines and jobs of a cluster's log."""


@dataclass(frozen=True)
class Format:
    """One trace format; it has either `read` or `read_log`.

    Attributes:
        name: Name for `--from`.
        summary: One line for `--help`.
        looks_like: Whether a file's first lines look like it.
        read: Reads jobs with profiles.
        read_log: Reads jobs of a log, which get profiles afterwards.
    """

    name: str
    summary: str
    looks_like: Callable[[tuple[str, ...]], bool]
    read: Callable[[Reading], Found] | None = None
    read_log: Callable[[Reading], Logged] | None = None


def header_of(head: tuple[str, ...], delimiter: str = ",") -> set[str]:
    """The column names of a table, for `looks_like`."""
    return {cell.strip().strip('"') for cell in head[0].split(delimiter)} if head else set()
