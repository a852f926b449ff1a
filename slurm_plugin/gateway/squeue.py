"""Asks squeue for fields by their names, splits its output, whatever users wrote, and makes jobs of it.

Behind each field squeue prints a mark of our own choice. It is drawn anew for each call and handed over in the
environment, which no other user can read. So no text of a user can hold it, and every text comes whole, byte for byte.
Tried with Slurm 22.05 to 26.11.
"""

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.slurm_commands import decoded
from muri.slurm_plugin.gateway.text_fields import NO_DETAILS, SHARING, JobDetails, Request, said, special_options
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.limits import MIB_OF_UNIT, LimitTextError, PartitionLimits, parse_duration_s

_FIELDS: Final = (
    "JobID", "UserID", "UserName", "GroupID", "Account", "Partition", "QOS", "Name", "State", "Reason", "PriorityLong",
    "Nice", "SubmitTime", "EligibleTime", "StartTime", "EndTime", "TimeLimit", "ArrayJobID", "ArrayTaskID", "HetJobID",
    "tres-per-node", "tres-per-job", "tres-per-task", "tres-per-socket", "tres-alloc", "NumNodes", "NumCPUs",
    "NumTasks", "cpus-per-task", "MinMemory", "NodeList", "ReqNodes", "Dependency", "Requeue", "RestartCnt",
    "exit_code", "BatchFlag", "Command", "WorkDir", "admin_comment", "Comment", "Licenses", "Reservation", "Feature",
    "MaxNodes", "MinCPUs", "NTPerNode", "WCKey", "MCSLabel", "cpus-per-tres", "mem-per-tres", "OverSubscribe",
)  # fmt: skip
"""Of every job. `tres-alloc` of a pending job holds its request."""

_OPTIONS: Final = {each.squeue: name for name, each in text_fields.FIELDS.items() if each.squeue}
"""Fields of options that few jobs are submitted with, and their names in `Request.values`."""

_NEWER_FIELDS: Final = ("ExcNodes", "ContainerID", "SegmentSize", "Exclusive")
"""Fields that only some releases have."""

_MOST_NAMED: Final = 5


def known_fields(listed: str) -> tuple[str, ...]:
    """Return the fields to ask for.

    Args:
        listed: Output of `squeue --helpFormat`, "" where it knows no such option.
    """
    names = frozenset(listed.lower().split())
    rare = (name for name in _OPTIONS if name not in _NEWER_FIELDS)
    return (*_FIELDS, *rare, *(name for name in _NEWER_FIELDS if name.lower() in names))


@dataclass(frozen=True, slots=True)
class FieldReader:
    """One call of squeue."""

    names: Sequence[str]  # Fields to ask for, the first of which is JobID
    mark: str = field(default_factory=lambda: f"<{secrets.token_hex(6)}>")  # Printed behind each field

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment that tells squeue the fields; width 0 stands for whole texts without padding."""
        return {"SQUEUE_FORMAT2": ",".join(f"{name}:0{self.mark}" for name in self.names)}

    def rows(self, output: bytes | bytearray) -> Iterator[dict[str, str]]:
        """Yield the fields of each job by their names; tasks of an array that share a record are one job.

        Raises:
            GatewayError: It has another form.
        """
        records = output.split(f"{self.mark}\n".encode())
        if records.pop():
            raise GatewayError("squeue's output ends within a job's record: this version of Slurm is not known to Muri")
        found: dict[str, list[dict[str, str]]] = {}
        for record in records:
            values = decoded(record).split(self.mark)
            if len(values) != len(self.names):
                raise GatewayError(
                    f"squeue printed {len(values)} fields of a job instead of {len(self.names)}: this version of Slurm "
                    "is not known to Muri"
                )
            found.setdefault(values[0], []).append(dict(zip(self.names, values, strict=True)))
        _refuse_twins(found)
        return (rows[0] if len(rows) == 1 else _one_record(rows) for rows in found.values())


def _one_record(tasks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the record of an array's waiting tasks, of which `squeue --array` prints each."""
    numbers = sorted(int(task["ArrayTaskID"]) for task in tasks)
    return {**tasks[0], "ArrayTaskID": ",".join(_runs(numbers))}


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield "3" and "5-9" of 3, 5, 6, 7, 8 and 9."""
    first = last = numbers[0]
    for number in (*numbers[1:], None):
        if number == last + 1:
            last = number
            continue
        yield f"{first}" if first == last else f"{first}-{last}"
        if number is not None:
            first = last = number


def _refuse_twins(found: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Refuse a second record of a job: a user who guessed the mark could forge one."""
    twins = [
        job_id
        for job_id, rows in found.items()
        if len(rows) > 1
        and not (
            all(row.get("ArrayJobID") == job_id and row.get("ArrayTaskID", "").isdecimal() for row in rows)
            and len({row["ArrayTaskID"] for row in rows}) == len(rows)
        )
    ]
    if twins:
        named = ", ".join(sorted(twins)[:_MOST_NAMED])
        raise GatewayError(f"squeue printed more than one record of these jobs: {named}")


_NOTHING: Final = frozenset({"", "(null)", "N/A", "NONE", "None", "Unknown"})
"""Values where nothing is set."""

_NOT_SET: Final = frozenset({"", "0", "*", "0:00", *_NOTHING})
"""Values where an option was not given."""

_TRES: Final[Mapping[str, str]] = {
    "tres-per-node": "tres_per_node", "tres-per-job": "tres_per_job", "tres-per-task": "tres_per_task",
    "tres-per-socket": "tres_per_socket", "cpus-per-tres": "cpus_per_tres", "mem-per-tres": "memory_per_tres",
}  # fmt: skip

# Fields of `Job` with Slurm's own texts, with texts of any length, and with numbers.
_TEXTS: Final[Mapping[str, str]] = {
    "account": "Account", "qos": "QOS", "nodes": "NodeList", "required_nodes": "ReqNodes",
    "reservation": "Reservation", "features": "Feature",
}  # fmt: skip
_FREE_TEXTS: Final[Mapping[str, str]] = {
    "name": "Name", "command": "Command", "work_dir": "WorkDir", "comment": "Comment",
}  # fmt: skip

#: Slurm's NO_VAL and INFINITE of 16, 32 and 64 bits, which some releases print as plain numbers.
_NOT_A_VALUE: Final = frozenset(
    {0xFFFE, 0xFFFF, 0xFFFF_FFFE, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFE, 0xFFFF_FFFF_FFFF_FFFF}
)


def job_of(
    row: Mapping[str, str], details: JobDetails | None, taken_s: float, partition: PartitionLimits | None = None
) -> Job:
    """Convert one job.

    Args:
        row: Its fields.
        details: Its details from scontrol, None where it was not asked.
        taken_s: The time, in seconds since the epoch.
        partition: Its partition's defaults, None where these are not known.

    Raises:
        ValueError: A field has an unexpected form.
        KeyError: One is missing.
    """
    known, default = details or NO_DETAILS, partition or PartitionLimits("")
    state = text_fields.job_state((row["State"],))
    mem_mib, mem_per_cpu_mib, request = _request(row, known, default, pending=state is JobState.PENDING)
    priority = _number(row["PriorityLong"], 1)
    eligible_s = _number(row["EligibleTime"])
    tasks = row["ArrayTaskID"] if row["ArrayTaskID"] not in _NOTHING else ""
    excluded = row.get("ExcNodes")
    texts: dict[str, Any] = {name: _text(row[source]) for name, source in _TEXTS.items()}
    texts |= {name: text_fields.kept_text(_free(row[source])) for name, source in _FREE_TEXTS.items()}
    return Job(
        **texts,
        job_id=int(row["JobID"]),
        user=row["UserName"] or row["UserID"],
        uid=int(row["UserID"]),
        gid=int(row["GroupID"]),
        partition=text_fields.first_partition(request.partition),
        state=state,
        reason=text_fields.reason_text(row["Reason"], (row["State"],)),
        held=priority == 0,
        submit_s=_number(row["SubmitTime"]),
        begin_s=eligible_s if state is JobState.PENDING and eligible_s > taken_s else 0,
        start_s=0 if state is JobState.PENDING else _number(row["StartTime"]),
        end_s=0 if state.is_active else _number(row["EndTime"]),
        time_limit_s=_time_limit_s(row["TimeLimit"]),
        gpu_count=text_fields.job_gpus(
            per_job=_text(row["tres-per-job"]),
            per_node=_text(row["tres-per-node"]),
            per_socket=_text(row["tres-per-socket"]),
            per_task=_text(row["tres-per-task"]),
            node_count=request.node_count,
            task_count=request.task_count,
        ),
        gpu_request=text_fields.gres_request(_text(row["tres-per-node"])),
        node_count=request.node_count,
        cpu_count=request.cpu_count,
        cpus_per_task=request.cpus_per_task,
        mem_per_node_mib=mem_mib,
        dependency=text_fields.dependency_text(_text(row["Dependency"])),
        can_requeue=row["Requeue"] == "1",
        restart_count=_number(row["RestartCnt"]),
        exit_code=_exit_code(row["exit_code"]),
        batch=row["BatchFlag"] == "1",
        array=bool(tasks),
        het=_number(row["HetJobID"]) > 0,
        submit_line=known.submit_line,
        admin_comment=_free(row["admin_comment"]),
        mem_per_cpu_mib=mem_per_cpu_mib,
        priority=priority,
        nice=text_fields.nice_value(row["Nice"]),
        licenses=text_fields.license_text(_text(row["Licenses"])),
        excluded_nodes=known.excluded_nodes if excluded is None else _text(excluded),
        special=special_options(request),
        array_job_id=_number(row["ArrayJobID"]) if tasks else 0,
        array_tasks=text_fields.waiting_tasks(tasks),
        array_limit=known.array_limit if tasks else 0,
        cpus_per_gpu=_number(row["cpus-per-tres"].removeprefix("gpu:")) if default.cpus_per_gpu else 0,
        oversubscribe=request.shares_cpus,
    )


def _request(
    row: Mapping[str, str], known: JobDetails, default: PartitionLimits, *, pending: bool
) -> tuple[int, int, Request]:
    """Return a job's memory per node, its memory per CPU where it asked for that, and its request."""
    tres = text_fields.counted_tres(row["tres-alloc"])
    node_count = _bounded_count(tres.get("node", 0) if pending else 0) or _count(row["NumNodes"])
    cpu_count, task_count = _count(row["NumCPUs"]), _count(row["NumTasks"])
    # Where jobs get memory for each GPU, squeue shows that figure, whatever a job has named itself.
    per_gpu = default.mem_per_gpu and pending
    mem_mib = int(tres.get("mem", 0.0) / node_count) if per_gpu else _mib(row["MinMemory"])
    per_cpu = not per_gpu and _is_per_cpu(mem_mib, tres.get("mem", 0.0), cpu_count, node_count, known)
    # Slurm 24.05 shows the CPUs that MaxMemPerCPU adds as if they had been asked for.
    least_cpus, most_mib = _number(row["MinCPUs"]), default.max_mem_per_cpu_mib
    added = -(-mem_mib // most_mib) if most_mib else 0
    request = Request(
        values=said(_values(row, known)),
        sharing=_sharing(row),
        flags=known.flags,
        partition=_text(row["Partition"]),
        wckey=_text(row["WCKey"]),
        node_count=node_count,
        max_nodes=_number(row["MaxNodes"]),
        task_count=task_count,
        tasks_per_node=_number(row["NTPerNode"]),
        cpu_count=cpu_count,
        cpus_per_task=_number(row["cpus-per-task"]) or max(1, cpu_count // task_count),
        min_cpus_per_node=0 if least_cpus == added else least_cpus,
        all_mem=default.default_mem and not mem_mib and row["mem-per-tres"] in _NOT_SET,
        shares_all=default.shares_all,
    )
    per_node_mib = text_fields.mem_of_cpus_mib(mem_mib, cpu_count, node_count) if per_cpu else mem_mib
    return per_node_mib, mem_mib if per_cpu else 0, request


def _text(value: str) -> str:
    """Read a text of Slurm's own."""
    return "" if value in _NOTHING else value


def _free(value: str) -> str:
    """Read a text that a user wrote."""
    return "" if value == "(null)" else value


def _number(value: str, default: int = 0) -> int:
    """Read a number within the bounds of any real one; `default` where nothing is set."""
    if not (value.isascii() and value.isdecimal()) or len(value) > 20:
        return default
    number = int(value)
    return default if number in _NOT_A_VALUE else text_fields.bounded(number)


def _bounded_count(value: float) -> int:
    return text_fields.bounded(int(value), text_fields.MOST)


def _count(value: str) -> int:
    return _bounded_count(_number(value, 1)) or 1


@lru_cache(maxsize=4096)
def _mib(text: str) -> int:
    """Read memory such as "1500M"."""
    match = re.fullmatch(r"(\d{1,15})(\.\d+)?([KMGTP]?)", text)
    if match is None:
        return 0
    return text_fields.bounded(round(float(match[1] + (match[2] or "")) * MIB_OF_UNIT[match[3]]))


def _is_per_cpu(mem_mib: int, total_mib: float, cpu_count: int, node_count: int, known: JobDetails) -> bool:
    """Whether memory was asked for each CPU: squeue prints the bare figure, but all memory of the job besides."""
    if not mem_mib:
        return False
    if cpu_count == node_count or not total_mib:
        return known.mem_per_cpu
    return abs(mem_mib * cpu_count - total_mib) < abs(mem_mib * node_count - total_mib)


@lru_cache(maxsize=4096)
def _time_limit_s(text: str) -> int:
    """Read a time limit such as "1-00:00:00" or "5:00"; 0 where there is none."""
    try:
        return text_fields.bounded(parse_duration_s(text) or 0)
    except LimitTextError:
        return 0


def _exit_code(text: str) -> int:
    """Read an exit status: "3:0", in Slurm 22.05 the raw wait status."""
    code, separator, _ = text.partition(":")
    status = _number(code)
    if separator:
        return status
    return os.WEXITSTATUS(status) if status < 2**16 and os.WIFEXITED(status) else 0


def _values(row: Mapping[str, str], known: JobDetails) -> dict[str, str]:
    """Return the fields that are set."""
    given = {name: value for source, name in _OPTIONS.items() if (value := row.get(source, "")) not in _NOT_SET}
    if "per_task" in given.get("tres_bind", "") and _text(row["tres-per-task"]):
        del given["tres_bind"]  # newer releases set it for --gpus-per-task
    mcs_label = _text(row["MCSLabel"])
    if mcs_label != row["UserName"]:  # mcs/user gives every job its user's
        given["mcs_label"] = mcs_label
    return {**given, **{name: _text(row[source]) for source, name in _TRES.items()}, **known.options}


def _sharing(row: Mapping[str, str]) -> tuple[str, ...]:
    # Where squeue tells both, NO of the second means that the job is not exclusive.
    exclusive = row.get("Exclusive", "NO")
    words = (row["OverSubscribe"], "" if exclusive == "NO" else exclusive)
    return tuple(SHARING[word] for word in words if word in SHARING)
