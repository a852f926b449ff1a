"""Output of commands for people, in which job names, models and Slurm's messages are nothing but text."""

from collections.abc import Collection, Iterable, Sequence

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from muri.text import printable, printable_lines


class PlainConsole(Console):
    """A console for tables: texts are neither markup nor emoji names, and control characters are shown."""

    def __init__(self, *, width: int | None = None) -> None:
        super().__init__(width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; only Rich's own codes, such as colors, reach the terminal."""
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


def say_columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> None:
    """Print a table that may be long, each row in one line however narrow the terminal; columns in `left` flush left.

    Rich's tables take half a millisecond for each row.
    """
    lines = [list(header), *([printable(text) for text in row] for row in rows)]
    sizes = [[cell_len(text) for text in line] for line in lines]
    widths = [max(column) for column in zip(*sizes, strict=True)]
    flush_left = [name in left for name in header]
    shown = []
    for line, line_sizes in zip(lines, sizes, strict=True):
        gaps = [" " * (width - size) for width, size in zip(widths, line_sizes, strict=True)]
        padded = zip(line, gaps, flush_left, strict=True)
        shown.append("  ".join(text + gap if is_left else gap + text for text, gap, is_left in padded).rstrip())
    click.echo("\n".join((click.style(shown[0], bold=True), *shown[1:])))
