"""Reads the queue through squeue; where it prints too much or takes too long, job by job in halves."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import (
    CommandTimeoutError,
    GatewayError,
    NoSuchJobError,
    SlurmUnreachableError,
    TooLongAnswerError,
)
from muri.slurm_plugin.gateway.job_details import DetailsReader, untold, wants_details
from muri.slurm_plugin.gateway.read_each import read_each
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.gateway.squeue_fields import FieldReader, known_fields
from muri.slurm_plugin.gateway.squeue_records import job_of
from muri.slurm_plugin.records.cluster import Job, Unreadable
from muri.slurm_plugin.records.limits import PartitionLimits

log = logging.getLogger(__name__)

_PARTS_WITHIN_S: Final = 240.0
"""How long reading in parts may take."""

_DETAILS_BELONG_TO: Final = ("MinMemory", "NumCPUs", "NumNodes")
"""When one of these figures changes, a job's details are asked for anew: they tell what the first is for."""

# Without --array squeue shows tasks that have records of their own as one with those that wait beside them.
ASK: Final = ["squeue", "--all", "--array", "--states=all", "--noheader", "--noconvert"]

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Queue:
    """What squeue prints.

    Attributes:
        jobs: The jobs.
        unreadable: Those whose records cannot be read.
    """

    jobs: list[Job]
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Records as squeue prints them, and jobs that it cannot print."""

    rows: list[Row] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class QueueReader:
    """Reads jobs.

    Attributes:
        commands: How commands are run.
        names: Fields of squeue.
        details: Tells what squeue does not, of jobs with Muri's tag.
        job_id: The one job to read, 0 for all.
    """

    commands: SlurmCommands
    names: Sequence[str]
    details: DetailsReader
    job_id: int = 0

    def read(self, taken_s: float, partitions: Mapping[str, PartitionLimits] = MappingProxyType({})) -> Queue:
        """Return the jobs, and those that cannot be read.

        One RPC; more of them only where squeue's output is too long, and for tagged jobs that are new.

        Args:
            taken_s: The time, in seconds since the epoch.
            partitions: What partitions give to jobs by default, by name.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
            GatewayError: squeue fails for every job.
        """
        found = self._all()
        wanted = {
            int(row["JobID"]): tuple(row[name] for name in _DETAILS_BELONG_TO)
            for row in found.rows
            if _wants_details(row)
        }
        told = self.details.read(wanted)
        unknown = untold(wanted, told)
        left_out = {each.job_id for each in unknown}

        def job(row: Row) -> Job:
            partition = text_fields.first_partition(row["Partition"])
            return job_of(row, told.get(_id(row)), taken_s, partitions.get(partition))

        rows = [row for row in found.rows if _id(row) not in left_out] if left_out else found.rows
        jobs, unreadable = read_each(rows, job, _id)
        return Queue(jobs, [*found.unreadable, *unknown, *unreadable])

    def _all(self) -> _Rows:
        try:
            return _Rows(self._rows([self.job_id] if self.job_id else []))
        except NoSuchJobError:
            return _Rows()
        except (TooLongAnswerError, CommandTimeoutError) as error:
            log.warning("the queue cannot be read as a whole, so jobs are read in halves: %s", error)
            found = self._halves(self._ids(), time.monotonic() + _PARTS_WITHIN_S)
            if not found.rows:  # no job's text is to blame
                raise
            return found

    def _rows(self, job_ids: Sequence[int] = ()) -> list[Row]:
        return _rows(self.commands, self.names, job_ids)

    def _ids(self) -> list[int]:
        arguments = [*ASK, "--Format=JobID:12"]
        words = self.commands.run("read the jobs' ids", arguments).split()
        return sorted({int(word) for word in words if word.isdecimal()})

    def _halves(self, job_ids: Sequence[int], end_s: float) -> _Rows:
        """Read some jobs; where that fails, each half of them by itself."""
        if not job_ids:
            return _Rows()
        if time.monotonic() > end_s:
            raise SlurmUnreachableError(f"cannot read the jobs: reading them in parts took over {_PARTS_WITHIN_S:g} s")
        try:
            return _Rows(self._rows(job_ids))
        except (TooLongAnswerError, CommandTimeoutError) as error:
            if len(job_ids) == 1:
                return _Rows([], [Unreadable(job_ids[0], str(error))])
        middle = len(job_ids) // 2
        first, second = (self._halves(part, end_s) for part in (job_ids[:middle], job_ids[middle:]))
        return _Rows(first.rows + second.rows, first.unreadable + second.unreadable)


def read_job(commands: SlurmCommands, job_id: int) -> Job | None:
    """Return one job without its details, None where Slurm does not know it; one small RPC.

    Raises:
        GatewayError: It cannot be read.
    """
    try:
        rows = _rows(commands, known_fields(""), [job_id])
    except NoSuchJobError:
        return None
    jobs, unreadable = read_each(rows, lambda row: job_of(row, None, time.time()), _id)
    if unreadable:
        raise GatewayError(f"cannot read job {job_id}: {unreadable[0].why}")
    return next((job for job in jobs if job.job_id == job_id), None)


def _rows(commands: SlurmCommands, names: Sequence[str], job_ids: Sequence[int]) -> list[Row]:
    chosen = [f"--jobs={','.join(map(str, job_ids))}"] if job_ids else []
    reader = FieldReader(names)
    return list(reader.rows(commands.output("read the jobs", [*ASK, *chosen], reader.variables)))


def _id(row: Row) -> int:
    job_id = row["JobID"]
    return int(job_id) if job_id.isascii() and job_id.isdecimal() else 0


def _wants_details(row: Row) -> bool:
    return wants_details(row["admin_comment"], row["State"]) and _id(row) > 0
