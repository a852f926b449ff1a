"""One profile, and two side by side, for a terminal of 80 columns."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.profiler.comparison import Row
from muri.profiler.records import RESOURCES, STAGES, StageProfile
from muri.profiler.render import mark_of, milliseconds
from muri.profiler.times import age
from muri.profiler.upkeep import StaleMark

_BAR_WIDTH = 28
_STACK_WIDTH = 76
_COLOURS = ("blue", "yellow", "green", "magenta")
_PATTERNS = ("█", "▓", "▒", "░")
_NOTICED = 0.01
_HISTORY_LINES = 5


def print_profile(
    console: Console, history: Sequence[StageProfile], now: datetime, stale: StaleMark | None = None
) -> None:
    """The newest of a history: its iteration as one bar, each stage, and what else is known."""
    profile = history[0]
    console.print(Text(f"{profile.key}{'  (estimated, not measured)' if profile.is_estimate else ''}", style="bold"))
    if stale:
        console.print(Text(f"STALE since {stale.since}: {stale.reason} ({stale.who})", style="red"))
    console.print(stacked(profile))
    console.print(_stages(profile))
    for name, value in facts(profile, now).items():
        console.print(Text(f"{name + ':':<21} {value}"))
    if len(history) > 1:
        _print_history(console, history, now)


def stacked(profile: StageProfile) -> Text:
    """The iteration as one bar of what each stage owns; the rest is owned by none."""
    whole_s = max(profile.iteration_s, sum(profile.stage_s))
    bar, end_s, filled = Text("  "), 0.0, 0
    for value, pattern, colour in zip(profile.stage_s, _PATTERNS, _COLOURS, strict=True):
        end_s += value
        upto = round(_STACK_WIDTH * end_s / whole_s)
        bar.append(pattern * (upto - filled), style=colour)
        filled = upto
    return bar.append("·" * (_STACK_WIDTH - filled), style="dim")


def _stages(profile: StageProfile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("", "STAGE", "RESOURCE", "█ OWNED  ░ BUSY, HIDDEN"):
        table.add_column(name, no_wrap=True)
    for name in ("MS", "BUSY", "P95", "CV"):
        table.add_column(name, justify="right", no_wrap=True)
    detail = profile.detail
    busy = detail.busy_s or profile.stage_s
    per_stage = (busy, detail.stage_p95_s or (None,) * len(STAGES), detail.stage_cv or (None,) * len(STAGES))
    legend = (Text(pattern, style=colour) for pattern, colour in zip(_PATTERNS, _COLOURS, strict=True))
    whole_s = max(profile.iteration_s, *profile.stage_s, *busy)
    for symbol, stage, resource, owned_s, busy_s, p95_s, cv, colour in zip(
        legend, STAGES, RESOURCES, profile.stage_s, *per_stage, _COLOURS, strict=True
    ):
        hidden = busy_s > owned_s + _NOTICED * profile.iteration_s
        figures = (milliseconds(owned_s), milliseconds(busy_s) if hidden else "", _ms(p95_s), _two(cv))
        table.add_row(symbol, stage, resource, _bar(owned_s, busy_s, whole_s, colour), *figures)
    whole = (milliseconds(profile.iteration_s), "", _ms(detail.iteration_p95_s), _two(detail.iteration_cv))
    table.add_row("", "iteration", "", "", *whole)
    return table


def _bar(owned_s: float, busy_s: float, whole_s: float, colour: str) -> Text:
    owned = round(_BAR_WIDTH * owned_s / whole_s)
    busy = max(owned, round(_BAR_WIDTH * busy_s / whole_s))
    bar = Text("█" * owned, style=colour).append("░" * (busy - owned), style=colour)
    return bar.append("·" * (_BAR_WIDTH - busy), style="dim")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else milliseconds(seconds)


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def facts(profile: StageProfile, now: datetime) -> dict[str, str]:
    """Bottleneck, memory, use and origin by name; what was not measured is left out."""
    detail = profile.detail
    warmup = "" if detail.warmup_iterations is None else f" after {detail.warmup_iterations} of warm-up"
    found = {
        "bottleneck": profile.bottleneck,
        "peak GPU memory": f"{profile.gpu_mem_gib:.1f} GiB",
        "peak host memory": _or_none(detail.host_mem_gib, "{:.1f} GiB"),
        "mean GPU utilisation": _or_none(detail.gpu_utilisation, "{:.0%}"),
        "mean CPU use": _or_none(detail.cpu_cores, "{:.1f} cores"),
        "gradients": _or_none(detail.gradient_mib, "{:.1f} MiB"),
        "confidence": _or_none(detail.confidence, "{:.2f}"),
        "source": f"{profile.source}, {profile.iterations} iterations{warmup}",
        "measured": f"{profile.measured_at} ({age(profile.measured_at, now)} ago)" if profile.measured_at else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _or_none(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _print_history(console: Console, history: Sequence[StageProfile], now: datetime) -> None:
    console.print(Text(f"earlier ({len(history) - 1} kept):"))
    for profile in history[1 : 1 + _HISTORY_LINES]:
        change = 100 * (profile.iteration_s / history[0].iteration_s - 1)
        ago = f"{age(profile.measured_at, now)} ago"
        console.print(
            Text(f"  {ago:>10}  {profile.source:<9} {milliseconds(profile.iteration_s):>7} ms  {change:+.0f} %")
        )


def print_comparison(
    console: Console, first: StageProfile, second: StageProfile, rows: Sequence[Row], now: datetime
) -> None:
    """Two profiles: milliseconds, ratio, and whether the difference is more than noise."""
    for name, profile in (("A", first), ("B", second)):
        console.print(Text(f"{name}: {profile.key}{mark_of(profile)}", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms per iteration")
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("DIFFERENT?")
    words = {True: "yes", False: "within noise", None: "noise not measured"}
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, milliseconds(row.first_s), milliseconds(row.second_s), ratio, words[row.differs])
    console.print(table)
    console.print(_side_by_side(facts(first, now), facts(second, now)))


def _side_by_side(first: dict[str, str], second: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in first | second:
        table.add_row(name, Text(first.get(name, "-")), Text(second.get(name, "-")))
    return table
