"""Draws groups for `muri top`: a table of members, a line of resources, within 80 columns."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muri.launcher.telemetry.top_source import GroupView

BAR_WIDTH: Final = 16
DIFFERS_BY: Final = 0.2
"""Measured and predicted speed that differ by more are marked, as the controller does."""

SORTS: Final = ("job", "speed", "iterations", "wait")
PARTS: Final = (
    ("load", "L", "on blue"),
    ("preprocess", "P", "black on yellow"),
    ("propagate", "G", "black on green"),
    ("synchronize", "S", "on magenta"),
    ("wait", "w", "dim"),
    ("other", "·", "dim"),
)
LEGEND: Final = "L load  P preprocess  G propagate  S synchronize  w wait  · other  ! off plan"


def stage_bar(share: Mapping[str, float], width: int = BAR_WIDTH) -> Text:
    """The shares of an iteration as a bar of exactly `width` letters; empty when nothing is known."""
    text = Text()
    total = sum(share.get(name, 0.0) for name, _, _ in PARTS)
    if total <= 0:
        return Text("-")
    drawn, up_to = 0, 0.0
    for name, letter, style in PARTS:
        up_to += share.get(name, 0.0)
        end = round(up_to / total * width)
        text.append(letter * (end - drawn), style)
        drawn = end
    return text


def differs(measured: float | None, predicted: float | None) -> bool:
    """Whether the measured speed is off the predicted one by more than 20 %."""
    return measured is not None and bool(predicted) and abs(measured / (predicted or 1.0) - 1) > DIFFERS_BY


def sort_members(members: Mapping[str, Mapping[str, Any]], by: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Members by job id, or the slowest, furthest or most hindered first."""

    def key(item: tuple[str, Mapping[str, Any]]) -> tuple[float, int, str]:
        name, member = item
        speed = member.get("speed")
        orders = {
            "job": 0.0,
            "speed": float("inf") if speed is None else float(speed),
            "iterations": -float(member.get("iterations") or 0),
            "wait": -float((member.get("share") or {}).get("wait", 0.0)),
        }
        return (orders[by], len(name), name)

    return sorted(members.items(), key=key)


def render(groups: Sequence[GroupView], sort: str) -> RenderableType:
    """All groups, one below the other."""
    parts: list[RenderableType] = []
    for group in groups:
        parts += [_headline(group), _members_table(group, sort), _resources_line(group.status), Text("")]
    return Group(*parts, Text(LEGEND, style="dim"))


def _headline(group: GroupView) -> Text:
    status = group.status
    host = status.get("host_job")
    name = f"Group of host job {host}" if host else f"Runtime {status.get('pid')}"
    total = status.get("total_speed")
    speed = "-" if total is None else f"{total:.2f} of {_running(status)}"
    text = Text(f"{name}: {status['discipline']}, total speed {speed}", style="bold")
    changes = status.get("disciplines") or []
    if len(changes) > 1:
        text.append(f" ({len(changes) - 1} changes: {changes[-1].get('reason', '')})", "not bold")
    if isinstance(fault := status.get("fault"), dict):
        text.append(f"\nError of the GPU: {fault.get('cause')}", "red")
    if group.stale:
        text.append(f"\nThe runtime has not written for {group.age_s:.0f} s: it has died or hangs.", "red")
    return text


def _running(status: Mapping[str, Any]) -> int:
    return sum(member.get("state") == "running" for member in status["members"].values())


def _members_table(group: GroupView, sort: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("JOB", justify="right", no_wrap=True)
    table.add_column("SCRIPT", no_wrap=True, max_width=13, overflow="ellipsis")
    table.add_column("STATE", no_wrap=True)
    table.add_column("ITER", justify="right", no_wrap=True)
    table.add_column("IT/S", justify="right", no_wrap=True)
    table.add_column("TIME GOES TO", no_wrap=True, min_width=BAR_WIDTH)
    table.add_column("SPEED", justify="right", no_wrap=True)
    table.add_column("PLAN", justify="right", no_wrap=True)
    for name, member in sort_members(group.status["members"], sort):
        table.add_row(name, *_cells(member))
    return table


def _cells(member: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    speed, predicted, rate = (member.get(key) for key in ("speed", "predicted_speed", "iterations_per_s"))
    off = differs(speed, predicted)
    estimated = "~" if speed is not None and member.get("solo_iteration_s") is None else ""
    shown = "-" if speed is None else f"{estimated}{speed:.2f}"
    return (
        PurePath(str(member.get("script") or "-")).name,
        _state(member),
        str(member.get("iterations", 0)),
        "-" if rate is None else f"{rate:.3g}",
        stage_bar(member.get("share") or {}),
        Text(f"{shown}{'!' if off else ' '}", style="bold red" if off else ""),
        "-" if predicted is None else f"{predicted:.2f}",
    )


def _state(member: Mapping[str, Any]) -> str:
    if member.get("fault"):
        return "faulty"
    if member.get("state") == "running" and member.get("isolation") == "process":
        return "process"
    if member.get("state") == "ended":
        return f"exit {member.get('exit_code')}"
    return str(member.get("state"))


def _resources_line(status: Mapping[str, Any]) -> Text:
    text = Text()
    for name, resource in (status.get("resources") or {}).items():
        text.append(f"{name} ", "dim")
        text.append(f"{resource.get('busy', 0.0):.0%} {resource.get('holder') or '-'}  ")
    return text
