"""Alibaba's PAI trace of 2020: `pai_task_table` joined with `pai_job_table` by the job's name (docs/traces.md)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from muri.simulator.traces.formats import Format, LeftOut, Logged, LoggedJob, Reading
from muri.simulator.traces.logs import NEVER_RAN, NO_GPUS, NOT_ENDED
from muri.simulator.traces.problems import RowError, TraceError
from muri.simulator.traces.source import Source, open_source
from muri.simulator.traces.tables import Row, read_rows

TASK_FILE = "pai_task_table.csv"
JOB_FILE = "pai_job_table.csv"
TASK_COLUMNS = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
JOB_COLUMNS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
"""Columns in the published files' order; these have no header."""

_STATUSES = frozenset({"Terminated", "Failed", "Running", "Waiting"})
_PERCENT = 100.0


class _Submission(NamedTuple):
    """What the job table knows of a job."""

    submit_s: float | None
    user: str


@dataclass
class _Job:
    """What the task table knows of a job: amounts of all of its tasks, times of those with GPUs."""

    name: str
    gpu_count: float = 0.0
    cpu_count: float = 0.0
    mem_gib: float = 0.0
    start_s: float = math.inf
    end_s: float = -math.inf
    ended: bool = True
    error: RowError | None = None

    def add(self, row: Row) -> None:
        """Add a task: its amounts are those of one instance, GPUs and CPUs in percent."""
        instances = row.count("inst_num")
        gpu_count = (row.optional_number("plan_gpu") or 0.0) / _PERCENT * instances
        self.gpu_count += gpu_count
        self.cpu_count += (row.optional_number("plan_cpu") or 0.0) / _PERCENT * instances
        self.mem_gib += (row.optional_number("plan_mem") or 0.0) * instances
        if gpu_count:
            self._add_times(row.optional_number("start_time"), row.optional_number("end_time"))

    def _add_times(self, start_s: float | None, end_s: float | None) -> None:
        if start_s is None or end_s is None:
            self.ended = False
            return
        if end_s < start_s:
            raise RowError("end_time", f"{end_s:g} is before the task's start_time, {start_s:g}")
        self.start_s, self.end_s = min(self.start_s, start_s), max(self.end_s, end_s)

    def logged(self, submissions: dict[str, _Submission]) -> LoggedJob:
        """The job with its submission.

        Raises:
            RowError: The job table does not know it, or one of its tasks is bad.
            LeftOut: It is no GPU job that ran to its end.
        """
        if self.error is not None:
            raise self.error
        if not self.gpu_count:
            raise LeftOut(NO_GPUS)
        if not self.ended:
            raise LeftOut(NOT_ENDED)
        if self.end_s <= self.start_s:
            raise LeftOut(NEVER_RAN)
        submission = submissions.get(self.name)
        if submission is None:
            raise RowError("job_name", f"{self.name} is not in {JOB_FILE}")
        submit_s = self.start_s if submission.submit_s is None else submission.submit_s
        return LoggedJob(
            job_id=self.name,
            submit_s=submit_s,
            # percentages such as 33 % of three instances may add up to a hair more than a whole GPU
            gpu_count=math.ceil(round(self.gpu_count, 6)),
            run_s=self.end_s - self.start_s,
            user=submission.user,
            rerun_key=self.name,
            cpu_count=self.cpu_count or None,
            mem_gib=self.mem_gib or None,
        )


def _table(source: Source, columns: tuple[str, ...]) -> Iterator[tuple[int, Row | RowError]]:
    has_header = bool(source.head) and source.head[0].startswith(columns[0])
    return read_rows(source.name, source.lines(), columns, header=None if has_header else columns)


def _submissions(path: Path, reading: Reading) -> dict[str, _Submission]:
    """The job table beside the task table, held in memory."""
    job_path = path.with_name(JOB_FILE)
    if path == Path("-") or not job_path.exists():
        where = "the standard input" if path == Path("-") else str(path)
        raise TraceError(
            f"{where}: {JOB_FILE} must lie beside it: it holds the times of submission and the users\n"
            f"  Unpack both tables into one folder and give the folder, or the task table in it."
        )
    submissions: dict[str, _Submission] = {}
    with open_source(job_path) as source:
        for line, row in _table(source, JOB_COLUMNS):
            try:
                if isinstance(row, RowError):
                    raise row
                submission = _Submission(row.optional_number("start_time"), row.text("user", "user"))
                submissions[row.text("job_name")] = submission
            except RowError as error:
                reading.bad_rows.add(source.name, line, error)
    return submissions


def _read(reading: Reading) -> Logged:
    submissions = _submissions(reading.source.path, reading)
    jobs: dict[str, tuple[int, _Job]] = {}
    for line, row in _table(reading.source, TASK_COLUMNS):
        if isinstance(row, RowError):
            reading.bad(line, row)
            continue
        name = row.text("job_name")
        _, job = jobs.setdefault(name, (line, _Job(name)))
        try:
            job.add(row)
        except RowError as error:  # without one of its tasks the job would be another one
            job.error = job.error or error
            jobs[name] = (line, job)
    yield from reading.parse(jobs.values(), lambda job: job.logged(submissions))


def _looks_like(head: tuple[str, ...]) -> bool:
    cells = [cell.strip() for cell in head[0].split(",")]
    return cells[: len(TASK_COLUMNS)] == list(TASK_COLUMNS) or (
        len(cells) == len(TASK_COLUMNS) and cells[TASK_COLUMNS.index("status")] in _STATUSES
    )


FORMAT = Format(
    name="pai",
    summary="Alibaba PAI 2020: a folder with pai_task_table.csv, pai_job_table.csv",
    looks_like=_looks_like,
    read_log=_read,
)
