"""The figures of a simulation, their means over the seeds by trace and policy, and how they are written for people."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from muri.policies.speed import Floats
from muri.profiler.records import RESOURCES
from muri.simulator.model import JobRecord, Run, Sample, SimulationError, SimulationResult, TraceJob
from muri.text import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_Name = TypeVar("_Name", int, str)
_STEPS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """Figures of some of the jobs."""

    jobs: int
    avg_jct_s: float  # Mean job completion time, from submission to end
    median_jct_s: float  # Median of it
    p99_jct_s: float  # The one at index ⌊0.99 n⌋ of n in ascending order
    queueing_delay_s: float  # Mean of the seconds between submission and end without GPUs


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of a simulation, or of its steady state.

    Means over time go from the first submission to the last end; of a steady state, from the submission of
    its first job to that of its last.
    """

    jobs: int  # How many jobs count
    avg_jct_s: float  # Mean job completion time (JCT), from submission to end
    median_jct_s: float  # Median JCT
    p99_jct_s: float  # The JCT at index ⌊0.99 n⌋ of n in ascending order
    makespan_s: float  # From the first submission to the last end
    queueing_delay_s: float  # Mean of the seconds between submission and end without GPUs
    queue_length_mean: float  # Waiting jobs, mean over time
    # Mean over waiting jobs of time waited / remaining time (Muri, section 6.1), mean over time; 0 while no job waits
    blocking_index_mean: float
    utilization: dict[str, float]  # Share of the cluster's storage, CPU, GPU and network that is busy, mean over time
    gpus_held_share: float  # Share of the GPUs that jobs hold, mean over time
    # Mean ρ: JCT over the time that the job would have taken with an equal share of the cluster, which is its service
    # alone × the mean over its stay of max(1, GPUs asked for by all jobs in the system / GPUs of the cluster). Above 1
    # the job was worse off. After Themis (NSDI 2020, section 3.1)
    finish_time_fairness_mean: float
    finish_time_fairness_max: float  # Largest ρ
    by_gpu_count: dict[int, JobMetrics]  # Figures by GPU count
    by_bottleneck: dict[str, JobMetrics]  # Figures by the resource that an iteration holds longest
    restarts: int  # Starts after the first, moves and regroupings, of all jobs that count
    out_of_memory: int  # Failures because GPU memory was short, of all jobs that count
    wall_s: float  # Wall-clock seconds of the simulation
    decisions: int  # Plans that were made
    decision_mean_s: float  # Mean wall-clock seconds of a plan
    decision_p99_s: float  # The time of a plan at index ⌊0.99 n⌋

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON, whose object names are strings."""
        plain = asdict(self)
        plain["by_gpu_count"] = {str(count): figures for count, figures in plain["by_gpu_count"].items()}
        return plain


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run."""

    run: Run
    result: SimulationResult
    metrics: Metrics


def metrics_of(result: SimulationResult, first: int | None = None, last: int | None = None) -> Metrics:
    """The figures of a simulation.

    Args:
        result: The simulation.
        first: Index, in order of submission, of the first job that counts; None: 0.
        last: Index behind the last job that counts; None: their number.

    Raises:
        SimulationError: There are no such jobs.
    """
    every = sorted(result.records, key=lambda record: (record.job.submit_s, record.job.job_id))
    first, last = _bounds(len(every), first, last)
    records = every[first:last]
    begin_s, end_s = records[0].job.submit_s, max(record.end_s for record in records)
    steady = (first, last) != (0, len(every))
    over_time = _mean_sample(result.samples, begin_s, records[-1].job.submit_s if steady else end_s)
    rho = _fairness(every, result.unfinished, result.cluster.gpu_count)[first:last]
    return Metrics(
        **asdict(job_metrics(records)),
        makespan_s=end_s - begin_s,
        queue_length_mean=over_time.pending,
        blocking_index_mean=over_time.blocking_index,
        utilization=dict(zip(RESOURCES, over_time.utilization, strict=True)),
        gpus_held_share=over_time.gpus_held / result.cluster.gpu_count,
        finish_time_fairness_mean=float(rho.mean()),
        finish_time_fairness_max=float(rho.max()),
        by_gpu_count=_by(records, lambda record: record.job.gpu_count),
        by_bottleneck=_by(records, lambda record: record.job.profile.bottleneck),
        restarts=sum(record.restarts for record in records),
        out_of_memory=sum(record.out_of_memory for record in records),
        wall_s=result.wall_s,
        decisions=len(result.decision_s),
        decision_mean_s=fmean(result.decision_s) if result.decision_s else 0.0,
        decision_p99_s=percentile_99(result.decision_s),
    )


def job_metrics(records: Sequence[JobRecord]) -> JobMetrics:
    """Figures of some jobs, at least one."""
    jct_s = [record.jct_s for record in records]
    delay_s = fmean(max(0.0, record.jct_s - record.run_s) for record in records)
    return JobMetrics(len(records), fmean(jct_s), median(jct_s), percentile_99(jct_s), delay_s)


def percentile_99(values: Sequence[float]) -> float:
    """The value at index ⌊0.99 n⌋ of n in ascending order, as Muri's published figures have it; 0 of none."""
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


def _bounds(count: int, first: int | None, last: int | None) -> tuple[int, int]:
    begin, end = 0 if first is None else first, count if last is None else last
    if not 0 <= begin < end <= count:
        raise SimulationError(
            f"steady state is jobs {begin}:{end}, but the trace has {count}; valid are FIRST:LAST with "
            f"0 ≤ FIRST < LAST ≤ {count}"
        )
    return begin, end


def _by(records: Iterable[JobRecord], key: Callable[[JobRecord], _Name]) -> dict[_Name, JobMetrics]:
    groups: dict[_Name, list[JobRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return {name: job_metrics(groups[name]) for name in sorted(groups)}


def _mean_sample(samples: Iterable[Sample], begin_s: float, end_s: float) -> Sample:
    """Means over an interval, each sample weighted by its part in the interval."""
    weights, inside = [], []
    for sample in samples:
        weight = min(end_s, sample.start_s + sample.length_s) - max(begin_s, sample.start_s)
        if weight > 0:
            weights.append(weight)
            inside.append(sample)
    total_s = math.fsum(weights)
    if not inside:
        return Sample(begin_s, 0.0, 0, 0.0, 0, (0.0, 0.0, 0.0, 0.0))

    def mean(of: Callable[[Sample], float]) -> float:
        return math.fsum(weight * of(sample) for weight, sample in zip(weights, inside, strict=True)) / total_s

    return Sample(
        start_s=begin_s,
        length_s=total_s,
        pending=mean(lambda sample: sample.pending),
        blocking_index=mean(lambda sample: sample.blocking_index),
        gpus_held=mean(lambda sample: sample.gpus_held),
        utilization=(
            mean(lambda sample: sample.utilization[0]),
            mean(lambda sample: sample.utilization[1]),
            mean(lambda sample: sample.utilization[2]),
            mean(lambda sample: sample.utilization[3]),
        ),
    )


def _fairness(records: Sequence[JobRecord], unfinished: Iterable[TraceJob], gpu_count: int) -> Floats:
    """ρ of each job that has ended, given all jobs of the trace."""
    moments: dict[float, int] = {}
    for job in unfinished:
        moments[job.submit_s] = moments.get(job.submit_s, 0) + job.gpu_count
    for record in records:
        moments[record.job.submit_s] = moments.get(record.job.submit_s, 0) + record.job.gpu_count
        moments[record.end_s] = moments.get(record.end_s, 0) - record.job.gpu_count
    times = np.array(sorted(moments))
    demand = np.array(list(accumulate(moments[time_s] for time_s in times.tolist())), dtype=np.float64)
    # More demand than the cluster has slows an equal share down; less demand does not speed it up.
    contention = np.maximum(1.0, demand / gpu_count)
    passed = np.concatenate(([0.0], np.cumsum(contention[:-1] * np.diff(times))))
    submit_s = np.array([record.job.submit_s for record in records])
    end_s = np.array([record.end_s for record in records])
    jct_s = end_s - submit_s
    mean = (np.interp(end_s, times, passed) - np.interp(submit_s, times, passed)) / jct_s
    service_s = np.array([record.job.service_s for record in records])
    return np.asarray(jct_s / (service_s * mean), dtype=np.float64)


def duration(seconds: float | None) -> str:
    """Seconds in the largest unit that leaves at least 1: "3.2 d", "12.4 h", "45 min", "8 s"."""
    if seconds is None:
        return "-"
    for size_s, unit in _STEPS:
        if abs(seconds) >= size_s:
            return f"{_short(seconds / size_s)} {unit}"
    return f"{_short(seconds)} s"


def count(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    return "-" if value is None else _short(value)


def percent(share: float | None) -> str:
    """A share as whole per cents."""
    return "-" if share is None else f"{share:.0%}"


def ratio(value: float | None) -> str:
    """A factor: "2.03×"."""
    return "-" if value is None else f"{value:.2f}×"


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")


_COLUMNS: Final = ("POLICY", "AVG JCT", "MEDIAN", "P99", "MAKESPAN", "QUEUE", "GPU", "SPEED-UP")


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


def summarize(outcomes: Sequence[Outcome]) -> tuple[TraceSummary, ...]:
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


def print_tables(summaries: Sequence[TraceSummary], console: "Console") -> None:
    """Print one table for each trace."""
    for position, summary in enumerate(summaries):
        if position:
            console.print()
        console.print(_headline(summary))
        console.print(table_of(summary))


def table_of(summary: TraceSummary) -> "Table":
    """One row for each policy: job completion times, queue, busy share of the GPUs, speed-up."""
    from rich.table import Table  # a worker of a simulation prints none

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(_COLUMNS[0], overflow="fold")
    failing = any(policy.figures["out_of_memory"] for policy in summary.policies)
    for name in (*_COLUMNS[1:], *["OOM"] * failing):
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
