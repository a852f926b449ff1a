"""Measured interference: tables of the speeds of pairs, and the text they come in.

Hosts that plan nothing import it with the records of a plan, so it does without NumPy.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from muri.errors import UsageError

COLUMNS: Final = (
    "job_a",
    "job_b",
    "solo_a_iters_per_s",
    "solo_b_iters_per_s",
    "speed_a_fraction",
    "speed_b_fraction",
)
"""Columns that the text format must have; others are ignored."""

_SURPLUS: Final = "values without a column"

MEASURING_ERROR: Final = 0.05
"""How far above 1 a measured speed may lie; nobody is faster in company, but measurements scatter."""


class InterferenceError(UsageError):
    """A table of measured interference holds something that no measurement can give."""


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """Two models sharing a GPU.

    Attributes:
        model_a: One model.
        model_b: The other, or the same.
        speed_a: Speed of the first next to the second, 1 = as fast as alone.
        speed_b: Speed of the second next to the first.
    """

    model_a: str
    model_b: str
    speed_a: float
    speed_b: float

    def __post_init__(self) -> None:
        """Refuse what no measurement can give.

        Raises:
            InterferenceError: A model has no name, or a speed is not above 0 and at most 1.05.
        """
        if not self.model_a or not self.model_b:
            raise InterferenceError(f"a pair needs the names of two models, not {self.model_a!r} and {self.model_b!r}")
        for model, speed in ((self.model_a, self.speed_a), (self.model_b, self.speed_b)):
            if not math.isfinite(speed) or not 0 < speed <= 1 + MEASURING_ERROR:
                raise InterferenceError(
                    f"{self.model_a} with {self.model_b}: speed of {model} is {speed}; "
                    f"it must be above 0 and at most {1 + MEASURING_ERROR:g} of its speed alone"
                )

    @property
    def key(self) -> tuple[str, str]:
        """Both names, in alphabetical order."""
        return (self.model_a, self.model_b) if self.model_a <= self.model_b else (self.model_b, self.model_a)

    @property
    def speeds(self) -> tuple[float, float]:
        """Both speeds in the order of `key`, at most 1; their mean where both are the same model."""
        speed_a, speed_b = min(1.0, self.speed_a), min(1.0, self.speed_b)
        if self.model_a == self.model_b:
            return ((speed_a + speed_b) / 2,) * 2
        return (speed_a, speed_b) if self.model_a < self.model_b else (speed_b, speed_a)


@dataclass(frozen=True, slots=True)
class InterferenceTable:
    """Measured pairs, found in either order.

    Two jobs of one model that were measured apart from each other both get the mean: nothing tells them apart.

    Attributes:
        rows: The measurements. A pair may be there again, the other way round too, if it says the same.
        pairs: Speeds by (model_a, model_b), model_a ≤ model_b, none above 1.
    """

    rows: tuple[PairSpeed, ...]
    pairs: Mapping[tuple[str, str], tuple[float, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the rows.

        Raises:
            InterferenceError: Two rows contradict each other.
        """
        pairs: dict[tuple[str, str], tuple[float, float]] = {}
        for row in self.rows:
            found = pairs.setdefault(row.key, row.speeds)
            if found != row.speeds:
                raise InterferenceError(
                    f"{row.model_a} with {row.model_b} is there twice and differs: {found} and {row.speeds}; keep one"
                )
        object.__setattr__(self, "pairs", MappingProxyType(pairs))

    @property
    def models(self) -> frozenset[str]:
        """Names of all models of the table."""
        return frozenset(model for pair in self.pairs for model in pair)

    def speeds(self, model_a: str, model_b: str) -> tuple[float, float] | None:
        """Speeds of two models next to each other, in the order asked for; None when not measured."""
        if model_a <= model_b:
            return self.pairs.get((model_a, model_b))
        found = self.pairs.get((model_b, model_a))
        return None if found is None else (found[1], found[0])


def parse_interference(lines: Iterable[str]) -> InterferenceTable:
    """Read a table from comma-separated text with the columns of `COLUMNS`.

    Args:
        lines: The text's lines, the header first.

    Raises:
        InterferenceError: Names the line and the column that are wrong.
    """
    reader = csv.DictReader(lines, restkey=_SURPLUS, strict=True)
    first: dict[tuple[str, str], tuple[int, PairSpeed]] = {}
    try:
        _check_header(reader.fieldnames or ())
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


def _check_header(names: Iterable[str]) -> None:
    missing = [column for column in COLUMNS if column not in set(names)]
    if missing:
        raise InterferenceError(f"line 1: no column {', '.join(missing)}; the header must have {', '.join(COLUMNS)}")


def _parse_record(record: Mapping[str, str | None], line: int) -> PairSpeed:
    if _SURPLUS in record:
        raise InterferenceError(f"line {line}: {len(record) - 1} columns, but there are more values; quote commas")
    model_a, model_b = (_text(record, column, line) for column in COLUMNS[:2])
    for column in COLUMNS[2:4]:  # not used, but a bad one tells that the line is wrong
        _number(record, column, line, math.inf)
    speed_a, speed_b = (_number(record, column, line, 1 + MEASURING_ERROR) for column in COLUMNS[4:])
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
