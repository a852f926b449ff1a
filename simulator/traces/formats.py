"""What the reader knows of a trace format, and how a job of a cluster's log gets a profile."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import groupby
from typing import TypeVar

from muri.profiler.records import StageProfile
from muri.simulator.model import TraceJob
from muri.simulator.traces.models import Model, measured_models
from muri.simulator.traces.rows import MAX_COUNT, BadRows, Row, RowError, Source, TraceError, read_rows, to_number

NOT_ENDED = "had not ended"
NEVER_RAN = "never ran"

NO_GPUS = "had no GPUs"
"""Why a row of a log is left out."""

UNKNOWN_TIMES = frozenset({"", "None", "Unknown", "N/A", "nan", "NaN", "null"})
"""How logs write that a time is missing."""

Entry = TypeVar("Entry")
Job = TypeVar("Job")


class LeftOutError(Exception):
    """A row is left out because it is not a GPU job that ran to its end; the text is the reason."""


@dataclass
class Reading:
    """One reading of one trace: its source, bad rows and rows left out."""

    source: Source  # Where the rows come from
    bad_rows: BadRows  # Where bad rows go
    # Valid rows of jobs without GPUs or without an end, counted by reason
    left_out: dict[str, int] = field(default_factory=dict)

    def parse(
        self, entries: Iterable[tuple[int, Entry | RowError]], to_job: Callable[[Entry], Job]
    ) -> Iterator[tuple[int, Job]]:
        """Turn entries into jobs; count bad entries and those left out."""
        for line, entry in entries:
            try:
                if isinstance(entry, RowError):
                    raise entry
                job = to_job(entry)
            except RowError as error:
                self.bad(line, error)
            except LeftOutError as reason:
                self.left_out[str(reason)] = self.left_out.get(str(reason), 0) + 1
            else:
                yield line, job

    def bad(self, line: int, error: RowError) -> None:
        """Note a bad row."""
        self.bad_rows.add(self.source.name, line, error)


def read_table(
    reading: Reading, required: Iterable[str], to_job: Callable[[Row], Job], delimiter: str = ","
) -> Iterator[tuple[int, Job]]:
    """The jobs of a table with a header and one row per job (TraceError: the header is not as required)."""
    rows = read_rows(reading.source.name, reading.source.lines(), required, delimiter=delimiter)
    yield from reading.parse(rows, to_job)


def header_of(head: tuple[str, ...], delimiter: str = ",") -> set[str]:
    """The column names of a table, for `looks_like`."""
    return {cell.strip().strip('"') for cell in head[0].split(delimiter)} if head else set()


@dataclass(frozen=True, slots=True)
class LoggedJob:
    """A job in a cluster's log, which says how long it ran but not its model."""

    job_id: str  # Its id, unique in the log
    submit_s: float  # Seconds since any fixed time
    gpu_count: int  # GPUs of the whole job
    run_s: float  # Seconds that it ran
    user: str  # Owner
    rerun_key: str  # Equal for reruns of one experiment, as far as the log knows
    cpu_count: float | None = None  # CPUs asked for, None when not logged
    mem_gib: float | None = None  # Host memory asked for, None when not logged
    job_name: str = ""  # Its name, empty when not logged


Found = Iterator[tuple[int, TraceJob]]
"""Lines and jobs of a trace that knows stage times or models."""

Logged = Iterator[tuple[int, LoggedJob]]
"""Lines and jobs of a cluster's log."""


@dataclass(frozen=True)
class Format:
    """One trace format; it has either `read` or `read_log`."""

    name: str  # Name for `--from`
    summary: str  # One line for `--help`
    looks_like: Callable[[tuple[str, ...]], bool]  # Whether a file's first lines look like it
    read: Callable[[Reading], Found] | None = None  # Reads jobs with profiles
    read_log: Callable[[Reading], Logged] | None = None  # Reads jobs of a log, which get profiles afterwards


@dataclass(frozen=True)
class Assignment:
    """Gives jobs profiles.

    A job named like a model trains that model. For others each model is equally likely. The choice depends only on the
    seed and the job's key, so jobs with the same key (reruns of one experiment) train the same model, and no job's
    model depends on other rows.
    """

    models: Sequence[Model]  # What jobs may train
    seed: int = 0  # Another seed is another assignment
    _made: dict[tuple[int, int], StageProfile] = field(default_factory=dict)

    def profile(self, key: str, gpu_count: int, job_name: str = "") -> StageProfile:
        """The profile of one job."""
        named = [number for number, model in enumerate(self.models) if model.name == job_name]
        choices = named or range(len(self.models))
        number = choices[self._hash(key) % len(choices)]
        made = self._made.get((number, gpu_count))
        if made is None:  # one record for all jobs that share it
            made = self._made[number, gpu_count] = self.models[number].profile(gpu_count)
        return made

    def _hash(self, key: str) -> int:
        text = f"{self.seed}\0{key}".encode(errors="surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def assignment_of(profiles: Iterable[StageProfile] | None, seed: int) -> Assignment:
    """An assignment among given profiles (TraceError: there are no profiles)."""
    models = measured_models() if profiles is None else _models_of(profiles)
    if not models:
        raise TraceError("there are no profiles to assign; `muri profile list` shows what the store has")
    return Assignment(models, seed)


def _models_of(profiles: Iterable[StageProfile]) -> tuple[Model, ...]:
    """Models by name, batch size and GPU type, with the stages of each GPU count."""

    def kind(profile: StageProfile) -> tuple[str, int, str]:
        return profile.key.model, profile.key.batch_size, profile.key.gpu_type

    given = (
        StageProfile(replace(item.key, user=""), *item.stage_s, item.iteration_s, item.gpu_mem_gib, source="import")
        for item in profiles
    )
    ordered = sorted(given, key=lambda profile: (*kind(profile), profile.key.gpu_count))
    return tuple(Model(tuple(items)) for _, items in groupby(ordered, key=kind))


def to_trace_jobs(logged: Sequence[LoggedJob], assignment: Assignment) -> list[TraceJob]:
    """Give each job of a log a profile and a number.

    Ids that are numbers stay; otherwise jobs are numbered from 0 by submit time, ties in the log's order.
    Iterations are the time run over the profile's iteration time, at least one.
    """
    keep_ids = all(_is_number(job.job_id) for job in logged)
    ordered = sorted(logged, key=lambda job: (job.submit_s, int(job.job_id) if keep_ids else 0))
    first_s = ordered[0].submit_s if ordered else 0.0
    return [
        _trace_job(job, int(job.job_id) if keep_ids else number, first_s, assignment)
        for number, job in enumerate(ordered)
    ]


def _is_number(job_id: str) -> bool:
    digits = job_id.isascii() and job_id.isdigit() and len(job_id) <= len(str(MAX_COUNT))
    return digits and int(job_id) <= MAX_COUNT and str(int(job_id)) == job_id


def _trace_job(job: LoggedJob, number: int, first_s: float, assignment: Assignment) -> TraceJob:
    profile = assignment.profile(job.rerun_key, job.gpu_count, job.job_name)
    return TraceJob(
        job_id=number,
        submit_s=job.submit_s - first_s,
        gpu_count=job.gpu_count,
        iterations=max(1, round(job.run_s / profile.iteration_s)),
        profile=profile,
        user=job.user or "user",
        listed_duration_s=job.run_s,
        cpu_count=job.cpu_count,
        mem_gib=job.mem_gib,
    )


def to_time(column: str, text: str) -> float | None:
    """Seconds since the epoch of a time in a log; None: the log has no time there.

    Times without a zone count as UTC, because only differences matter.

    Raises:
        RowError: It is not a time.
    """
    text = text.strip()
    if text in UNKNOWN_TIMES:
        return None
    if text.isascii() and text.isdigit():
        return to_number(column, text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RowError(column, f"{text!r} is not a time such as 2026-01-31 12:00:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
