"""The result of a sweep as a table on the terminal."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from muri.simulator import units
from muri.simulator.summary import PolicySummary, TraceSummary

_COLUMNS: Final = ("POLICY", "AVG JCT", "MEDIAN", "P99", "MAKESPAN", "QUEUE", "GPU", "SPEED-UP")

_FAILURES: Final = ("OOM",)
"""Only where a job ran out of GPU memory."""


def print_tables(summaries: Sequence[TraceSummary], console: Console) -> None:
    """Print one table for each trace."""
    for position, summary in enumerate(summaries):
        if position:
            console.print()
        console.print(_headline(summary))
        console.print(table_of(summary))


def table_of(summary: TraceSummary) -> Table:
    """One row for each policy: job completion times, queue, busy share of the GPUs, speed-up."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(_COLUMNS[0], overflow="fold")
    failing = any(policy.figures["out_of_memory"] for policy in summary.policies)
    for name in (*_COLUMNS[1:], *_FAILURES * failing):
        table.add_column(name, justify="right", no_wrap=True)
    for policy in summary.policies:
        failures = (units.count(policy.figures["out_of_memory"]),) * failing
        table.add_row(*row_of(summary, policy), *failures)
    return table


def row_of(summary: TraceSummary, policy: PolicySummary) -> tuple[str, ...]:
    """The cells of one policy, in human units."""
    figures = policy.figures
    times = (figures[name] for name in ("avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s"))
    return (
        policy.label,
        *(units.duration(time_s) for time_s in times),
        units.count(figures["queue_length_mean"]),
        units.percent(figures["utilization"]["gpu"]),
        units.ratio(summary.speedup(policy)),
    )


def _headline(summary: TraceSummary) -> str:
    run = summary.policies[0].outcomes[0].run
    cluster, jobs = run.cluster, summary.policies[0].figures["jobs"]
    parts = [
        f"{summary.name}: {jobs:,} jobs",
        f"{cluster.node_count} × {cluster.gpus_per_node} GPUs",
        f"model {run.settings.model}",
    ]
    if len(summary.policies[0].outcomes) > 1:
        parts.append(f"mean of {len(summary.policies[0].outcomes)} seeds")
    if summary.skipped_rows:
        parts.append(f"{summary.skipped_rows} bad rows skipped")
    return ", ".join(parts)
