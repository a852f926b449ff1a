"""A reason for a decision: a sentence that is only put together when somebody reads it."""

from collections.abc import Iterable
from typing import NamedTuple


class Reason(NamedTuple):
    """A sentence with figures left out, and the figures.

    A plan has one or more for every job of a queue of a hundred thousand, and people read a few of
    them, so the text is made on demand.

    Attributes:
        template: The sentence, with `{}` fields for `str.format`.
        values: What goes into the fields.
    """

    template: str
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        """The sentence."""
        return self.template.format(*self.values) if self.values else self.template


def sentences(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """The sentences of a decision."""
    return tuple(str(reason) for reason in reasons)
