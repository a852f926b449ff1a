"""Reading a trace of any known format, its figures, and the tables that show them on a terminal of 80 columns."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from muri.profiler.records import RESOURCES, StageProfile
from muri.simulator.model import Trace, TraceJob
from muri.simulator.traces.formats import Assignment, Format, Reading, assignment_of, to_trace_jobs
from muri.simulator.traces.log_formats import HELIOS, PAI, PHILLY, SACCT, TASK_FILE
from muri.simulator.traces.rows import BadRows, RowError, Source, TraceError, open_source, separator_hint
from muri.simulator.traces.schema import MURI, MURI_PAPER, REQUIRED, SYNERGY
from muri.text import counted, nearest

if TYPE_CHECKING:
    from rich.console import Console

Job = TypeVar("Job")

FORMATS = {item.name: item for item in (MURI, MURI_PAPER, SYNERGY, PHILLY, HELIOS, PAI, SACCT)}
"""All formats by name."""


class TraceReading(NamedTuple):
    """A trace, its format, and the rows of its file that were left out."""

    trace: Trace
    format: str
    left_out: dict[str, int]
    """Rows of jobs without GPUs or without an end, counted by reason."""


def read_trace(path: Path, format_name: str | None = None, *, skip_bad_rows: bool = False) -> Trace:
    """Read a trace; see `read_with_notes`."""
    return read_with_notes(path, format_name, skip_bad_rows=skip_bad_rows).trace


def read_with_notes(
    path: Path,
    format_name: str | None = None,
    *,
    skip_bad_rows: bool = False,
    seed: int = 0,
    profiles: Sequence[StageProfile] | None = None,
) -> TraceReading:
    """Read a trace, and tell its format and the rows left out.

    Args:
        path: The file; "-" reads the standard input.
        format_name: One of `FORMATS`; None: guessed from the content.
        skip_bad_rows: Whether invalid rows are left out and counted; otherwise they are an error.
        seed: For the assignment of stage profiles to jobs whose trace has no stage times.
        profiles: The assigned profiles; None: the profiles of the Muri paper's eight models.

    Raises:
        TraceError: The file cannot be read, is of another format, or has bad rows.
    """
    wanted = None if format_name is None else find_format(format_name)
    assignment = assignment_of(profiles, seed)
    with open_source(_file_of(path)) as source:
        chosen = _checked(source, wanted)
        reading = Reading(source, BadRows(skip_bad_rows))
        jobs = _jobs(chosen, reading, assignment)
        reading.bad_rows.finish(source.name, len(jobs))
    if not jobs:
        raise TraceError(f"{source.name}: no jobs to simulate{_reasons(reading.left_out)}")
    trace = Trace(source.trace_name, tuple(jobs), reading.bad_rows.count)
    return TraceReading(trace, chosen.name, reading.left_out)


def _file_of(path: Path) -> Path:
    """The file to look at first: a folder is PAI's tables."""
    if not path.is_dir():
        return path
    if not (path / TASK_FILE).exists():
        raise TraceError(f"{path} is a folder without {TASK_FILE}; give a file, or a folder with PAI's tables")
    return path / TASK_FILE


def _jobs(chosen: Format, reading: Reading, assignment: Assignment) -> list[TraceJob]:
    if chosen.read_log is not None:
        logged = _unique(reading, chosen.read_log(reading), lambda job: job.job_id)
        return to_trace_jobs(list(logged), assignment)
    if chosen.read is None:
        raise TypeError(f"the format {chosen.name} has no reader")
    found = _unique(reading, chosen.read(reading), lambda job: job.job_id)
    return sorted(found, key=lambda job: (job.submit_s, job.job_id))


def find_format(name: str) -> Format:
    """The format of a name (TraceError: there is none of that name)."""
    if name not in FORMATS:
        near = nearest(name, FORMATS)
        hint = f" (is it {near[0]}?)" if near else ""
        raise TraceError(f"unknown trace format {name!r}{hint}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _checked(source: Source, wanted: Format | None) -> Format:
    """The format to read it with: the wanted one, unless the content clearly has another."""
    if not source.head:
        raise TraceError(f"{source.name}: the file is empty")
    likely = [item for item in FORMATS.values() if item.looks_like(source.head)]
    if wanted is None:
        if not likely:
            raise TraceError(
                f"{source.name}:1: not a trace of a known format; name its format with --from, "
                f"one of {', '.join(FORMATS)}\n  the file starts with: {source.head[0].strip()[:60]}"
                f"{separator_hint(source.head[0].strip())}\n"
                f"  a table of your own needs the columns {', '.join(REQUIRED)} (docs/traces.md)"
            )
        return likely[0]
    if likely and wanted not in likely:
        raise TraceError(
            f"{source.name}:1: not a trace of format {wanted.name}; it looks like {', '.join(i.name for i in likely)}: "
            f"try --from {likely[0].name}"
        )
    return wanted


def _unique(reading: Reading, jobs: Iterable[tuple[int, Job]], id_of: Callable[[Job], Hashable]) -> Iterator[Job]:
    """The jobs without those that repeat an id, which count as bad rows."""
    seen: dict[Hashable, int] = {}
    for line, job in jobs:
        job_id = id_of(job)
        if job_id in seen:
            reading.bad(line, RowError("job_id", f"{job_id} is also the id of the job in line {seen[job_id]}"))
        else:
            seen[job_id] = line
            yield job


def _reasons(left_out: dict[str, int]) -> str:
    return "".join(f"; {count} {reason}" for reason, count in sorted(left_out.items()))


QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Which quantiles of the durations are shown."""

_DAY_S, _HOUR_S, _MINUTE_S = 86_400.0, 3600.0, 60.0
_LEAST_SHOWN = 2.0


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a trace's jobs."""

    jobs: int
    gpu_s: float  # GPU-seconds that they need, running alone


@dataclass(frozen=True, slots=True)
class Overview:
    """A trace in figures."""

    name: str
    jobs: int
    users: int
    models: int
    skipped_rows: int  # Bad rows that were left out
    span_s: float  # From the first submission to the last
    gpu_s: float  # GPU-seconds that all jobs need, running alone
    gpus_busy_mean: float | None  # GPUs kept busy: GPU-seconds over the span; None: all jobs come at once
    opportunistic: int  # Jobs that only use what others leave over
    by_gpu_count: dict[int, Share]  # By GPUs of a job
    by_bottleneck: dict[str, Share]  # By the resource that an iteration holds longest
    duration_s: dict[float, float]  # Quantiles of the time that a job runs alone

    def load(self, gpus: int) -> float | None:
        """Load of a cluster with this many GPUs; None: all jobs come at once."""
        return None if self.gpus_busy_mean is None else self.gpus_busy_mean / gpus

    def as_json(self, gpus: int | None = None) -> dict[str, Any]:
        """As a JSON object, with the load of a cluster of this many GPUs."""
        document = asdict(self)
        if gpus is not None:
            document |= {"gpus": gpus, "load": self.load(gpus)}
        document["by_gpu_count"] = {str(count): asdict(share) for count, share in self.by_gpu_count.items()}
        document["duration_s"] = {f"p{100 * share:g}": value for share, value in self.duration_s.items()}
        return document


def overview_of(trace: Trace) -> Overview:
    """A trace in figures; it has at least one job."""
    jobs = trace.jobs
    span_s = jobs[-1].submit_s - jobs[0].submit_s
    work = [job.gpu_count * job.service_s for job in jobs]
    gpu_s = sum(work)
    by_gpu_count = _shares([job.gpu_count for job in jobs], work)
    by_bottleneck = _shares([job.profile.bottleneck for job in jobs], work)
    durations = sorted(job.service_s for job in jobs)
    return Overview(
        name=trace.name,
        jobs=len(jobs),
        users=len({job.user for job in jobs}),
        models=len({job.key.model for job in jobs}),
        skipped_rows=trace.skipped_rows,
        span_s=span_s,
        gpu_s=gpu_s,
        gpus_busy_mean=gpu_s / span_s if span_s else None,
        opportunistic=sum(job.opportunistic for job in jobs),
        by_gpu_count=dict(sorted(by_gpu_count.items())),
        by_bottleneck={name: by_bottleneck[name] for name in RESOURCES if name in by_bottleneck},
        duration_s={share: durations[min(len(durations) - 1, int(share * len(durations)))] for share in QUANTILES},
    )


def _shares(kinds: list[Any], work: list[float]) -> dict[Any, Share]:
    jobs: Counter[Any] = Counter(kinds)
    gpu_s = dict.fromkeys(kinds, 0.0)
    for kind, amount in zip(kinds, work, strict=True):
        gpu_s[kind] += amount
    return {kind: Share(jobs[kind], gpu_s[kind]) for kind in jobs}


def duration(seconds: float) -> str:
    """A time in its largest unit of which it has at least two."""
    for unit_s, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= _LEAST_SHOWN * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"


def print_overview(console: "Console", overview: Overview, gpus: int | None) -> None:
    """Print a trace's figures."""
    from rich.table import Table  # reading a trace needs none

    table = Table(show_header=False, title=f"Trace {overview.name}", title_justify="left", box=None, pad_edge=False)
    table.add_row("Jobs", f"{overview.jobs:,} of {overview.users} users, {overview.models} models")
    if overview.skipped_rows:
        table.add_row("Left out", counted(overview.skipped_rows, "bad row"))
    table.add_row("Opportunistic", f"{overview.opportunistic / overview.jobs:.1%} of the jobs")
    table.add_row("Submitted within", duration(overview.span_s))
    table.add_row("Work", f"{overview.gpu_s / _HOUR_S:,.1f} GPU-hours, every job running alone")
    busy = overview.gpus_busy_mean
    table.add_row("Keeps busy", "all jobs come at once" if busy is None else f"{busy:,.1f} GPUs on average")
    load = None if gpus is None else overview.load(gpus)
    if load is not None:
        table.add_row(f"Load of {gpus} GPUs", f"{load:.2f}")
    console.print(table)
    parts: dict[str, Mapping[Any, Share]] = {
        "GPUs of a job": overview.by_gpu_count,
        "Bottleneck": overview.by_bottleneck,
    }
    for title, shares in parts.items():
        table = Table()
        table.add_column(title)
        for heading in ("Jobs", "of jobs", "of GPU time"):
            table.add_column(heading, justify="right")
        for name, share in shares.items():
            of_time = share.gpu_s / overview.gpu_s
            table.add_row(str(name), f"{share.jobs:,}", f"{share.jobs / overview.jobs:.1%}", f"{of_time:.1%}")
        console.print(table)
    table = Table()
    table.add_column("Jobs running alone")
    table.add_column("take", justify="right")
    names = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    for quantile, value in overview.duration_s.items():
        table.add_row(names.get(quantile, f"{100 * quantile:g} % take at most"), duration(value))
    console.print(table)
