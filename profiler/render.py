"""Profiles, pairs, fits and sensitivities as text for a terminal of 80 columns."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.clock import age
from muri.profiler.dryrun.messages import LEAST_CONFIDENCE
from muri.profiler.interference import overlap_exponent
from muri.profiler.lookup import PUBLISHED
from muri.profiler.records import RESOURCES, STAGES, ProfileKey, StageProfile, dangers_text, unexplained
from muri.profiler.sensitivity import Dataset, SensitivityProfile, cache_sizes, throughput
from muri.profiler.store import StaleMark
from muri.text import counted

_STACK_WIDTH: Final = 76
_STAGE_BAR_WIDTH: Final = 28
_SHARE_BAR_WIDTH: Final = 40
_COLORS: Final = ("blue", "yellow", "green", "magenta")
_PATTERNS: Final = ("█", "▓", "▒", "░")

_NOTICED: Final = 0.01
"""Hidden use that is a smaller share of the iteration is not shown."""

_HISTORY_LINES: Final = 5

_MOST_ROWS: Final = 24
"""Most CPU counts that fit a terminal without scrolling."""


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with digits enough to tell short stages apart."""
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def mark_of(profile: StageProfile, stale: Collection[ProfileKey] = ()) -> str:
    """The marks behind a model's name: "~" for an estimate, "!" for a stale profile."""
    return ("~" if profile.is_estimate else "") + ("!" if profile.key in stale else "")


def print_table(
    console: Console, profiles: Sequence[StageProfile], now: datetime, stale: Sequence[StaleMark] = ()
) -> None:
    """One line for each profile, stage and iteration times in milliseconds; then why some are stale."""
    marks = [mark_of(profile, {mark.key for mark in stale}) for profile in profiles]
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    table.add_column("MODEL", overflow="fold", min_width=10)
    # Where all profiles are published the column is not worth its place.
    whose = any(profile.key.user for profile in profiles)
    if whose:
        table.add_column("USER", overflow="fold")
    add_figures(table, "BATCH")
    table.add_column("GPUS", overflow="fold", min_width=5)
    add_figures(table, "LOAD", "PREP", "PROP", "SYNC", "ITER")
    add_figures(table, "GIB", "AGE")
    for profile, mark in zip(profiles, marks, strict=True):
        times = [milliseconds(value) for value in (*profile.stage_s, profile.iteration_s)]
        table.add_row(
            Text(profile.key.model + mark),
            *((Text(profile.key.user or PUBLISHED),) if whose else ()),
            str(profile.key.batch_size or "?"),
            Text(f"{profile.key.gpu_count}×{profile.key.gpu_type}"),
            *times,
            f"{profile.gpu_mem_gib:.1f}",
            age(profile.measured_at, now),
        )
    console.print(table)
    console.print(Text("Times in milliseconds per iteration, alone; GIB: peak GPU memory.", style="dim"))
    for symbol, meaning in (("~", "estimated, not measured"), ("!", "stale: to be measured again")):
        if any(symbol in mark for mark in marks):
            console.print(Text(f"{symbol} {meaning}", style="dim"))
    for each in stale:
        console.print(Text(f"! {each.key}, {age(each.since, now)} ago, by {each.who}: {each.reason}", style="dim"))


def print_profile(
    console: Console, history: Sequence[StageProfile], now: datetime, stale: StaleMark | None = None
) -> None:
    """The newest profile of a history: its iteration as one bar, each stage, and all other figures."""
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
    """The iteration as one bar of what each stage owns; no stage owns the dotted rest."""
    whole_s = max(profile.iteration_s, sum(profile.stage_s))
    bar, end_s, filled = Text("  "), 0.0, 0
    for value, pattern, color in zip(profile.stage_s, _PATTERNS, _COLORS, strict=True):
        end_s += value
        upto = round(_STACK_WIDTH * end_s / whole_s)
        bar.append(pattern * (upto - filled), style=color)
        filled = upto
    return bar.append("·" * (_STACK_WIDTH - filled), style="dim")


def _stages(profile: StageProfile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("", "STAGE", "RESOURCE", "█ OWNED  ░ BUSY, HIDDEN"):
        table.add_column(name, no_wrap=True)
    add_figures(table, "MS", "BUSY", "P95", "CV")
    detail = profile.detail
    busy = detail.busy_s or profile.stage_s
    per_stage = (busy, detail.stage_p95_s or (None,) * len(STAGES), detail.stage_cv or (None,) * len(STAGES))
    legend = (Text(pattern, style=color) for pattern, color in zip(_PATTERNS, _COLORS, strict=True))
    whole_s = max(profile.iteration_s, *profile.stage_s, *busy)
    for symbol, stage, resource, owned_s, busy_s, p95_s, cv, color in zip(
        legend, STAGES, RESOURCES, profile.stage_s, *per_stage, _COLORS, strict=True
    ):
        hidden = busy_s > owned_s + _NOTICED * profile.iteration_s
        figures = (milliseconds(owned_s), milliseconds(busy_s) if hidden else "", *_spread(p95_s, cv))
        table.add_row(symbol, stage, resource, _stage_bar(owned_s, busy_s, whole_s, color), *figures)
    whole = _spread(detail.iteration_p95_s, detail.iteration_cv)
    table.add_row("", "iteration", "", "", milliseconds(profile.iteration_s), "", *whole)
    return table


def _spread(p95_s: float | None, cv: float | None) -> tuple[str, str]:
    return "" if p95_s is None else milliseconds(p95_s), _or_none(cv, "{:.2f}") or ""


def _stage_bar(owned_s: float, busy_s: float, whole_s: float, color: str) -> Text:
    owned = round(_STAGE_BAR_WIDTH * owned_s / whole_s)
    busy = max(owned, round(_STAGE_BAR_WIDTH * busy_s / whole_s))
    bar = Text("█" * owned, style=color).append("░" * (busy - owned), style=color)
    return bar.append("·" * (_STAGE_BAR_WIDTH - busy), style="dim")


def facts(profile: StageProfile, now: datetime) -> dict[str, str]:
    """Bottleneck, memory, use and origin by name; what was not measured is left out."""
    detail = profile.detail
    warmup = "" if detail.warmup_iterations is None else f" after {detail.warmup_iterations} of warm-up"
    low = detail.confidence is not None and detail.confidence < LEAST_CONFIDENCE
    confidence = "{:.2f}" + ": plans as unknown where profiling.least_confidence is higher" * low
    found = {
        "bottleneck": profile.bottleneck,
        "in no stage": unexplained(profile.stage_s, profile.iteration_s),
        "peak GPU memory": f"{profile.gpu_mem_gib:.1f} GiB",
        "peak host memory": _or_none(detail.host_mem_gib, "{:.1f} GiB"),
        "mean GPU utilization": _or_none(detail.gpu_utilization, "{:.0%}"),
        "mean CPU use": _or_none(detail.cpu_cores, "{:.1f} cores"),
        "gradients": _or_none(detail.gradient_mib, "{:.1f} MiB"),
        "network is hidden": _or_none(overlap_exponent(profile), "δ {:.3g} (1: not at all, inf: wholly)"),
        "confidence": _or_none(detail.confidence, confidence),
        "dangers to threads": None if detail.dangers is None else dangers_text(detail.dangers) or "none found",
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


def add_figures(table: Table, *headings: str) -> None:
    """Add columns of numbers."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def print_sensitivity(console: Console, found: SensitivityProfile) -> None:
    """Throughput over the CPU count and the cache as bars, and the demand."""
    how = "cores by affinity" if found.pinned else "counts only told to the script"
    console.print(Text(f"{found.name}: {counted(found.cpu.measurements, 'measurement')}, {how}", style="bold"))
    _print_cpus(console, found)
    if found.dataset is not None:
        _print_memory(console, found, found.dataset)
    demand = found.demand
    parts = [counted(demand.cpus, "CPU")]
    if demand.process_gib is not None:
        parts.append(f"{demand.process_gib:.2f} GiB for its processes")
    if demand.cache_gib is not None:
        parts.append(f"{demand.cache_gib:.2f} GiB of cache")
    console.print(Text(f"demand: {', '.join(parts)}", style="bold"))
    if found.cpu.undecided_cpus:
        least = found.demand.cpus - found.cpu.undecided_cpus
        console.print(Text(f"The least count may be as low as {least}: those in between were not measured."))


def _print_cpus(console: Console, found: SensitivityProfile) -> None:
    points = {point.cpus: point for point in found.cpu.points}
    best = found.cpu.points[-1].throughput
    console.print(Text(f"{'CPUS':>5} {'ITERATIONS/S':>13}", style="dim"))
    counts = list(range(1, found.cpu.max_cpus + 1))
    if len(counts) > _MOST_ROWS:  # then the measured ones and some in between
        step = -(-len(counts) // (_MOST_ROWS // 2))
        counts = sorted({1, *points, *range(step, len(counts), step)})
    for cpus in counts:
        value = found.cpu.throughput(cpus)
        point = points.get(cpus)
        line = _share_bar(f"{cpus:>5} {value:>13.3g} ", value / best, "yellow" if point else "dim yellow")
        if point is not None:
            line.append(f" ± {point.spread * 100:.1f} %")
        if cpus == found.demand.cpus:
            line.append("  enough", style="green")
        console.print(line)
    if not points.keys() >= set(counts):
        console.print(Text("      Without ±: interpolated between measured counts.", style="dim"))


def _print_memory(console: Console, found: SensitivityProfile, dataset: Dataset) -> None:
    at_full = found.cpu.throughput(found.demand.cpus)
    console.print(
        Text(f"{'CACHE':>5} {'ITERATIONS/S':>13}  computed, on {counted(found.demand.cpus, 'CPU')}", style="dim")
    )
    for gib in cache_sizes(dataset):
        value = throughput(dataset, at_full, gib)
        console.print(_share_bar(f"{gib:>5.3g} {value:>13.3g} ", value / at_full, "blue").append(f" {gib:.3g} GiB"))
    console.print(
        Text(
            f"      {dataset.dataset_gib:.3g} GiB at {dataset.storage_mib_per_s:.4g} MiB/s, "
            f"{dataset.batch_mib:.3g} MiB per iteration, {dataset.overlap:.0%} overlapped.",
            style="dim",
        )
    )


def _share_bar(head: str, share: float, style: str) -> Text:
    filled = min(_SHARE_BAR_WIDTH, round(_SHARE_BAR_WIDTH * share))
    return Text(head).append("█" * filled, style=style).append("·" * (_SHARE_BAR_WIDTH - filled), style="dim")
