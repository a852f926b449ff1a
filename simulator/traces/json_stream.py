"""A long JSON array, one element at a time."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from muri.simulator.traces.problems import TraceError

_LOOK_AHEAD = 1 << 17
"""Characters after which a syntax error is surely none that more text would mend."""


class _Text:
    """The part of the text not yet consumed, and the line where it starts."""

    def __init__(self, name: str, chunks: Iterable[str]) -> None:
        self.name = name
        self.line = 1
        self.rest = ""
        self._chunks = iter(chunks)

    def read_more(self) -> bool:
        """Append as much again as there is; whether there was any."""
        wanted = max(1, len(self.rest))
        pieces: list[str] = []
        while wanted > 0 and (piece := next(self._chunks, "")):
            pieces.append(piece)
            wanted -= len(piece)
        self.rest += "".join(pieces)
        return bool(pieces)

    def consume(self, count: int) -> None:
        """Drop the first characters."""
        self.line += self.rest.count("\n", 0, count)
        self.rest = self.rest[count:]

    def next_character(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            stripped = len(self.rest) - len(self.rest.lstrip())
            self.consume(stripped)
            if self.rest or not self.read_more():
                return self.rest[:1]

    def error(self, message: str, at: int = 0) -> TraceError:
        """A message with the line of a position."""
        return TraceError(f"{self.name}:{self.line + self.rest.count(chr(10), 0, at)}: not valid JSON: {message}")


def elements(name: str, chunks: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array.

    Args:
        name: The file, for messages.
        chunks: Its text in pieces.

    Yields:
        The line where an element starts, and the element.

    Raises:
        TraceError: The text is not an array, or ends too early.
    """
    text = _Text(name, chunks)
    if text.next_character() != "[":
        raise text.error("a list of jobs in [ … ] is expected")
    text.consume(1)
    if text.next_character() == "]":
        return
    while True:
        text.next_character()
        yield text.line, _element(text)
        separator = text.next_character()
        if separator not in {",", "]"}:
            raise text.error("the list ends too early" if not separator else f"{separator!r} where , or ] belongs")
        text.consume(1)
        if separator == "]":
            return


def _element(text: _Text) -> Any:
    decoder = json.JSONDecoder()
    while True:
        try:
            value, end = decoder.raw_decode(text.rest)
        except json.JSONDecodeError as error:
            near_end = len(text.rest) - error.pos < _LOOK_AHEAD
            if not (near_end and text.read_more()):
                raise text.error(error.msg, error.pos) from error
        except (RecursionError, ValueError) as error:  # nested without end, or a number of thousands of digits
            raise text.error(f"this is no job: {error}") from error
        else:
            text.consume(end)
            return value
