"""Pages that open offline: nothing in them is loaded from anywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Final

_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the browser refuses to load anything from outside."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table."""

    text: str  # Its text
    best: bool = False  # Whether it is the best of its column
    word: bool = False  # Whether it holds words rather than a figure
    small: str = ""  # A remark after the text


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table that scrolls on a narrow screen; the first cell of each row is its heading."""
    rows = list(rows)
    words = [cell.word for cell in rows[0]] if rows else [False] * len(header)
    head = "".join(map(_heading, header, words))
    body = "".join(f"<tr>{_row(cells)}</tr>\n" for cells in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def page(title: str, body: str, *, scripts: Sequence[str] = ()) -> str:
    """A whole page."""
    written = "".join(f"<script>{text}</script>\n" for text in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_asset('page.css')}</style>\n{written}</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def plot_script() -> tuple[str, str]:
    """The plotting library, and the script that gives its plots the page's colors."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs(), _asset("page.js")


def _heading(name: str, word: bool) -> str:
    kind = ' class="word"' if word else ""
    return f'<th scope="col"{kind}>{escape(name)}</th>'


def _row(cells: Sequence[Cell]) -> str:
    first = f'<th scope="row">{escape(cells[0].text)}</th>'
    return first + "".join(map(_cell, cells[1:]))


def _cell(cell: Cell) -> str:
    classes = " ".join(name for name, given in (("best", cell.best), ("word", cell.word)) if given)
    small = f" <small>{escape(cell.small)}</small>" if cell.small else ""
    return f"<td{f' class={classes!r}' if classes else ''}>{escape(cell.text)}{small}</td>"


@cache
def _asset(name: str) -> str:
    return (files("muri_lab.report") / name).read_text(encoding="utf-8")
