"""Reads the queue through squeue; where it prints too much or takes too long, job by job in halves.

scontrol adds the details of jobs with Muri's tag. It prints a job as `name=value`, with users' texts among them. A user
can add to the apparent request of his own job, and nothing to another's: jobs are told apart by lines that begin with
"JobId=", and one that two of them name is asked for by itself.

`read_tagged_jobs` reads ids, owners, states and tags of Muri's jobs and nothing else, for `muri drain` when everything
else is broken.
"""

import logging
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import (
    CommandTimeoutError,
    GatewayError,
    NoSuchJobError,
    SlurmUnreachableError,
    TooLongAnswerError,
)
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands, decoded
from muri.slurm_plugin.gateway.squeue import FieldReader, job_of, known_fields
from muri.slurm_plugin.gateway.text_fields import JobDetails, details_of
from muri.slurm_plugin.records.cluster import Job, Snapshot, Unreadable
from muri.slurm_plugin.records.comment_tags import REQUEST_PREFIX, token
from muri.slurm_plugin.records.limits import PartitionLimits

log = logging.getLogger(__name__)

_PARTS_WITHIN_S: Final = 240.0
"""How long reading in parts may take."""

_DETAILS_BELONG_TO: Final = ("MinMemory", "NumCPUs", "NumNodes")
"""When one of these figures changes, a job's details are asked for anew: they tell what the first is for."""

#: So many jobs are asked for one by one, each a small RPC; more of them together with all others.
_FEW: Final = 8

#: So many are asked for one by one at the most, where all together say too much, or texts pretend to be jobs.
_MOST_ALONE: Final = 1000

_BEGIN: Final = re.compile(rb"^JobId=([1-9][0-9]{0,9}) ", re.MULTILINE)

# Without --array squeue shows tasks that have records of their own as one with those that wait beside them.
ASK: Final = ["squeue", "--all", "--array", "--states=all", "--noheader", "--noconvert"]

Row = Mapping[str, str]


class ArrayRecords:
    """The records of job arrays in a gateway's last look at the queue.

    Slurm gives an array's id to the record of its waiting tasks, and in the end to its last task. In a command that id
    means every task of the array, so such a record has to be named by its tasks.
    """

    def __init__(self) -> None:
        self._jobs: Mapping[int, Job] = {}

    def learn(self, jobs: Iterable[Job]) -> None:
        """Take note of a queue."""
        self._jobs = {job.job_id: job for job in jobs if job.array_job_id}

    def name(self, job_id: int) -> str:
        """Return a record's name in commands."""
        job = self._jobs.get(job_id)
        return job.name_in_slurm if job is not None and job.array_job_id == job_id else str(job_id)

    def files_of(self, job_id: int) -> int:
        """Return the job under whose id slurmctld keeps a record's script and environment: tasks have their array's."""
        job = self._jobs.get(job_id)
        return job_id if job is None else job.array_job_id


Show = Callable[[int], bytes | bytearray]
"""Returns Slurm's text of one job, or of all for 0."""


Jobs = tuple[list[Job], list[Unreadable]]
"""Jobs, and those whose records cannot be read."""

_BROKEN_RECORD: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading a record of an unexpected form."""


def read_each(
    records: Iterable[Any],
    read: Callable[[Any, JobDetails | None], Job],
    job_id: Callable[[Any], int],
    details: Mapping[int, JobDetails] = MappingProxyType({}),
) -> Jobs:
    """Read Slurm's records of jobs one by one, so that a broken one costs only itself.

    Args:
        records: Slurm's records.
        read: Makes a job of a record and its details.
        job_id: Returns the job's id, even of a broken record.
        details: Those that are known, by job id.
    """
    found: list[Job] = []
    unreadable: list[Unreadable] = []
    for record in records:
        try:
            found.append(read(record, details.get(job_id(record))))
        except _BROKEN_RECORD as error:
            unreadable.append(Unreadable(job_id(record), f"its record cannot be read: {error!r}"))
    return found, unreadable


def wants_details(admin_comment: str, state: str) -> bool:
    """Whether the details of a job with that AdminComment and Slurm state count: Muri may start it, or has done so."""
    # The first test spares most texts the second.
    tagged = REQUEST_PREFIX in admin_comment and token(admin_comment, REQUEST_PREFIX) is not None
    return tagged and text_fields.job_state((state,)).is_active


class DetailsReader:
    """Keeps the details of jobs as long as they are wanted; each is asked for once.

    Args:
        show: Asks Slurm.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._kept: dict[int, tuple[object, JobDetails]] = {}

    def read(self, wanted: Mapping[int, object]) -> Mapping[int, JobDetails]:
        """Return the known details of jobs; one that cannot be read now is missing.

        Args:
            wanted: The jobs, each with a value; where that differs from the last time, they are asked for anew.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        self._kept = {job_id: self._kept[job_id] for job_id in wanted if job_id in self._kept}
        new = sorted(job_id for job_id, of in wanted.items() if job_id not in self._kept or self._kept[job_id][0] != of)
        for job_id, text in self._texts(new):
            self._kept[job_id] = wanted[job_id], details_of(text)
        return {job_id: details for job_id, (_, details) in self._kept.items()}

    def jobs_of(
        self,
        records: Sequence[Any],
        wanted: Mapping[int, object],
        read: Callable[[Any, JobDetails | None], Job],
        job_id: Callable[[Any], int],
    ) -> Jobs:
        """Read records with their details; a job whose details are `wanted`, as in `read`, and unknown has to wait."""
        details = self.read(wanted)
        untold = dict.fromkeys(each for each in wanted if each not in details)
        readable = [record for record in records if job_id(record) not in untold] if untold else records
        jobs, unreadable = read_each(readable, read, job_id, details)
        return jobs, [*(Unreadable(each, "Slurm did not tell all it asks for") for each in untold), *unreadable]

    def _texts(self, job_ids: Collection[int]) -> Iterator[tuple[int, str]]:
        alone = list(job_ids)
        if len(job_ids) > _FEW:
            together = self._together()
            found = {job_id: together[job_id] for job_id in job_ids if len(together.get(job_id, ())) == 1}
            yield from ((job_id, decoded(texts[0])) for job_id, texts in found.items())
            alone = [job_id for job_id in job_ids if job_id not in found]
        if len(alone) > _MOST_ALONE:
            log.warning(
                "texts of users pretend to be %d other jobs, or all jobs say too much: %d requests are read now",
                len(alone),
                _MOST_ALONE,
            )
            # Others each time, so that no user's text keeps a job waiting.
            alone = sorted(random.sample(alone, _MOST_ALONE))
        for job_id in alone:
            if text := self._alone(job_id):
                yield job_id, text

    def _together(self) -> Mapping[int, list[bytes]]:
        """Return the texts of all jobs, more than one for a job where a user's text pretends to be another job."""
        try:
            text = self._show(0)
        except TooLongAnswerError as error:
            log.warning("jobs are asked for one by one: %s", error)
            return {}
        begins = [(int(match[1]), match.start()) for match in _BEGIN.finditer(text)]
        ends = [start for _, start in begins[1:]] + [len(text)]
        texts: dict[int, list[bytes]] = {}
        for (job_id, start), end in zip(begins, ends, strict=True):
            texts.setdefault(job_id, []).append(bytes(text[start:end]))
        return texts

    def _alone(self, job_id: int) -> str:
        try:
            return decoded(self._show(job_id))
        except SlurmUnreachableError:
            raise
        except NoSuchJobError:
            return ""
        except GatewayError as error:
            log.warning("cannot learn all that job %d asks for: %s", job_id, error)
            return ""


_Rows = tuple[list[Row], list[Unreadable]]
"""Records as squeue prints them, and jobs that it cannot print."""


@dataclass(frozen=True, slots=True)
class QueueReader:
    """Reads jobs."""

    commands: SlurmCommands
    names: Sequence[str]  # Fields of squeue
    details: DetailsReader  # Of jobs with Muri's tag
    job_id: int = 0  # The one job to read, 0 for all

    def read(self, taken_s: float, partitions: Mapping[str, PartitionLimits] = MappingProxyType({})) -> Jobs:
        """Return the jobs, and those that cannot be read.

        One RPC; more of them only where squeue's output is too long, and for tagged jobs that are new.

        Args:
            taken_s: The time, in seconds since the epoch.
            partitions: Defaults of partitions, by name.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
            GatewayError: squeue fails for every job.
        """
        rows, unprintable = self._all()
        wanted = {
            int(row["JobID"]): tuple(row[name] for name in _DETAILS_BELONG_TO)
            for row in rows
            if wants_details(row["admin_comment"], row["State"]) and _id(row) > 0
        }

        def job(row: Row, details: JobDetails | None) -> Job:
            return job_of(row, details, taken_s, partitions.get(text_fields.first_partition(row["Partition"])))

        jobs, unreadable = self.details.jobs_of(rows, wanted, job, _id)
        return jobs, unprintable + unreadable

    def _all(self) -> _Rows:
        try:
            return _rows(self.commands, self.names, [self.job_id] if self.job_id else []), []
        except NoSuchJobError:
            return [], []
        except (TooLongAnswerError, CommandTimeoutError) as error:
            log.warning("the queue cannot be read as a whole, so jobs are read in halves: %s", error)
            words = self.commands.run("read the jobs' ids", [*ASK, "--Format=JobID:12"]).split()
            job_ids = sorted({int(word) for word in words if word.isdecimal()})
            found = self._halves(job_ids, time.monotonic() + _PARTS_WITHIN_S)
            if not found[0]:  # no job's text is to blame
                raise
            return found

    def _halves(self, job_ids: Sequence[int], end_s: float) -> _Rows:
        """Read some jobs; where that fails, each half of them by itself."""
        if not job_ids:
            return [], []
        if time.monotonic() > end_s:
            raise SlurmUnreachableError(f"cannot read the jobs: reading them in parts took over {_PARTS_WITHIN_S:g} s")
        try:
            return _rows(self.commands, self.names, job_ids), []
        except (TooLongAnswerError, CommandTimeoutError) as error:
            if len(job_ids) == 1:
                return [], [Unreadable(job_ids[0], str(error))]
        middle = len(job_ids) // 2
        first, second = (self._halves(part, end_s) for part in (job_ids[:middle], job_ids[middle:]))
        return first[0] + second[0], first[1] + second[1]


def read_job(commands: SlurmCommands, job_id: int) -> Job | None:
    """Return one job without its details, None where Slurm does not know it; one small RPC.

    Raises:
        GatewayError: It cannot be read.
    """
    try:
        rows = _rows(commands, known_fields(""), [job_id])
    except NoSuchJobError:
        return None
    jobs, unreadable = read_each(rows, lambda row, _: job_of(row, None, time.time()), _id)
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


TAGGED_FIELDS: Final = (
    "JobID", "ArrayJobID", "State", "PriorityLong", "Reason", "ArrayTaskID", "Licenses", "Nice", "Dependency",
    "UserID", "GroupID", "admin_comment",
)  # fmt: skip
"""All that is read of Muri's jobs for a drain."""

_NUMBERS: Final = ("JobID", "ArrayJobID", "UserID", "GroupID")
_NUMBER: Final = re.compile("[0-9]{1,11}")
_LONGEST_LINE: Final = 4 * 1024 * 1024
_TAG: Final = b"muri"
_NOTHING: Final = ("(null)", "N/A")


def read_tagged_jobs(commands: SlurmCommands) -> Snapshot:
    """Return the jobs whose AdminComment names Muri. Only owners, states, gates and tags are filled in.

    Nothing that a user may write is read: no name, comment, directory or command line. A line that is not in the
    expected form is skipped.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
        GatewayError: Slurm refused.
    """
    reader = FieldReader(TAGGED_FIELDS)
    arguments = ["squeue", "--all", "--states=all", "--noheader"]
    # Line by line: most jobs are not Muri's.
    lines = commands.lines("read the jobs' tags", arguments, _TAG, _LONGEST_LINE, reader.variables)
    jobs = [job for line in lines if (job := _tagged_job(decoded(line), reader.mark)) is not None]
    return Snapshot(time.time(), "", "", tuple(jobs), ())


def _tagged_job(line: str, mark: str) -> Job | None:
    """Return the job in a line, None where it is not one of Muri's or malformed."""
    *values, end = line.split(mark)
    fields = dict(zip(TAGGED_FIELDS, values, strict=False))
    if end or len(values) != len(TAGGED_FIELDS) or _TAG.decode() not in fields["admin_comment"]:
        return None
    if not all(_NUMBER.fullmatch(fields[name]) for name in _NUMBERS):
        return None
    held = fields["PriorityLong"] == "0"
    licenses, tasks = fields["Licenses"], text_fields.waiting_tasks(fields["ArrayTaskID"])
    return Job(
        job_id=int(fields["JobID"]), user="", uid=int(fields["UserID"]), gid=int(fields["GroupID"]),
        account="", partition="", qos="", name="",
        state=text_fields.job_state([fields["State"]]), reason=text_fields.reason_text(fields["Reason"]), held=held,
        submit_s=0.0, begin_s=0.0, start_s=0.0, end_s=0.0, time_limit_s=0, gpu_count=1, gpu_request="", node_count=1,
        cpu_count=1, cpus_per_task=1, mem_per_node_mib=0, nodes="", required_nodes="", can_requeue=True,
        restart_count=0, exit_code=0, batch=True, array=bool(tasks), het=False, command="", work_dir="", submit_line="",
        admin_comment=fields["admin_comment"], comment="", priority=0 if held else 1,
        licenses="" if licenses in _NOTHING else licenses,
        nice=text_fields.nice_value(fields["Nice"]),
        dependency="" if fields["Dependency"] in _NOTHING else text_fields.dependency_text(fields["Dependency"]),
        array_job_id=int(fields["ArrayJobID"]) if tasks else 0, array_tasks=tasks,
    )  # fmt: skip
