"""Logs of clusters, which state neither models nor stage times: Philly, Helios, PAI and sacct (docs/traces.md)."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from muri.simulator.traces.formats import (
    NEVER_RAN,
    NO_GPUS,
    NOT_ENDED,
    Format,
    LeftOutError,
    Logged,
    LoggedJob,
    Reading,
    header_of,
    read_table,
    to_time,
)
from muri.simulator.traces.rows import Row, RowError, Source, TraceError, open_source, read_rows, to_count, to_number

_BLANKS = re.compile(r"\s*")


def _read_philly(reading: Reading) -> Logged:
    return reading.parse(elements(reading.source.name, reading.source.text()), _philly_job)


def _philly_job(entry: Any) -> LoggedJob:
    if not isinstance(entry, dict):
        raise RowError("", "a job in { … } is expected")
    attempts = _list(entry, "attempts")
    submit_s = to_time("submitted_time", _text(entry, "submitted_time"))
    if submit_s is None:
        raise RowError("submitted_time", "is empty; give the time of submission")
    job_id, user = _text(entry, "jobid"), _text(entry, "user")
    if attempts and to_time("end_time", _time_text(attempts[-1], "end_time")) is None:
        raise LeftOutError(NOT_ENDED)
    run_s = sum(_run_s(attempt) for attempt in attempts)
    gpu_count = max((_gpus_of_attempt(attempt) for attempt in attempts), default=0)
    if run_s <= 0:
        raise LeftOutError(NEVER_RAN)
    if gpu_count == 0:
        raise LeftOutError(NO_GPUS)
    return LoggedJob(job_id, submit_s, gpu_count, run_s, user, rerun_key=job_id)


def _run_s(attempt: Any) -> float:
    """Seconds of one attempt; 0 where the log has lost one of its times."""
    start_s = to_time("start_time", _time_text(attempt, "start_time"))
    end_s = to_time("end_time", _time_text(attempt, "end_time"))
    if start_s is None or end_s is None:
        return 0.0
    if end_s < start_s:
        raise RowError("end_time", f"{attempt['end_time']} is before the attempt's start, {attempt['start_time']}")
    return end_s - start_s


def _gpus_of_attempt(attempt: dict[str, Any]) -> int:
    nodes = _list(attempt, "detail")
    return sum(len(_list(node, "gpus")) for node in nodes)


def _list(entry: Any, key: str) -> list[Any]:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, list):
        raise RowError(key, "a list is expected")
    return value


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise RowError(key, "is missing" if value is None else f"{value!r} is not a text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RowError(key, f"{value!r} holds half of a character, which no file can hold")
    return value


def _time_text(attempt: Any, key: str) -> str:
    if not isinstance(attempt, dict):
        raise RowError("attempts", "each attempt in { … } is expected")
    value = attempt.get(key)
    return "" if value is None else str(value)


def elements(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a JSON array, each with the line where it starts; `name` names the file in errors.

    Raises:
        TraceError: The text is not an array, or ends too early.
    """

    def after_blanks(at: int) -> int:
        match = _BLANKS.match(text, at)
        return match.end() if match else at

    def error(message: str, at: int) -> TraceError:
        return TraceError(f"{name}:{1 + text.count(chr(10), 0, at)}: not valid JSON: {message}")

    decoder, line, counted, at = json.JSONDecoder(), 1, 0, after_blanks(0)
    if text[at : at + 1] != "[":
        raise error("a list of jobs in [ … ] is expected", at)
    at = after_blanks(at + 1)
    if text[at : at + 1] == "]":
        return
    separator = ","
    while separator == ",":
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as fault:
            raise error(fault.msg, fault.pos) from fault
        except (RecursionError, ValueError) as fault:  # nested without end, or a number of thousands of digits
            raise error(f"this is not a job: {fault}", at) from fault
        yield line, value
        at = after_blanks(end)
        separator = text[at : at + 1]
        if separator not in {",", "]"}:
            raise error("the list ends too early" if not separator else f"{separator!r} where , or ] belongs", at)
        at = after_blanks(at + 1)


PHILLY = Format(
    name="philly",
    summary="Microsoft Philly, cluster_job_log (JSON)",
    looks_like=lambda head: head[0].lstrip()[:1] in {"[", "{"},
    read_log=_read_philly,
)

HELIOS_COLUMNS = ("job_id", "user", "gpu_num", "submit_time", "duration")
"""Columns that must be there; of the others `cpu_num` is used."""


def _helios_job(row: Row) -> LoggedJob:
    job_id = row.text("job_id").strip()
    if not job_id:
        raise RowError("job_id", "is empty")
    gpu_count = row.count("gpu_num")
    submit_s = to_time("submit_time", row.text("submit_time"))
    if submit_s is None:
        raise RowError("submit_time", "is empty; give the time of submission")
    began = row.text("duration").strip() or row.text("start_time").strip()
    run_s = row.number("duration") if began else 0.0  # cancelled while it waited
    if gpu_count == 0:
        raise LeftOutError(NO_GPUS)
    if run_s == 0:
        raise LeftOutError(NEVER_RAN)
    cpu_count = row.optional_number("cpu_num")
    return LoggedJob(job_id, submit_s, gpu_count, run_s, row.text("user"), rerun_key=job_id, cpu_count=cpu_count)


HELIOS = Format(
    name="helios",
    summary="SenseTime Helios, cluster_log.csv",
    looks_like=lambda head: {"gpu_num", "submit_time", "duration"} <= header_of(head),
    read_log=lambda reading: read_table(reading, HELIOS_COLUMNS, _helios_job),
)

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


class _PaiSubmission(NamedTuple):
    """A job in the job table."""

    submit_s: float | None
    user: str


@dataclass
class _PaiJob:
    """A job in the task table: amounts of all of its tasks, times of those with GPUs."""

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

    def logged(self, submissions: dict[str, _PaiSubmission]) -> LoggedJob:
        """The job with its submission.

        Raises:
            RowError: The job table does not know it, or one of its tasks is bad.
            LeftOutError: It is not a GPU job that ran to its end.
        """
        if self.error is not None:
            raise self.error
        if not self.gpu_count:
            raise LeftOutError(NO_GPUS)
        if not self.ended:
            raise LeftOutError(NOT_ENDED)
        if self.end_s <= self.start_s:
            raise LeftOutError(NEVER_RAN)
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


def _read_pai(reading: Reading) -> Logged:
    submissions = _pai_submissions(reading.source.path, reading)
    jobs: dict[str, tuple[int, _PaiJob]] = {}
    for line, row in _pai_table(reading.source, TASK_COLUMNS):
        if isinstance(row, RowError):
            reading.bad(line, row)
            continue
        name = row.text("job_name")
        _, job = jobs.setdefault(name, (line, _PaiJob(name)))
        try:
            job.add(row)
        except RowError as error:  # a job without one of its tasks would be a different job
            job.error = job.error or error
            jobs[name] = (line, job)
    yield from reading.parse(jobs.values(), lambda job: job.logged(submissions))


def _pai_table(source: Source, columns: tuple[str, ...]) -> Iterator[tuple[int, Row | RowError]]:
    has_header = bool(source.head) and source.head[0].startswith(columns[0])
    return read_rows(source.name, source.lines(), columns, header=None if has_header else columns)


def _pai_submissions(path: Path, reading: Reading) -> dict[str, _PaiSubmission]:
    """The job table beside the task table, held in memory."""
    job_path = path.with_name(JOB_FILE)
    if path == Path("-") or not job_path.exists():
        where = "the standard input" if path == Path("-") else str(path)
        raise TraceError(
            f"{where}: {JOB_FILE} must lie beside it: it holds the times of submission and the users\n"
            f"  Unpack both tables into one folder and give the folder, or the task table in it."
        )
    submissions: dict[str, _PaiSubmission] = {}
    with open_source(job_path) as source:
        for line, row in _pai_table(source, JOB_COLUMNS):
            try:
                if isinstance(row, RowError):
                    raise row
                submission = _PaiSubmission(row.optional_number("start_time"), row.text("user", "user"))
                submissions[row.text("job_name")] = submission
            except RowError as error:
                reading.bad_rows.add(source.name, line, error)
    return submissions


def _looks_like_pai(head: tuple[str, ...]) -> bool:
    cells = [cell.strip() for cell in head[0].split(",")]
    return cells[: len(TASK_COLUMNS)] == list(TASK_COLUMNS) or (
        len(cells) == len(TASK_COLUMNS) and cells[TASK_COLUMNS.index("status")] in _STATUSES
    )


PAI = Format(
    name="pai",
    summary="Alibaba PAI 2020: a folder with pai_task_table.csv, pai_job_table.csv",
    looks_like=_looks_like_pai,
    read_log=_read_pai,
)

SACCT_COLUMNS = ("JobIDRaw", "User", "State", "Submit", "ElapsedRaw", "ReqTRES", "AllocTRES", "JobName")
"""The columns of `SACCT_COMMAND`; a job's name may hold the separator, so it comes last."""

SACCT_COMMAND = (
    "SLURM_TIME_FORMAT=%s sacct --allusers --allocations --parsable2 \\\n"
    "  --starttime=now-30days --endtime=now \\\n"
    f"  --format={','.join(SACCT_COLUMNS)}"
)
"""The command whose output is read; seconds since the epoch are safe from clock changes."""

_SEPARATOR = "|"
_RUNNING_STATES = ("PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED", "COMPLETING")
_GIB_PER_UNIT = {"": 2.0**-10, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10, "P": 2.0**20}
_MEMORY = re.compile(r"([0-9.]+)([KMGTP]?)")


def _sacct_job(row: Row) -> LoggedJob:
    job_id = row.text("JobIDRaw").strip()
    if "." in job_id:
        raise LeftOutError("are steps, not jobs")
    to_count("JobIDRaw", job_id)
    column = "AllocTRES" if row.text("AllocTRES") else "ReqTRES"
    resources = _resources(column, row.text(column))
    gpu_count = _gpu_count(column, resources)
    submit_s = to_time("Submit", row.text("Submit"))
    if submit_s is None:
        raise RowError("Submit", "is empty; was the trace made with the command of `muri trace import --help`?")
    run_s = row.number("ElapsedRaw")
    if gpu_count == 0:
        raise LeftOutError(NO_GPUS)
    if row.text("State").startswith(_RUNNING_STATES):
        raise LeftOutError(NOT_ENDED)
    if run_s == 0:
        raise LeftOutError(NEVER_RAN)
    cpu_count = to_number(column, resources["cpu"]) if "cpu" in resources else None
    user, name = row.text("User"), row.text("JobName")
    mem_gib = _mem_gib(column, resources)
    return LoggedJob(job_id, submit_s, gpu_count, run_s, user, f"{user}\0{name}", cpu_count, mem_gib, name)


def _resources(column: str, text: str) -> dict[str, str]:
    """Trackable resources by name, out of `cpu=4,gres/gpu=2,mem=16G`."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not all(separator and value for _, separator, value in pairs):
        raise RowError(column, f"{text!r} is not of the form cpu=4,gres/gpu=2,mem=16G")
    return {name: value for name, _, value in pairs}


def _gpu_count(column: str, resources: dict[str, str]) -> int:
    """GPUs of all types; a cluster may account them with types only."""
    if "gres/gpu" in resources:
        return to_count(column, resources["gres/gpu"])
    return sum(to_count(column, value) for name, value in resources.items() if name.startswith("gres/gpu:"))


def _mem_gib(column: str, resources: dict[str, str]) -> float | None:
    if "mem" not in resources:
        return None
    match = _MEMORY.fullmatch(resources["mem"])
    if match is None:
        raise RowError(column, f"memory {resources['mem']!r} is not of the form 16G")
    return to_number(column, match[1]) * _GIB_PER_UNIT[match[2]]


SACCT = Format(
    name="sacct",
    summary="a Slurm cluster's own accounting (sacct -P)",
    looks_like=lambda head: {"JobIDRaw", "Submit"} <= header_of(head, _SEPARATOR),
    read_log=lambda reading: read_table(reading, SACCT_COLUMNS, _sacct_job, _SEPARATOR),
)
