"""Asks squeue for fields by their names, and takes its output apart, whatever users wrote into their texts.

Behind each field squeue prints a mark of our own choice. It is drawn anew for each call and handed over in the
environment, which no other user can read. So no text of a user can hold it, and every text comes whole, byte for byte.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.slurm_commands import decoded

FIELDS: Final = (
    "JobID", "UserID", "UserName", "GroupID", "Account", "Partition", "QOS", "Name", "State", "Reason", "PriorityLong",
    "Nice", "SubmitTime", "EligibleTime", "StartTime", "EndTime", "TimeLimit", "ArrayJobID", "ArrayTaskID", "HetJobID",
    "tres-per-node", "tres-per-job", "tres-per-task", "tres-per-socket", "tres-alloc", "NumNodes", "NumCPUs",
    "NumTasks", "cpus-per-task", "MinMemory", "NodeList", "ReqNodes", "Dependency", "Requeue", "RestartCnt",
    "exit_code", "BatchFlag", "Command", "WorkDir", "admin_comment", "Comment", "Licenses", "Reservation", "Feature",
    "MaxNodes", "MinCPUs", "NTPerNode", "WCKey", "MCSLabel", "cpus-per-tres", "mem-per-tres", "OverSubscribe",
)  # fmt: skip
"""Of every job. `tres-alloc` of a pending job is what it asks for."""

RARE_FIELDS: Final = (
    "BurstBuffer", "ClusterFeature", "Container", "Contiguous", "Cores", "CoreSpec", "Deadline", "MinTime",
    "MinTmpDisk", "Network", "NTPerBoard", "NTPerCore", "NTPerSocket", "Prefer", "Reboot", "ReqSwitch", "Sockets",
    "Threads", "tres-bind", "tres-freq",
)  # fmt: skip
"""Of options that few jobs are submitted with."""

NEWER_FIELDS: Final = ("ExcNodes", "ContainerID", "SegmentSize", "Exclusive")
"""What not every release's squeue knows."""

_MOST_NAMED: Final = 5


def known_fields(listed: str) -> tuple[str, ...]:
    """Return the fields to ask for.

    Args:
        listed: What `squeue --helpFormat` prints, "" where it knows no such option.
    """
    names = frozenset(listed.lower().split())
    return (*FIELDS, *RARE_FIELDS, *(name for name in NEWER_FIELDS if name.lower() in names))


@dataclass(frozen=True, slots=True)
class FieldReader:
    """One call of squeue.

    Attributes:
        names: Fields to ask for, the first of which is JobID.
        mark: What squeue prints behind each field.
    """

    names: Sequence[str]
    mark: str = field(default_factory=lambda: f"<{secrets.token_hex(6)}>")

    @property
    def variables(self) -> Mapping[str, str]:
        """What tells squeue the fields; width 0 stands for whole texts without padding."""
        return {"SQUEUE_FORMAT2": ",".join(f"{name}:0{self.mark}" for name in self.names)}

    def rows(self, output: bytes | bytearray) -> Iterator[dict[str, str]]:
        """Yield the fields of each job by their names; tasks of an array that share a record are one job.

        Raises:
            GatewayError: It is no such output.
        """
        end = f"{self.mark}\n".encode()
        records = output.split(end)
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
    """The record that stands for an array's waiting tasks, of which `squeue --array` prints each."""
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


def _is_task(row: Mapping[str, str]) -> bool:
    return row.get("ArrayJobID") == row["JobID"] and row.get("ArrayTaskID", "").isdecimal()


def _refuse_twins(found: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Refuse a second record of a job: whoever guessed the mark could forge one."""
    several = {job_id: rows for job_id, rows in found.items() if len(rows) > 1}
    twins = [
        job_id
        for job_id, rows in several.items()
        if not all(map(_is_task, rows)) or len({row["ArrayTaskID"] for row in rows}) < len(rows)
    ]
    if twins:
        named = ", ".join(sorted(twins)[:_MOST_NAMED])
        raise GatewayError(f"squeue printed more than one record of these jobs: {named}")
