"""The text of a table of pair speeds: comma-separated, with the columns of `PAIR_COLUMNS`; others are ignored."""

import csv
import math
from collections.abc import Iterable, Mapping
from typing import Final

from muri.policies.traits import InterferenceError, InterferenceTable, PairSpeed
from muri.simulator.traces.models import PAIR_COLUMNS

_SURPLUS: Final = "values without a column"


def parse_interference(lines: Iterable[str]) -> InterferenceTable:
    """Read a table, the header first."""
    reader = csv.DictReader(lines, restkey=_SURPLUS, strict=True)
    first: dict[tuple[str, str], tuple[int, PairSpeed]] = {}
    try:
        missing = [column for column in PAIR_COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            needed = ", ".join(PAIR_COLUMNS)
            raise InterferenceError(f"line 1: no column {', '.join(missing)}; the header must have {needed}")
        for record in reader:
            row = _parse_record(record, reader.line_num)
            line, earlier = first.setdefault(row.key, (reader.line_num, row))
            if earlier.speeds != row.speeds:
                raise InterferenceError(
                    f"line {reader.line_num}: {row.model_a} with {row.model_b} has other speeds than on line {line}; "
                    "keep one of them"
                )
    except csv.Error as err:
        raise InterferenceError(f"line {reader.reader.line_num}: not comma-separated text: {err}") from err
    return InterferenceTable(tuple(row for _, row in first.values()))


def _parse_record(record: Mapping[str, str | None], line: int) -> PairSpeed:
    if _SURPLUS in record:
        raise InterferenceError(f"line {line}: {len(record) - 1} columns, but there are more values; quote commas")
    model_a, model_b = (_text(record, column, line) for column in PAIR_COLUMNS[:2])
    # The speeds alone are not used, but a bad one shows that the line is wrong.
    *_, speed_a, speed_b = (
        _number(record, column, line, 1.05 if column.endswith("fraction") else math.inf) for column in PAIR_COLUMNS[2:]
    )
    return PairSpeed(model_a, model_b, speed_a, speed_b)


def _text(record: Mapping[str, str | None], column: str, line: int) -> str:
    value = (record[column] or "").strip()
    if not value:
        raise InterferenceError(f"line {line}, column {column}: there is no value")
    return value


def _number(record: Mapping[str, str | None], column: str, line: int, most: float) -> float:
    text = _text(record, column, line)
    try:
        value = float(text)
    except ValueError as err:
        raise InterferenceError(f"line {line}, column {column}: {text!r} is not a number") from err
    if not math.isfinite(value) or not 0 < value <= most:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise InterferenceError(f"line {line}, column {column}: {text} must be finite, above 0{limit}")
    return value
