"""The Muri paper's trace files: milliseconds, storage and CPU time as one figure (facts in docs/traces.md)."""

from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.model import TraceJob
from muri.simulator.traces.formats import Format, header_of, read_table
from muri.simulator.traces.problems import RowError
from muri.simulator.traces.profiles import load_share, split_exactly
from muri.simulator.traces.tables import Row

COLUMNS = (
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


def _profile(row: Row, gpu_count: int) -> StageProfile:
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


def _job(row: Row) -> TraceJob:
    gpu_count = row.count("num_gpu", at_least=1)
    duration_ms = row.optional_number("duration")
    return TraceJob(
        job_id=row.count("job_id"),
        submit_s=row.number("submit_time") / _MS,
        gpu_count=gpu_count,
        iterations=row.count("iterations", at_least=1),
        profile=_profile(row, gpu_count),
        opportunistic=row.flag("priority"),
        listed_duration_s=None if duration_ms is None else duration_ms / _MS,
    )


FORMAT = Format(
    name="muri-paper",
    summary="the Muri paper's trace files (CSV, milliseconds)",
    looks_like=lambda head: {"num_gpu", "resource_time_0", "iteration_time"} <= header_of(head),
    read=lambda reading: read_table(reading, COLUMNS, _job),
)
