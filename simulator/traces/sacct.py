"""A real cluster's accounting: what Slurm's `sacct` prints (docs/traces.md)."""

import re

from muri.simulator.traces.formats import Format, LeftOut, LoggedJob, header_of, read_table
from muri.simulator.traces.logs import NEVER_RAN, NO_GPUS, NOT_ENDED, to_time
from muri.simulator.traces.problems import RowError
from muri.simulator.traces.tables import Row, to_count, to_number

COLUMNS = ("JobIDRaw", "User", "State", "Submit", "ElapsedRaw", "ReqTRES", "AllocTRES", "JobName")
"""The columns of `COMMAND`; a job's name may hold the separator, so it comes last."""

COMMAND = (
    "SLURM_TIME_FORMAT=%s sacct --allusers --allocations --parsable2 \\\n"
    "  --starttime=now-30days --endtime=now \\\n"
    f"  --format={','.join(COLUMNS)}"
)
"""The command whose output is read. Seconds instead of local times know no clock change."""

_SEPARATOR = "|"
_RUNNING_STATES = ("PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED", "COMPLETING")
_GIB_PER_UNIT = {"": 2.0**-10, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10, "P": 2.0**20}
_MEMORY = re.compile(r"([0-9.]+)([KMGTP]?)")


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


def _job(row: Row) -> LoggedJob:
    job_id = row.text("JobIDRaw").strip()
    if "." in job_id:
        raise LeftOut("are steps, not jobs")
    to_count("JobIDRaw", job_id)
    column = "AllocTRES" if row.text("AllocTRES") else "ReqTRES"
    resources = _resources(column, row.text(column))
    gpu_count = _gpu_count(column, resources)
    submit_s = to_time("Submit", row.text("Submit"))
    if submit_s is None:
        raise RowError("Submit", "is empty; was the trace made with the command of `muri trace import --help`?")
    run_s = row.number("ElapsedRaw")
    if gpu_count == 0:
        raise LeftOut(NO_GPUS)
    if row.text("State").startswith(_RUNNING_STATES):
        raise LeftOut(NOT_ENDED)
    if run_s == 0:
        raise LeftOut(NEVER_RAN)
    cpu_count = to_number(column, resources["cpu"]) if "cpu" in resources else None
    user, name = row.text("User"), row.text("JobName")
    mem_gib = _mem_gib(column, resources)
    return LoggedJob(job_id, submit_s, gpu_count, run_s, user, f"{user}\0{name}", cpu_count, mem_gib, name)


FORMAT = Format(
    name="sacct",
    summary="a Slurm cluster's own accounting (sacct -P)",
    looks_like=lambda head: {"JobIDRaw", "Submit"} <= header_of(head, _SEPARATOR),
    read_log=lambda reading: read_table(reading, COLUMNS, _job, _SEPARATOR),
)
