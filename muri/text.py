"""Text: JSON and YAML of others as data, names that a mistyped one resembles, words made harmless for terminals, logs.

Whatever is wrong with JSON or YAML is a ValueError, as callers expect; ruff forbids the libraries' own functions.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
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
    from difflib import SequenceMatcher

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


MOST_LEVELS: Final = 100
"""Muri writes nothing deeper; code that walks through it would end at Python's limit of recursion."""


def json_of(text: str | bytes) -> Any:
    """Read JSON; raises a ValueError for anything else, and for text that is nested too deeply."""
    try:
        value = json.loads(text)  # noqa: TID251
    except RecursionError as error:
        raise too_deep() from error
    require_flat(value)
    return value


def too_deep() -> ValueError:
    """The error for text that is nested too deeply."""
    return ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


def require_flat(value: Any) -> None:
    """Raise a ValueError for data that is nested too deeply."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        every = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        # By identity: what YAML's aliases name again and again is looked at once in each level.
        level = list({id(part): part for part in every if isinstance(part, (dict, list))}.values())
    if level:
        raise too_deep()


def yaml_of(text: str, source: str = "the text") -> Any:
    """Read YAML.

    Args:
        text: The YAML.
        source: Its origin, such as a file's name, for messages about a place in it.
    """
    try:
        value = _loader()(text).get_single_data()
    except RecursionError as error:
        raise too_deep() from error
    except Exception as error:  # invalid numbers and times end in any error of their constructors
        raise ValueError(str(error).replace('"<unicode string>"', source) or type(error).__name__) from error
    require_flat(value)
    return value


@lru_cache(maxsize=None)
def _loader() -> type[Any]:
    """PyYAML's safe loader, which takes the last of equal keys, made to refuse them."""
    import yaml  # takes time to load, and users' own Pythons may lack it

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            mapping = super().compose_mapping_node(anchor)
            found: dict[tuple[str, str], Any] = {}
            for key, _ in mapping.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                first = found.setdefault((key.tag, key.value), key)
                if first is not key:
                    lines = f"line {first.start_mark.line + 1} and again in line {key.start_mark.line + 1}"
                    raise ValueError(f"the key {key.value} stands in {lines}: leave one of them")
            return mapping

    return Loader


def counted(count: int, noun: str) -> str:
    """Return a number and what is counted: "1 change", "2 changes"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
