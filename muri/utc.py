"""Times in UTC: points in time as ISO-8601 texts, and log lines."""

import logging
import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from muri.text import printable, printable_lines


def now_text() -> str:
    """The time now, to the second."""
    return text_of(time.time())


def text_of(unix_s: float, timespec: str = "seconds") -> str:
    """A time in seconds since the epoch; `timespec` as datetime.isoformat takes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec=timespec)


def moment(text: str) -> datetime | None:
    """The point in time that a text names, UTC where it names no zone; None when it names none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def age(text: str, now: datetime) -> str:
    """How long ago a text's time was: "5 min", "3 h", "12 d"; "?" when it names none."""
    then = moment(text)
    if then is None:
        return "?"
    seconds = max(0.0, (now - then).total_seconds())
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


_LONGEST_LINE: Final = 2000

_HOUR_S: Final = 3600.0

_MOST_OF_A_PLACE: Final = 50


class _OneLine(logging.Formatter):
    """Writes a record so that nothing in it looks like another one: messages quote job names and Slurm's own words.

    Users can make those texts long; they must not fill the disk.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (overrides logging's method)
        """The record's line; line breaks and control characters in it are shown as escapes, and its end is cut."""
        line = printable(super().formatMessage(record))
        left_off = len(line) - _LONGEST_LINE
        return line if left_off <= 0 else f"{line[:_LONGEST_LINE]}... ({left_off} more characters)"

    def formatException(self, ei: Any) -> str:  # noqa: N802 (overrides logging's method)
        """The traceback, each line indented: no line of an error's text begins like a record."""
        return textwrap.indent(printable_lines(super().formatException(ei)), "    ", lambda _line: True)


class FewWarnings(logging.Filter):
    """Passes each warning, and each traceback, once an hour, and of one place in the code a few; then it counts them.

    Users can bring about any number of them, and their words stand there: they must not fill the disk.

    Args:
        clock: Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since_s = -math.inf
        self._passed: dict[tuple[str, int], set[str]] = {}
        self._left_out: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; the first of a place after an hour tells how many like it were left out."""
        if record.levelno < logging.WARNING or (record.levelno > logging.WARNING and not record.exc_info):
            return True
        now_s, place, text = self._clock(), (record.pathname, record.lineno), record.getMessage()
        said = f"{text}: {record.exc_info and record.exc_info[1]!r}"
        if now_s - self._since_s >= _HOUR_S:
            self._since_s, self._passed = now_s, {}
        passed = self._passed.setdefault(place, set())
        if said in passed or len(passed) >= _MOST_OF_A_PLACE:
            self._left_out[place] += 1
            return False
        if not passed and (left_out := self._left_out.pop(place, 0)):
            record.msg, record.args = f"{text} ({left_out} such lines were left out before)", ()
        passed.add(said)
        return True


def log_handler(*, with_name: bool = True) -> logging.Handler:
    """A handler that writes lines with a UTC time to standard error.

    Args:
        with_name: Whether lines name their logger.
    """
    name = " %(name)s:" if with_name else ""
    formatter = _OneLine(f"%(asctime)sZ %(levelname)s{name} %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    return handler
