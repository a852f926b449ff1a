"""SenseTime's Helios trace: `cluster_log.csv`, one row per Slurm job (docs/traces.md)."""

from muri.simulator.traces.formats import Format, LeftOut, LoggedJob, header_of, read_table
from muri.simulator.traces.logs import NEVER_RAN, NO_GPUS, to_time
from muri.simulator.traces.problems import RowError
from muri.simulator.traces.tables import Row

COLUMNS = ("job_id", "user", "gpu_num", "submit_time", "duration")
"""Columns that must be there; of the others `cpu_num` is used."""


def _job(row: Row) -> LoggedJob:
    job_id = row.text("job_id").strip()
    if not job_id:
        raise RowError("job_id", "is empty")
    gpu_count = row.count("gpu_num")
    submit_s = to_time("submit_time", row.text("submit_time"))
    if submit_s is None:
        raise RowError("submit_time", "is empty; give the time of submission")
    run_s = row.number("duration")
    if gpu_count == 0:
        raise LeftOut(NO_GPUS)
    if run_s == 0:
        raise LeftOut(NEVER_RAN)
    cpu_count = row.optional_number("cpu_num")
    return LoggedJob(job_id, submit_s, gpu_count, run_s, row.text("user"), rerun_key=job_id, cpu_count=cpu_count)


FORMAT = Format(
    name="helios",
    summary="SenseTime Helios, cluster_log.csv",
    looks_like=lambda head: {"gpu_num", "submit_time", "duration"} <= header_of(head),
    read_log=lambda reading: read_table(reading, COLUMNS, _job),
)
