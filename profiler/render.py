"""Profiles as text for a terminal of 80 columns."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.profiler.records import RESOURCES, STAGES, StageProfile

_BAR_WIDTH = 40
_COLOURS = ("blue", "yellow", "green", "magenta")


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with digits enough to tell short stages apart."""
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def age(measured_at: str, now: datetime) -> str:
    """How long ago a measurement was: "5 min", "3 h", "12 d"; "?" when it is not known."""
    try:
        then = datetime.fromisoformat(measured_at)
    except ValueError:
        return "?"
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    seconds = max(0.0, (now - then).total_seconds())
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def gpus(profile: StageProfile) -> str:
    """GPU count and type: "2×a100"."""
    return f"{profile.key.gpu_count}×{profile.key.gpu_type}"


def batch(profile: StageProfile) -> str:
    """Batch size, "?" when the user did not say."""
    return str(profile.key.batch_size or "?")


def print_table(console: Console, profiles: Sequence[StageProfile], now: datetime) -> None:
    """One line for each profile; stage and iteration times in milliseconds."""
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    table.add_column("MODEL", overflow="fold", min_width=10)
    table.add_column("BATCH", justify="right", no_wrap=True)
    table.add_column("GPUS", overflow="fold", min_width=5)
    for name in ("LOAD", "PREP", "PROP", "SYNC", "ITER"):
        table.add_column(f"{name}", justify="right", no_wrap=True)
    table.add_column("GIB", justify="right", no_wrap=True)
    table.add_column("AGE", justify="right", no_wrap=True)
    for profile in profiles:
        times = [milliseconds(value) for value in (*profile.stage_s, profile.iteration_s)]
        table.add_row(
            Text(profile.key.model),
            batch(profile),
            Text(gpus(profile)),
            *times,
            f"{profile.gpu_mem_gib:.1f}",
            age(profile.measured_at, now),
        )
    console.print(table)
    console.print(Text("Times in milliseconds per iteration, alone; GIB: peak GPU memory.", style="dim"))


def print_profile(console: Console, profile: StageProfile, history: Sequence[StageProfile], now: datetime) -> None:
    """One profile with a bar for each stage, scaled to the iteration."""
    console.print(Text(str(profile.key), style="bold"))
    whole_s = max(profile.iteration_s, *profile.stage_s)
    for stage, resource, value, colour in zip(STAGES, RESOURCES, profile.stage_s, _COLOURS, strict=True):
        filled = round(_BAR_WIDTH * value / whole_s)
        line = Text(f"  {stage:<12}{resource:<8} ")
        line.append("█" * filled, style=colour).append("·" * (_BAR_WIDTH - filled), style="dim")
        console.print(line.append(f" {milliseconds(value):>7} ms"))
    console.print(Text(f"  {'iteration':<61} {milliseconds(profile.iteration_s):>7} ms"))
    console.print(Text(f"  bottleneck: {profile.bottleneck}; GPU memory {profile.gpu_mem_gib:.1f} GiB"))
    console.print(Text(f"  {provenance(profile, len(history), now)}"))


def provenance(profile: StageProfile, measurements: int, now: datetime) -> str:
    """Where the figures come from, in one line."""
    when = f"{profile.measured_at} ({age(profile.measured_at, now)} ago)" if profile.measured_at else "unknown time"
    kept = f"; {measurements} measurements kept" if measurements > 1 else ""
    return f"{profile.source} of {profile.iterations} iterations, {when}{kept}"
