"""What commands print for people. Job names, models and Slurm's own words may hold anything; here they become text."""

from collections.abc import Iterable

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from muri.printable import printable, printable_lines


class PlainConsole(Console):
    """A console for tables: texts are neither markup nor emoji names, and control characters are shown."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render what is to be printed; only Rich's own codes, such as colours, reach the terminal."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


def cell(text: str) -> Text:
    """A table's cell that holds text of others: one line, shown as it is."""
    return Text(printable(text))


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print one line that may hold text of others."""
    click.echo(printable(text), err=to_stderr)
