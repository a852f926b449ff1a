"""A trace's figures as tables for the terminal, at most 80 columns wide."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from muri.simulator.traces.overview import Overview, Share

_DAY_S, _HOUR_S, _MINUTE_S = 86_400.0, 3600.0, 60.0
_LEAST_SHOWN = 2.0


def print_overview(console: Console, overview: Overview, gpus: int | None) -> None:
    """Print a trace's figures.

    Args:
        console: Where.
        overview: The figures.
        gpus: Of the cluster whose load is shown; None: only the GPUs that the trace keeps busy.
    """
    console.print(_totals(overview, gpus))
    console.print(_shares("GPUs of a job", overview.by_gpu_count, overview))
    console.print(_shares("Bottleneck", overview.by_bottleneck, overview))
    console.print(_durations(overview))


def duration(seconds: float) -> str:
    """A time with the unit that reads best."""
    for unit_s, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= _LEAST_SHOWN * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"


def _totals(overview: Overview, gpus: int | None) -> Table:
    table = Table(show_header=False, title=f"Trace {overview.name}", title_justify="left", box=None, pad_edge=False)
    table.add_row("Jobs", f"{overview.jobs:,} of {overview.users} users, {overview.models} models")
    if overview.skipped_rows:
        table.add_row("Left out", f"{overview.skipped_rows:,} bad rows")
    table.add_row("Opportunistic", f"{overview.opportunistic / overview.jobs:.1%} of the jobs")
    table.add_row("Submitted within", duration(overview.span_s))
    table.add_row("Work", f"{overview.gpu_s / _HOUR_S:,.1f} GPU-hours, every job running alone")
    busy = overview.gpus_busy_mean
    table.add_row("Keeps busy", "all jobs come at once" if busy is None else f"{busy:,.1f} GPUs on average")
    load = None if gpus is None else overview.load(gpus)
    if load is not None:
        table.add_row(f"Load of {gpus} GPUs", f"{load:.2f}")
    return table


def _shares(title: str, shares: Mapping[int, Share] | Mapping[str, Share], overview: Overview) -> Table:
    table = Table()
    table.add_column(title)
    for heading in ("Jobs", "of jobs", "of GPU time"):
        table.add_column(heading, justify="right")
    for name, share in shares.items():
        of_time = share.gpu_s / overview.gpu_s
        table.add_row(str(name), f"{share.jobs:,}", f"{share.jobs / overview.jobs:.1%}", f"{of_time:.1%}")
    return table


def _durations(overview: Overview) -> Table:
    table = Table()
    table.add_column("Jobs running alone")
    table.add_column("take", justify="right")
    names = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    for share, value in overview.duration_s.items():
        table.add_row(names.get(share, f"{100 * share:g} % take at most"), duration(value))
    return table
