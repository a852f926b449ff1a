"""Text of others: the valid name that a mistyped one is near to, and words made harmless before they are shown.

A wrong hint is worse than none, so names are near only if well over half of their letters agree. A terminal obeys
escape sequences, and a log is read line by line.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Final

_LEAST: Final = 0.6

_SHORTEST_BEGINNING: Final = 3
"""So many letters with which a name begins stand for all of it, such as `sync` for `synchronize`."""


def nearest(name: str, valid: Iterable[str], most: int = 1) -> list[str]:
    """Return valid names that a name may be a slip of, the nearest first; often none.

    Letter case does not count, nor does the order of words: `num_gpus` is near to `gpu_num`.

    Args:
        name: What was given.
        valid: What could be meant.
        most: How many to return at most.
    """
    rated = sorted(((_likeness(name, each), each) for each in valid), key=lambda pair: -pair[0])
    return [each for likeness, each in rated[:most] if likeness >= _LEAST]


def _likeness(one: str, other: str) -> float:
    """Share of letters that agree in order, 1 for all."""
    plain = SequenceMatcher(None, one.lower(), other.lower()).ratio()
    if len(one) >= _SHORTEST_BEGINNING and other.lower().startswith(one.lower()):
        return max(plain, _LEAST)
    return max(plain, SequenceMatcher(None, _sorted_words(one), _sorted_words(other)).ratio())


def _sorted_words(name: str) -> str:
    return "_".join(sorted(name.lower().replace("-", "_").replace(" ", "_").split("_")))


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
