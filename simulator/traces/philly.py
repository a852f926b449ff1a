"""Microsoft's Philly trace: `cluster_job_log`, a JSON list of jobs with their attempts (docs/traces.md)."""

from typing import Any

from muri.simulator.traces.formats import Format, LeftOut, Logged, LoggedJob, Reading
from muri.simulator.traces.json_stream import elements
from muri.simulator.traces.logs import NEVER_RAN, NO_GPUS, NOT_ENDED, to_time
from muri.simulator.traces.problems import RowError


def _read(reading: Reading) -> Logged:
    return reading.parse(elements(reading.source.name, reading.source.chunks()), _job)


def _job(entry: Any) -> LoggedJob:
    if not isinstance(entry, dict):
        raise RowError("", "a job in { … } is expected")
    attempts = _list(entry, "attempts")
    submit_s = to_time("submitted_time", _text(entry, "submitted_time"))
    if submit_s is None:
        raise RowError("submitted_time", "is empty; give the time of submission")
    job_id, user = _text(entry, "jobid"), _text(entry, "user")
    if attempts and to_time("end_time", _time_text(attempts[-1], "end_time")) is None:
        raise LeftOut(NOT_ENDED)
    run_s = sum(_run_s(attempt) for attempt in attempts)
    gpu_count = max((_gpu_count(attempt) for attempt in attempts), default=0)
    if run_s <= 0:
        raise LeftOut(NEVER_RAN)
    if gpu_count == 0:
        raise LeftOut(NO_GPUS)
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


def _gpu_count(attempt: dict[str, Any]) -> int:
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


FORMAT = Format(
    name="philly",
    summary="Microsoft Philly, cluster_job_log (JSON)",
    looks_like=lambda head: head[0].lstrip()[:1] in {"[", "{"},
    read_log=_read,
)
