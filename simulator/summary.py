"""Outcomes of a sweep by trace and policy, averaged over the seeds; as JSON and as tables on the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from muri.simulator.metrics import count, duration, percent, ratio
from muri.simulator.run import Outcome
from muri.text import counted

_COLUMNS: Final = ("POLICY", "AVG JCT", "MEDIAN", "P99", "MAKESPAN", "QUEUE", "GPU", "SPEED-UP")

_FAILURES: Final = ("OOM",)
"""Shown only if a job ran out of GPU memory."""


@dataclass(frozen=True)
class PolicySummary:
    """One policy on one trace."""

    label: str  # Its name in tables
    outcomes: tuple[Outcome, ...]  # One for each seed

    @cached_property
    def figures(self) -> Mapping[str, Any]:
        """The metrics by name, each the mean over the seeds."""
        means: Mapping[str, Any] = _mean([outcome.metrics.as_json() for outcome in self.outcomes])
        return means

    def as_json(self) -> dict[str, Any]:
        """The figures; with several seeds also those of each seed."""
        document = dict(self.figures)
        if len(self.outcomes) > 1:
            document["seeds"] = {str(one.run.settings.seed): one.metrics.as_json() for one in self.outcomes}
        return document


@dataclass(frozen=True)
class TraceSummary:
    """All policies on one trace."""

    name: str  # The trace's name
    skipped_rows: int  # Bad rows that were left out when it was read
    policies: tuple[PolicySummary, ...]  # In the order of the request; the first is the base of comparisons

    def speedup(self, policy: PolicySummary) -> float | None:
        """Average JCT of the first policy over that of this one; None without jobs."""
        base, own = self.policies[0].figures["avg_jct_s"], policy.figures["avg_jct_s"]
        return base / own if own else None

    def as_json(self) -> dict[str, Any]:
        """The JSON of one trace."""
        policies = {policy.label: policy.as_json() for policy in self.policies}
        return {"policies": policies, "skipped_rows": self.skipped_rows}


def summarise(outcomes: Sequence[Outcome]) -> tuple[TraceSummary, ...]:
    """Sort outcomes by trace and policy, both in the order of their first appearance."""
    by_trace: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        by_trace.setdefault(outcome.run.trace.name, {}).setdefault(outcome.run.label, []).append(outcome)
    return tuple(
        TraceSummary(
            name,
            next(iter(by_label.values()))[0].run.trace.skipped_rows,
            tuple(PolicySummary(label, tuple(found)) for label, found in by_label.items()),
        )
        for name, by_label in by_trace.items()
    )


def document_of(summaries: Sequence[TraceSummary]) -> dict[str, Any]:
    """The JSON of all traces: that of the trace if there is one, by name if there are several."""
    if len(summaries) == 1:
        return summaries[0].as_json()
    return {"traces": {summary.name: summary.as_json() for summary in summaries}}


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, of mappings key by key; other values come from the first."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Mapping):
        shared = [key for key in first if all(key in value for value in values)]
        return {key: _mean([value[key] for value in values]) for key in shared}
    if isinstance(first, bool) or not all(isinstance(value, int | float) for value in values):
        return first
    mean = fmean(values)
    return int(mean) if isinstance(first, int) and mean.is_integer() else mean


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
        failures = (count(policy.figures["out_of_memory"]),) * failing
        table.add_row(*row_of(summary, policy), *failures)
    return table


def row_of(summary: TraceSummary, policy: PolicySummary) -> tuple[str, ...]:
    """The cells of one policy, in the units that people read."""
    figures = policy.figures
    times = (figures[name] for name in ("avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s"))
    return (
        policy.label,
        *(duration(time_s) for time_s in times),
        count(figures["queue_length_mean"]),
        percent(figures["utilization"]["gpu"]),
        ratio(summary.speedup(policy)),
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
        parts.append(f"{counted(summary.skipped_rows, 'bad row')} skipped")
    return ", ".join(parts)
