"""What can be wrong with a trace, said with file, line and column."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from muri.simulator.model import SimulationError

MAX_SHOWN = 5
"""How many bad rows an error shows; the rest is only counted."""


class TraceError(SimulationError):
    """A trace that cannot be read, or not as asked."""


class RowError(TraceError):
    """One row that is no job; whoever reads the file adds where it stands.

    Attributes:
        column: The column at fault; empty when no single one is.
        reason: What is wrong and what to do.
    """

    def __init__(self, column: str, reason: str) -> None:
        """Say what is wrong in which column."""
        super().__init__(f"column {column}: {reason}" if column else reason)
        self.column = column
        self.reason = reason


@dataclass
class BadRows:
    """Collects bad rows, so that one run of `muri trace check` shows several at once.

    Attributes:
        skip: Whether bad rows are left out; otherwise `finish` refuses the trace.
        count: Bad rows so far.
    """

    skip: bool = False
    count: int = 0
    _shown: list[str] = field(default_factory=list)

    def add(self, name: str, line: int, error: Exception) -> None:
        """Note one bad row.

        Args:
            name: The file.
            line: Line of the row, from 1.
            error: What is wrong with it.
        """
        self.count += 1
        if len(self._shown) < MAX_SHOWN:
            self._shown.append(f"{name}:{line}: {error}")

    def finish(self, name: str, job_count: int) -> None:
        """Refuse the trace unless all of its rows were good or bad ones may be skipped.

        Args:
            name: The file.
            job_count: Good rows.

        Raises:
            TraceError: There are bad rows and they may not be skipped, or no good ones.
        """
        if self.count and not (self.skip and job_count):
            raise TraceError(self._message(name, job_count))

    def _message(self, name: str, job_count: int) -> str:
        lines = [f"{name}: {self.count} bad {'row' if self.count == 1 else 'rows'} of {self.count + job_count}"]
        lines += [f"  {text}" for text in self._shown]
        if self.count > len(self._shown):
            lines.append(f"  … and {self.count - len(self._shown)} more")
        lines.append(
            "Mend them, or leave them out with --skip-bad-rows."
            if job_count
            else "No good row is left; is this a trace of another format?"
        )
        return "\n".join(lines)


def one_of(names: Iterable[str]) -> str:
    """A list of choices for a message."""
    return ", ".join(names)
