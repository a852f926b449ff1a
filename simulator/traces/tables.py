"""Delimited tables with a header: columns are checked once, cells with a message that names their column."""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

from muri.simulator.traces.problems import RowError, TraceError, one_of

MAX_COUNT = 2**53
"""Whole numbers above it are not exact as floats; no count in a trace is near it."""

MAX_NUMBER = 1e15
"""Thirty million years: a larger number is a mistake, and times of such sizes could no longer be told apart."""


class Row:
    """One row of a table, by column name; an absent optional column reads as an empty cell."""

    __slots__ = ("_cells", "_index")

    def __init__(self, cells: Sequence[str], index: Mapping[str, int]) -> None:
        """Wrap the cells of one line.

        Args:
            cells: The cells.
            index: Position of each column.
        """
        self._cells = cells
        self._index = index

    def text(self, column: str, default: str = "") -> str:
        """The cell as it stands; the default where it is empty or the column is absent."""
        position = self._index.get(column)
        return (self._cells[position] or default) if position is not None else default

    def number(self, column: str, *, at_least: float = 0.0, more_than: float | None = None) -> float:
        """A finite number.

        Raises:
            RowError: The cell is no finite number, or too small.
        """
        return to_number(column, self.text(column), at_least=at_least, more_than=more_than)

    def optional_number(self, column: str, *, at_least: float = 0.0) -> float | None:
        """Like `number`; None where the cell is empty or the column is absent."""
        return self.number(column, at_least=at_least) if self.text(column).strip() else None

    def count(self, column: str, *, at_least: int = 0) -> int:
        """A whole number; "4.0" counts as 4.

        Raises:
            RowError: The cell is no whole number, or too small.
        """
        return to_count(column, self.text(column), at_least=at_least)

    def flag(self, column: str) -> bool:
        """0 or 1, true or false, yes or no; false where the cell is empty.

        Raises:
            RowError: The cell says something else.
        """
        text = self.text(column).strip().lower()
        if text in {"1", "true", "yes"}:
            return True
        if text in {"", "0", "false", "no"}:
            return False
        raise RowError(column, f"{text!r} is neither 0 nor 1")


def to_number(column: str, text: str, *, at_least: float = 0.0, more_than: float | None = None) -> float:
    """A finite number out of a cell.

    Args:
        column: The cell's column, for the message.
        text: The cell.
        at_least: Least value allowed.
        more_than: A bound that the value must exceed, instead.

    Returns:
        The number.

    Raises:
        RowError: It is none, or too small.
    """
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
    """Whether it has nothing that only Python takes for part of a number, as in 1_000."""
    return text.isascii() and "_" not in text


def read_header(name: str, header: Sequence[str], required: Iterable[str]) -> dict[str, int]:
    """Position of each column.

    Args:
        name: The file.
        header: Its first row.
        required: Columns that must be there.

    Returns:
        Index by column name.

    Raises:
        TraceError: A column is missing or appears twice.
    """
    columns = [column.strip() for column in header]
    doubled = sorted({column for column in columns if column and columns.count(column) > 1})
    if doubled:
        raise TraceError(f"{name}:1: the column {one_of(doubled)} appears twice")
    wanted = tuple(required)
    spare = [column for column in columns if column not in wanted]
    missing = [_with_nearest(column, spare) for column in wanted if column not in columns]
    if missing:
        raise TraceError(
            f"{name}:1: missing {'column' if len(missing) == 1 else 'columns'} {one_of(missing)}\n"
            f"  the header has: {one_of(columns)}"
        )
    return {column: position for position, column in enumerate(columns) if column}


def _with_nearest(column: str, columns: Sequence[str]) -> str:
    nearest = get_close_matches(column, columns, n=1, cutoff=0.6)
    return f"{column} (is it {nearest[0]}?)" if nearest else column


def read_rows(
    name: str,
    lines: Iterable[str],
    required: Iterable[str],
    *,
    header: Sequence[str] | None = None,
    delimiter: str = ",",
) -> Iterator[tuple[int, Row | RowError]]:
    """The rows of a table, one at a time; blank lines are passed over.

    Args:
        name: The file.
        lines: Its lines.
        required: Columns that the header must have.
        header: The columns of a file that has no header itself.
        delimiter: What separates cells; only the comma knows quotes.

    Yields:
        The line and the row, or what is wrong with its shape.

    Raises:
        TraceError: The header is not as required, or the file is no table.
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
