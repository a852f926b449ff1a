"""Formats that state what jobs train: Muri's own schema, and the trace files of Muri's and Synergy's papers."""

import csv
import math
from pathlib import Path
from typing import IO

from muri.files import whole_file
from muri.policies.traits import BatchModel
from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.model import Trace, TraceJob
from muri.simulator.traces.formats import Format, Found, Reading, header_of, read_table
from muri.simulator.traces.models import load_share, split_exactly, synergy_models
from muri.simulator.traces.rows import Row, RowError, TraceError

_TIMES = ("iteration_s", "load_s", "preprocess_s", "propagate_s", "synchronize_s")

REQUIRED = ("job_id", "submit_s", "gpu_count", "iterations", "model", *_TIMES)
"""Columns that a trace must have."""

BATCH = (
    "compute_fixed_s",
    "compute_per_sample_s",
    "communicate_s",
    "overlap_exponent",
    "fixed_mem_gib",
    "mem_gib_per_sample",
    "max_accumulate_steps",
)
"""Columns of a batch model beside `batch_size`; a job has one where `compute_per_sample_s` is filled in."""

WRITTEN = (
    "job_id",
    "user",
    "submit_s",
    "gpu_count",
    "iterations",
    "model",
    "batch_size",
    *_TIMES,
    "gpu_mem_gib",
    "opportunistic",
    "listed_duration_s",
    "cpu_count",
    "mem_gib",
)
"""Columns of each written trace; other optional columns follow if a job has them."""

_PROFILE_COLUMNS = ("model", "batch_size", "gpu_count", "gpu_type", *_TIMES, "gpu_mem_gib")

PAPER_COLUMNS = (
    "job_id",
    "num_gpu",
    "submit_time",
    "iterations",
    "model_name",
    "batch_size",
    "iteration_time",
    "resource_time_0",
    "resource_time_1",
    "resource_time_2",
)
"""Columns that must be there; `duration`, `interval` and `priority` may be."""

_MS = 1000.0
SYNERGY_COLUMNS = ("job_id", "model", "arrival_s", "iterations", "num_gpu")


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace in Muri's own schema; reading it gives the same jobs.

    Of each profile the stage times, the iteration time, the memory and the key are kept; how it was measured is not.

    Raises:
        TraceError: The file cannot be written.
    """
    try:
        with whole_file(path) as draft, draft.open("w", encoding="utf-8", newline="") as stream:
            write_rows(trace, stream)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from error


def write_rows(trace: Trace, stream: IO[str]) -> None:
    """Write a trace to an open stream; see `write_trace`."""
    columns = (*WRITTEN, *_extra_columns(trace))
    # a carriage return ends a row for a reader, but the writer quotes only its own line end
    has_return = any("\r" in job.user + job.key.model + job.key.gpu_type for job in trace.jobs)
    writer = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL)
    writer.writerow(columns)
    writer.writerows(map(_cells(job).__getitem__, columns) for job in trace.jobs)


def _extra_columns(trace: Trace) -> list[str]:
    has_restart = any(job.restart_s is not None for job in trace.jobs)
    has_type = any(job.key.gpu_type != "gpu" for job in trace.jobs)
    has_utilization = any(job.gpu_utilization is not None for job in trace.jobs)
    has_batch = any(job.batch is not None for job in trace.jobs)
    optional = ["restart_s"] * has_restart + ["gpu_type"] * has_type + ["gpu_utilization"] * has_utilization
    return optional + list(BATCH) * has_batch


def _cells(job: TraceJob) -> dict[str, str]:
    profile = job.profile
    of_job = ("submit_s", "listed_duration_s", "cpu_count", "mem_gib", "restart_s", "gpu_utilization")
    return {
        "job_id": str(job.job_id),
        "user": job.user,
        "gpu_count": str(job.gpu_count),
        "iterations": str(job.iterations),
        "model": profile.key.model,
        "batch_size": str(profile.key.batch_size),
        "opportunistic": "1" if job.opportunistic else "0",
        "gpu_type": profile.key.gpu_type,
        **{column: _number(getattr(job, column)) for column in of_job},
        **{column: _number(getattr(profile, column)) for column in (*_TIMES, "gpu_mem_gib")},
        **{column: "" if job.batch is None else _number(getattr(job.batch, column)) for column in BATCH},
    }


def _number(value: float | None) -> str:
    """The shortest text that reads back as the same number."""
    return "" if value is None else repr(float(value)).removesuffix(".0")


def _read(reading: Reading) -> Found:
    known: dict[tuple[str, ...], StageProfile] = {}
    return read_table(reading, REQUIRED, lambda row: _job(row, known))


def _job(row: Row, known: dict[tuple[str, ...], StageProfile]) -> TraceJob:
    gpu_count = row.count("gpu_count", at_least=1)
    cells = tuple(row.text(column) for column in _PROFILE_COLUMNS)
    profile = known.get(cells)
    if profile is None:
        profile = known[cells] = _profile(row, gpu_count)
    return TraceJob(
        job_id=row.count("job_id"),
        submit_s=row.number("submit_s"),
        gpu_count=gpu_count,
        iterations=row.count("iterations", at_least=1),
        profile=profile,
        user=row.text("user", "user"),
        opportunistic=row.flag("opportunistic"),
        listed_duration_s=row.optional_number("listed_duration_s"),
        cpu_count=row.optional_number("cpu_count"),
        mem_gib=row.optional_number("mem_gib"),
        restart_s=row.optional_number("restart_s"),
        batch=_batch(row),
        gpu_utilization=_share(row, "gpu_utilization"),
    )


def _profile(row: Row, gpu_count: int) -> StageProfile:
    model = row.text("model")
    if not model:
        raise RowError("model", "is empty")
    batch_size = row.count("batch_size") if row.text("batch_size").strip() else 0
    return StageProfile(
        key=ProfileKey(model, batch_size, gpu_count, row.text("gpu_type", "gpu")),
        load_s=row.number("load_s"),
        preprocess_s=row.number("preprocess_s"),
        propagate_s=row.number("propagate_s"),
        synchronize_s=row.number("synchronize_s"),
        iteration_s=row.number("iteration_s", more_than=0),
        gpu_mem_gib=row.optional_number("gpu_mem_gib") or 0.0,
        source="import",
    )


def _batch(row: Row) -> BatchModel | None:
    if not row.text("compute_per_sample_s").strip():
        return None
    hides_all = row.text("overlap_exponent").strip().lower() == "inf"
    exponent = math.inf if hides_all else row.optional_number("overlap_exponent", at_least=1.0) or 1.0
    return BatchModel(
        batch_size=row.count("batch_size", at_least=1),
        compute_fixed_s=row.optional_number("compute_fixed_s") or 0.0,
        compute_per_sample_s=row.number("compute_per_sample_s"),
        communicate_s=row.optional_number("communicate_s") or 0.0,
        overlap_exponent=exponent,
        fixed_mem_gib=row.optional_number("fixed_mem_gib") or 0.0,
        mem_gib_per_sample=row.optional_number("mem_gib_per_sample") or 0.0,
        max_accumulate_steps=row.count("max_accumulate_steps", at_least=1) if row.text("max_accumulate_steps") else 1,
    )


def _share(row: Row, column: str) -> float | None:
    value = row.optional_number(column)
    if value is not None and value > 1:
        raise RowError(column, f"{value:g} must be at most 1")
    return value


MURI = Format(
    name="muri",
    summary="Muri's own schema (CSV, seconds)",
    looks_like=lambda head: {"submit_s", "gpu_count"} <= header_of(head),
    read=_read,
)


def _paper_job(row: Row) -> TraceJob:
    gpu_count = row.count("num_gpu", at_least=1)
    duration_ms = row.optional_number("duration")
    return TraceJob(
        job_id=row.count("job_id"),
        submit_s=row.number("submit_time") / _MS,
        gpu_count=gpu_count,
        iterations=row.count("iterations", at_least=1),
        profile=_paper_profile(row, gpu_count),
        opportunistic=row.flag("priority"),
        listed_duration_s=None if duration_ms is None else duration_ms / _MS,
    )


def _paper_profile(row: Row, gpu_count: int) -> StageProfile:
    model = row.text("model_name")
    if not model:
        raise RowError("model_name", "is empty")
    load_s, preprocess_s = split_exactly(row.number("resource_time_0") / _MS, load_share(model))
    return StageProfile(
        key=ProfileKey(model, row.count("batch_size"), gpu_count, "gpu"),
        load_s=load_s,
        preprocess_s=preprocess_s,
        propagate_s=row.number("resource_time_1") / _MS,
        synchronize_s=row.number("resource_time_2") / _MS,
        iteration_s=row.number("iteration_time", more_than=0) / _MS,
        source="import",
    )


MURI_PAPER = Format(
    name="muri-paper",
    summary="the Muri paper's trace files (CSV, milliseconds)",
    looks_like=lambda head: {"num_gpu", "resource_time_0", "iteration_time"} <= header_of(head),
    read=lambda reading: read_table(reading, PAPER_COLUMNS, _paper_job),
)


def _synergy_job(row: Row) -> TraceJob:
    models = synergy_models()
    name = row.text("model")
    if name not in models:
        raise RowError("model", f"{name!r} is not one of Synergy's models: {', '.join(models)}")
    gpu_count = row.count("num_gpu", at_least=1)
    profile = models[name].profile(gpu_count)
    iterations = row.count("iterations", at_least=1)
    return TraceJob(row.count("job_id"), row.number("arrival_s"), gpu_count, iterations, profile)


SYNERGY = Format(
    name="synergy",
    summary="Synergy's derived workload (CSV)",
    looks_like=lambda head: {"arrival_s", "num_gpu"} <= header_of(head),
    read=lambda reading: read_table(reading, SYNERGY_COLUMNS, _synergy_job),
)
