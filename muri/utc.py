"""Times in UTC: points in time as ISO-8601 texts, and log lines."""

import logging
import sys
import textwrap
import time
from datetime import UTC, datetime
from typing import Any, Final

from muri.printable import printable, printable_lines


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
