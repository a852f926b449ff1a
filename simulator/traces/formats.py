"""What a trace format is to the reader: a name, how to tell it, how to read it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from muri.simulator.model import TraceJob
from muri.simulator.traces.problems import BadRows
from muri.simulator.traces.source import Source


@dataclass
class Reading:
    """One reading of one trace: what the importers take and note.

    Attributes:
        source: Where the rows come from.
        bad_rows: Where bad rows go.
        seed: For the assignment of profiles to jobs whose trace has no stage times.
        left_out: Good rows that are no GPU job which ran, counted by reason.
    """

    source: Source
    bad_rows: BadRows
    seed: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        """Count a row that is in order but nothing to simulate, for instance a job without GPUs."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def bad(self, line: int, error: Exception) -> None:
        """Note a bad row."""
        self.bad_rows.add(self.source.name, line, error)


Sniff = Callable[[tuple[str, ...]], bool]
"""Whether the first lines look like this format."""


@dataclass(frozen=True)
class Format:
    """One trace format.

    Attributes:
        name: Name for `--from`.
        summary: One line for `--help`.
        looks_like: Whether a file's first lines look like it.
        read: Yields the line of each job and the job.
    """

    name: str
    summary: str
    looks_like: Sniff
    read: Callable[[Reading], Iterator[tuple[int, TraceJob]]]


def header_of(head: tuple[str, ...], delimiter: str = ",") -> set[str]:
    """The column names of a table, for `looks_like`."""
    return {cell.strip().strip('"') for cell in head[0].split(delimiter)} if head else set()
