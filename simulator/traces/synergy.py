"""Synergy's derived workload: model, arrival and iterations of each job (docs/traces.md)."""

from muri.simulator.model import TraceJob
from muri.simulator.traces.formats import Format, header_of, read_table
from muri.simulator.traces.problems import RowError, one_of
from muri.simulator.traces.profiles import synergy_models
from muri.simulator.traces.tables import Row

COLUMNS = ("job_id", "model", "arrival_s", "iterations", "num_gpu")


def _job(row: Row) -> TraceJob:
    models = synergy_models()
    name = row.text("model")
    if name not in models:
        raise RowError("model", f"{name!r} is not one of Synergy's models: {one_of(models)}")
    gpu_count = row.count("num_gpu", at_least=1)
    profile = models[name].profile(gpu_count)
    iterations = row.count("iterations", at_least=1)
    return TraceJob(row.count("job_id"), row.number("arrival_s"), gpu_count, iterations, profile)


FORMAT = Format(
    name="synergy",
    summary="Synergy's derived workload (CSV)",
    looks_like=lambda head: {"arrival_s", "num_gpu"} <= header_of(head),
    read=lambda reading: read_table(reading, COLUMNS, _job),
)
