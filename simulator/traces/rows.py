"""The text of a trace: opened, cut into rows, its cells checked, and what can be wrong with them."""

import csv
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TextIO

from muri.simulator.model import SimulationError
from muri.text import nearest

MAX_SHOWN = 5
"""How many bad rows an error shows; the rest is only counted."""

_MOST_NAMES = 40
_LONGEST_NAME = 40
"""Most columns of a header that an error shows, and the longest name."""

HEAD_LINES = 8
MAX_LINE_CHARS = 1 << 16

MAX_COUNT = 2**53
"""Whole numbers above it are not exact as floats; no count in a trace is near it."""

MAX_NUMBER = 1e15
"""Thirty million years: a larger number is a mistake, and floats of that size cannot tell seconds apart."""


class TraceError(SimulationError):
    """A trace that cannot be read, or not as asked."""


class RowError(TraceError):
    """A row that is not a valid job; the reader of the file adds its place.

    Attributes:
        column: The column at fault; empty: the whole row.
        reason: The fault, and what to do.
    """

    def __init__(self, column: str, reason: str) -> None:
        """Say what is wrong in which column."""
        super().__init__(f"column {column}: {reason}" if column else reason)
        self.column = column
        self.reason = reason


@dataclass
class BadRows:
    """Collects bad rows, so that one run of `muri trace check` shows several."""

    skip: bool = False  # Whether bad rows are left out; otherwise `finish` refuses the trace
    count: int = 0  # Bad rows so far
    _shown: list[str] = field(default_factory=list)

    def add(self, name: str, line: int, error: Exception) -> None:
        """Note one bad row."""
        self.count += 1
        if len(self._shown) < MAX_SHOWN:
            self._shown.append(f"{name}:{line}: {error}")

    def finish(self, name: str, job_count: int) -> None:
        """Refuse the trace unless all of its rows were good or bad ones may be skipped.

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


def found_columns(columns: Sequence[str]) -> str:
    """The columns that a file has, cut for a message, and how they are separated where that is the trouble."""
    shown = [name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…" for name in columns[:_MOST_NAMES]]
    more = f", … ({len(columns)} columns)" if len(columns) > _MOST_NAMES else ""
    return f"\n  the header has: {', '.join(shown)}{more}{separator_hint(columns[0]) if len(columns) == 1 else ''}"


def separator_hint(line: str) -> str:
    """What to say of a header whose columns are not separated by commas; "" for any other."""
    for separator, what in ((";", "semicolons"), ("\t", "tabs")):
        if separator in line and "," not in line:
            return f"\n  its columns are separated by {what}; save it with commas"
    return ""


@dataclass
class Source:
    """An open text and its first lines, by which its format is guessed."""

    path: Path  # Its path; "-" is the standard input
    name: str  # Name for messages
    head: tuple[str, ...]  # Its first lines
    _rest: TextIO

    @property
    def trace_name(self) -> str:
        """Name of the trace: the file's stem."""
        return "stdin" if self.path == Path("-") else self.path.stem

    def lines(self) -> Iterator[str]:
        """All lines; call this once, and not together with `text`."""
        return chain(self.head, self._rest)

    def text(self) -> str:
        """The whole text, for files whose lines can be very long."""
        return "".join(self.head) + self._rest.read()


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a trace (TraceError: the file cannot be read or is not UTF-8 text)."""
    name = "standard input" if path == Path("-") else str(path)
    try:
        if path == Path("-"):
            yield _source(path, name, _standard_input())
        else:
            # utf-8-sig: spreadsheets put a byte-order mark before the first column's name
            with path.open(encoding="utf-8-sig", newline="") as stream:
                yield _source(path, name, stream)
    except OSError as error:
        raise TraceError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text ({error.reason}); unpack it first if it is compressed") from error


def _standard_input() -> TextIO:
    if isinstance(sys.stdin, TextIOWrapper):  # a trace is UTF-8 whatever the user's locale
        sys.stdin.reconfigure(encoding="utf-8-sig", newline="")
    return sys.stdin


def _source(path: Path, name: str, stream: TextIO) -> Source:
    head = tuple(line for line in (stream.readline(MAX_LINE_CHARS) for _ in range(HEAD_LINES)) if line)
    return Source(path, name, head, stream)


class Row:
    """One row of a table by column name; an absent optional column reads as an empty cell."""

    __slots__ = ("_cells", "_index")

    def __init__(self, cells: Sequence[str], index: Mapping[str, int]) -> None:
        """Wrap the cells of one line."""
        self._cells = cells
        self._index = index

    def text(self, column: str, default: str = "") -> str:
        """The cell's text; the default if it is empty or the column is absent."""
        position = self._index.get(column)
        return (self._cells[position] or default) if position is not None else default

    def number(self, column: str, *, at_least: float = 0.0, more_than: float | None = None) -> float:
        """A finite number (RowError: the cell is not a finite number, or too small)."""
        return to_number(column, self.text(column), at_least=at_least, more_than=more_than)

    def optional_number(self, column: str, *, at_least: float = 0.0) -> float | None:
        """Like `number`; None where the cell is empty or the column is absent."""
        return self.number(column, at_least=at_least) if self.text(column).strip() else None

    def count(self, column: str, *, at_least: int = 0) -> int:
        """A whole number; "4.0" counts as 4 (RowError: the cell is not a whole number, or too small)."""
        return to_count(column, self.text(column), at_least=at_least)

    def flag(self, column: str) -> bool:
        """0 or 1, true or false, yes or no; false where the cell is empty (RowError: the cell says something else)."""
        text = self.text(column).strip().lower()
        if text in {"1", "true", "yes"}:
            return True
        if text in {"", "0", "false", "no"}:
            return False
        raise RowError(column, f"{text!r} is neither 0 nor 1")


def to_number(column: str, text: str, *, at_least: float = 0.0, more_than: float | None = None) -> float:
    """A finite number out of a cell (RowError: it is not a number, or too small)."""
    if not text.strip():
        raise RowError(column, "is empty; give a number")
    try:
        value = float(text) if _is_plain(text) else None
    except ValueError:
        value = None
    if value is None:
        raise RowError(column, f"{text!r} is not a number")
    if not math.isfinite(value):
        raise RowError(column, f"{text.strip()} is not a finite number")
    if value > MAX_NUMBER:
        raise RowError(column, f"{text.strip()} must be at most {MAX_NUMBER:g}")
    if more_than is not None and value <= more_than:
        raise RowError(column, f"{text.strip()} must be more than {more_than:g}")
    if more_than is None and value < at_least:
        raise RowError(column, f"{text.strip()} must be at least {at_least:g}")
    return value


def to_count(column: str, text: str, *, at_least: int = 0) -> int:
    """A whole number out of a cell; see `to_number`."""
    try:
        value = int(text if _is_plain(text) else "")
    except ValueError:
        number = to_number(column, text, at_least=-math.inf)
        if number != math.floor(number):
            raise RowError(column, f"{text.strip()} is not a whole number") from None
        value = int(number)
    if not at_least <= value <= MAX_COUNT:
        bound = f"at least {at_least}" if value < at_least else f"at most {MAX_COUNT}"
        raise RowError(column, f"{text.strip()} must be {bound}")
    return value


def _is_plain(text: str) -> bool:
    """Whether it has nothing that only Python allows in a number, as in 1_000."""
    return text.isascii() and "_" not in text


def read_rows(
    name: str,
    lines: Iterable[str],
    required: Iterable[str],
    *,
    header: Sequence[str] | None = None,
    delimiter: str = ",",
) -> Iterator[tuple[int, Row | RowError]]:
    """The rows of a table, one at a time, without blank lines.

    Raises:
        TraceError: The header is not as required, or the file is not a table.
    """
    reader = csv.reader(lines) if delimiter == "," else csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    try:
        index = read_header(name, next(reader, []) if header is None else header, required)
        width = 1 + max(index.values())
        for cells in reader:
            if len(cells) >= width:
                yield reader.line_num, Row(cells, index)
            elif any(cells):
                yield reader.line_num, RowError("", f"{len(cells)} cells, but the header has {width}")
    except csv.Error as error:
        raise TraceError(f"{name}:{reader.line_num}: not a table: {error}") from error


def read_header(name: str, header: Sequence[str], required: Iterable[str]) -> dict[str, int]:
    """Position of each column (TraceError: a column is missing or appears twice)."""
    columns = [column.strip() for column in header]
    doubled = sorted({column for column in columns if column and columns.count(column) > 1})
    if doubled:
        raise TraceError(f"{name}:1: the column {doubled[0][:_LONGEST_NAME]} appears twice")
    wanted = tuple(required)
    spare = [column for column in columns[:_MOST_NAMES] if column not in wanted and len(columns) > 1]
    missing = [_with_nearest(column, spare) for column in wanted if column not in columns]
    if missing:
        raise TraceError(
            f"{name}:1: missing {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}"
            f"{found_columns(columns)}"
        )
    return {column: position for position, column in enumerate(columns) if column}


def _with_nearest(column: str, columns: Sequence[str]) -> str:
    near = nearest(column, columns)
    return f"{column} (is it {near[0]}?)" if near else column
