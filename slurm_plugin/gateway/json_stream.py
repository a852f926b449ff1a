"""Parses a document of JSON item by item, so that neither all items nor wide texts are in memory at once.

One character outside Latin-1 makes each character of a Python text take two or four bytes. So a document is kept as
Latin-1, one byte a character, which leaves JSON's own signs where they are; only an item that is not ASCII is decoded
for what it is, by itself.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

_SPACE: Final = re.compile(r"[ \t\n\r]*")

_DECODER: Final = json.JSONDecoder(strict=False)


def items(document: bytes | bytearray, name: str, others: dict[str, Any]) -> Iterator[Any]:
    """Yield the items of one list among a document's members.

    Args:
        document: An object of JSON.
        name: Which member.
        others: Takes the other members, once all items have been yielded, and the list's name with an empty list.

    Raises:
        ValueError: It is no such document.
        RecursionError: It is nested too deeply.
    """
    walker = _Walker(document)
    walker.expect("{")
    goes_on = not walker.passes("}")
    while goes_on:
        key = walker.text()
        walker.expect(":")
        if key == name and walker.passes("["):
            others[key] = []
            yield from walker.rest_of_list()
        else:
            others[key] = walker.value()
        goes_on = walker.goes_on("}")
    walker.end()


class _Walker:
    """A place in a document."""

    def __init__(self, document: bytes | bytearray) -> None:
        self._text = document.decode("latin-1")
        self._at = 0

    def passes(self, sign: str) -> bool:
        """Whether a sign comes next; it is left behind then."""
        if space := _SPACE.match(self._text, self._at):
            self._at = space.end()
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) if found else 0
        return found

    def expect(self, sign: str) -> None:
        """Leave a sign behind."""
        if not self.passes(sign):
            raise ValueError(f"{sign!r} expected at character {self._at}")

    def goes_on(self, end: str) -> bool:
        """Whether another member or item comes, rather than the end."""
        if self.passes(end):
            return False
        self.expect(",")
        return True

    def value(self) -> Any:
        """Return the next value."""
        self.passes("")
        begin = self._at
        found, self._at = _DECODER.raw_decode(self._text, begin)
        raw = self._text[begin : self._at]
        return found if raw.isascii() else _DECODER.decode(raw.encode("latin-1").decode("utf-8", "surrogateescape"))

    def text(self) -> str:
        """Return the next value, which is a text."""
        self.passes("")
        if not self._text.startswith('"', self._at):
            raise ValueError(f"a name expected at character {self._at}")
        found: str = self.value()
        return found

    def rest_of_list(self) -> Iterator[Any]:
        """Yield the items of a list whose begin has been left behind."""
        goes_on = not self.passes("]")
        while goes_on:
            yield self.value()
            goes_on = self.goes_on("]")

    def end(self) -> None:
        """See that nothing comes any more."""
        self.passes("")
        if self._at != len(self._text):
            raise ValueError(f"more text after the document, at character {self._at}")
