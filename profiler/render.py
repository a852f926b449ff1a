"""Profiles as text for a terminal of 80 columns."""

from collections.abc import Collection, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.times import age


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with digits enough to tell short stages apart."""
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def gpus(profile: StageProfile) -> str:
    """GPU count and type: "2×a100"."""
    return f"{profile.key.gpu_count}×{profile.key.gpu_type}"


def batch(profile: StageProfile) -> str:
    """Batch size, "?" when the user did not say."""
    return str(profile.key.batch_size or "?")


def mark_of(profile: StageProfile, stale: Collection[ProfileKey] = ()) -> str:
    """What stands behind a model's name: "~" for an estimate, "!" for a stale profile."""
    return ("~" if profile.is_estimate else "") + ("!" if profile.key in stale else "")


def print_table(
    console: Console, profiles: Sequence[StageProfile], now: datetime, stale: Collection[ProfileKey] = ()
) -> None:
    """One line for each profile; stage and iteration times in milliseconds."""
    marks = [mark_of(profile, stale) for profile in profiles]
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    table.add_column("MODEL", overflow="fold", min_width=10)
    table.add_column("BATCH", justify="right", no_wrap=True)
    table.add_column("GPUS", overflow="fold", min_width=5)
    for name in ("LOAD", "PREP", "PROP", "SYNC", "ITER"):
        table.add_column(f"{name}", justify="right", no_wrap=True)
    table.add_column("GIB", justify="right", no_wrap=True)
    table.add_column("AGE", justify="right", no_wrap=True)
    for profile, mark in zip(profiles, marks, strict=True):
        times = [milliseconds(value) for value in (*profile.stage_s, profile.iteration_s)]
        table.add_row(
            Text(profile.key.model + mark),
            batch(profile),
            Text(gpus(profile)),
            *times,
            f"{profile.gpu_mem_gib:.1f}",
            age(profile.measured_at, now),
        )
    console.print(table)
    console.print(Text("Times in milliseconds per iteration, alone; GIB: peak GPU memory.", style="dim"))
    for symbol, meaning in (("~", "estimated, not measured"), ("!", "stale: to be measured again")):
        if any(symbol in mark for mark in marks):
            console.print(Text(f"{symbol} {meaning}", style="dim"))
