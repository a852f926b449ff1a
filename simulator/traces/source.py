"""Where a trace is read from: a file or the standard input, looked at first and then streamed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TextIO

from muri.simulator.traces.problems import TraceError

HEAD_LINES = 8
MAX_LINE_CHARS = 1 << 16
CHUNK_CHARS = 1 << 16


@dataclass
class Source:
    """An open text whose first lines are known, to guess its format by.

    Attributes:
        path: Its path; "-" is the standard input.
        name: Name for messages.
        head: Its first lines.
    """

    path: Path
    name: str
    head: tuple[str, ...]
    _rest: TextIO

    @property
    def trace_name(self) -> str:
        """Name of the trace: the file's stem."""
        return "stdin" if self.path == Path("-") else self.path.stem

    def lines(self) -> Iterator[str]:
        """All lines. To be called once, and not together with `chunks`."""
        return chain(self.head, self._rest)

    def chunks(self) -> Iterator[str]:
        """The whole text in pieces, for files whose lines can be very long."""
        return chain(self.head, iter(lambda: self._rest.read(CHUNK_CHARS), ""))


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a trace.

    Args:
        path: The file; "-" reads the standard input.

    Yields:
        The open source.

    Raises:
        TraceError: The file cannot be read or is not UTF-8 text.
    """
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
