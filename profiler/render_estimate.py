"""An estimate as a table, beside the measured profile where there is one."""

import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.profiler.estimates import ProfileEstimate
from muri.profiler.records import STAGES, StageProfile
from muri.profiler.render import milliseconds


def print_estimate(console: Console, found: ProfileEstimate, measured: StageProfile | None) -> None:
    """Value and interval of each stage and the iteration, in milliseconds, and what they rest on."""
    profile = found.profile
    console.print(Text(f"{profile.key}: {profile.source}, not measured", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms per iteration")
    headings = ("ESTIMATE", "INTERVAL", *(("MEASURED", "ERROR") if measured else ()))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    values = (*profile.stage_s, profile.iteration_s)
    truths = (*measured.stage_s, measured.iteration_s) if measured else (None,) * len(values)
    for name, value, (least_s, most_s), truth in zip(
        (*STAGES, "iteration"), values, found.interval_s, truths, strict=True
    ):
        ends = f"{milliseconds(least_s)} – {milliseconds(most_s)}"
        beside = () if truth is None else (milliseconds(truth), _error(value, truth))
        table.add_row(name, milliseconds(value), ends, *beside)
    console.print(table)
    console.print(Text(f"bottleneck: {profile.bottleneck}; GPU memory {profile.gpu_mem_gib:.1f} GiB"))
    for line in found.basis:
        console.print(Text(textwrap.fill(line, console.width, initial_indent="- ", subsequent_indent="  ")))


def _error(estimate_s: float, truth_s: float) -> str:
    return f"{100 * (estimate_s / truth_s - 1):+.0f} %" if truth_s else "-"
