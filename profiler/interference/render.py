"""Pairs and fits as text for a terminal of 80 columns."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.profiler.interference.fits import LinearFit
from muri.profiler.interference.next_pairs import Candidate
from muri.profiler.interference.ratios import Interference, Side
from muri.profiler.records import ProfileKey
from muri.profiler.render import milliseconds
from muri.profiler.times import age


def print_pairs(console: Console, pairs: Sequence[Interference], now: datetime) -> None:
    """Two lines for each pair, one for each model."""
    table = _table()
    table.add_column("MODEL", overflow="fold", min_width=10)
    for name in ("ALONE", "SHARED", "RATIO", "±%", "SURE%", "AGE"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        for side, mark in ((pair.a, ""), (pair.b, "+ ")):
            table.add_row(Text(mark + _short(side.key)), *_cells(side), "" if mark else age(pair.measured_at, now))
    console.print(table)
    console.print("Milliseconds per iteration; RATIO ξ: how much longer it takes beside the other.")


def print_candidates(console: Console, candidates: Sequence[Candidate]) -> None:
    """One line for each pair that is worth measuring."""
    table = _table()
    for name in ("MODEL", "WITH"):
        table.add_column(name, overflow="fold", min_width=10)
    for name in ("CHANCES", "SURE%"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in candidates:
        sure = "-" if item.confidence is None else f"{item.confidence * 100:.0f}"
        table.add_row(Text(_short(item.a)), Text(_short(item.b)), str(item.chances), sure)
    console.print(table)


def print_fit(console: Console, title: str, unit: str, fit: LinearFit) -> None:
    """The line, and each point beside it."""
    console.print(Text(title, style="bold"))
    per_unit = f"{fit.per_unit_s * 1e3:.4g} ms per {unit}"
    console.print(
        f"  {fit.fixed_s * 1e3:.4g} ms + {per_unit}; R² {fit.r_squared:.3f}, residual {fit.residual_s * 1e3:.2g} ms"
    )
    table = _table()
    for name in (f"  {unit.upper()}", "MEASURED MS", "LINE MS", "OFF"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in fit.points:
        line_s = fit.seconds(point.size)
        off = f"{(line_s / point.seconds - 1) * 100:+.1f} %" if point.seconds else "-"
        table.add_row(f"{point.size:g}", milliseconds(point.seconds), milliseconds(line_s), off)
    console.print(table)


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")


def _short(key: ProfileKey) -> str:
    return f"{key.model} b{key.batch_size or '?'} {key.gpu_count}×{key.gpu_type}"


def _cells(side: Side) -> tuple[str, str, str, str, str]:
    spread = "?" if side.spread is None else f"{side.spread * 100:.0f}"
    sure = f"{side.confidence * 100:.0f}"
    return milliseconds(side.solo_s), milliseconds(side.shared_s), f"{side.ratio:.2f}", spread, sure
