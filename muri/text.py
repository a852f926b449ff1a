"""Text of others: the valid name that a mistyped one resembles, and words made harmless for terminals and logs."""

from __future__ import annotations

import logging
import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from typing import Any, Final

_LEAST_LIKENESS: Final = 0.6
"""A wrong hint is worse than none, so well over half of the letters must agree."""

_SHORTEST_PREFIX: Final = 3
"""So many letters with which a name begins stand for all of it, such as `sync` for `synchronize`."""


def nearest(name: str, valid: Iterable[str], most: int = 1) -> list[str]:
    """Return at most `most` valid names that a name may be a slip of, the nearest first; often none.

    Letter case does not count, nor does the order of words: `num_gpus` is near to `gpu_num`.
    """
    rated = sorted(((_likeness(name, other), other) for other in valid), key=lambda pair: -pair[0])
    return [other for likeness, other in rated[:most] if likeness >= _LEAST_LIKENESS]


def _likeness(one: str, other: str) -> float:
    """Share of letters that agree in order, 1 for all."""
    plain = SequenceMatcher(None, one.lower(), other.lower()).ratio()
    if len(one) >= _SHORTEST_PREFIX and other.lower().startswith(one.lower()):
        return max(plain, _LEAST_LIKENESS)
    first, second = (
        "_".join(sorted(name.lower().replace("-", "_").replace(" ", "_").split("_"))) for name in (one, other)
    )
    return max(plain, SequenceMatcher(None, first, second).ratio())


def printable(text: str) -> str:
    r"""One line in which everything that is not a visible character stands as an escape, such as \n or \x1b.

    That covers line breaks, control characters, characters that reverse the direction of writing, and bytes that
    could not be decoded.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which stay apart."""
    return "\n".join(map(printable, text.split("\n")))


_LONGEST_LINE: Final = 2000
_WARNINGS_PER_PLACE: Final = 50
_HOUR_S: Final = 3600.0


class _OneLine(logging.Formatter):
    """Formats a record so that nothing in it looks like another one, or fills the disk: messages quote users' texts."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (overrides logging's method)
        """The record's line; line breaks and control characters in it are shown as escapes, and its end is cut."""
        line = printable(super().formatMessage(record))
        left_off = len(line) - _LONGEST_LINE
        return line if left_off <= 0 else f"{line[:_LONGEST_LINE]}... ({left_off} more characters)"

    def formatException(self, ei: Any) -> str:  # noqa: N802 (overrides logging's method)
        """The traceback, each line indented: no line of an error's text begins like a record."""
        return textwrap.indent(printable_lines(super().formatException(ei)), "    ", lambda _line: True)


class FewWarnings(logging.Filter):
    """Passes each warning and traceback once an hour, and a few per place in the code; the rest are counted.

    Users can cause any number of them, and their texts are quoted there: they must not fill the disk.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since_s = -math.inf
        self._passed: dict[tuple[str, int], set[str]] = {}
        self._left_out: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; the first of a place after an hour says how many like it were left out."""
        if record.levelno < logging.WARNING or (record.levelno > logging.WARNING and not record.exc_info):
            return True
        now_s, place, text = self._clock(), (record.pathname, record.lineno), record.getMessage()
        warning = f"{text}: {record.exc_info and record.exc_info[1]!r}"
        if now_s - self._since_s >= _HOUR_S:
            self._since_s, self._passed = now_s, {}
        passed = self._passed.setdefault(place, set())
        if warning in passed or len(passed) >= _WARNINGS_PER_PLACE:
            self._left_out[place] += 1
            return False
        if not passed and (left_out := self._left_out.pop(place, 0)):
            record.msg, record.args = f"{text} ({left_out} such lines were left out before)", ()
        passed.add(warning)
        return True


def log_handler(*, with_name: bool = True) -> logging.Handler:
    """A handler that writes lines with a UTC time, and with their logger's name, to standard error."""
    name = " %(name)s:" if with_name else ""
    formatter = _OneLine(f"%(asctime)sZ %(levelname)s{name} %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    return handler
