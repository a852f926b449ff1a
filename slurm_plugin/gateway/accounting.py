"""Slurm's accounting: a site's limits, runs of jobs in `sacct`, and words of `sacctmgr` in ended jobs' records.

Limits of QOS and associations come from slurmdbd through sacctmgr. `scontrol show assoc_mgr` needs no slurmdbd, but it
shows neither a QOS's flags nor, before a user's first job, its limits for each user.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from muri.slurm_plugin.gateway.base import GatewayError, GatewayUnavailableError, NoSuchJobError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.limits import (
    Association,
    Limits,
    LimitTextError,
    PartitionLimits,
    Qos,
    SiteLimits,
    parse_count,
    parse_duration_s,
    parse_tres,
)
from muri.slurm_plugin.records.usage import Run

log = logging.getLogger(__name__)

_KEEP_S: Final = 300.0
_RETRY_S: Final = 60.0

_ENFORCING: Final = frozenset({"limits", "safe", "all"})
"""Words of AccountingStorageEnforce with which slurmctld enforces limits of QOS and associations."""

# Slurm's names of the columns that hold limits, each with the field of Limits.
_COMMON_TRES: Final = {
    "MaxTRES": "max_tres_per_job", "MaxTRESMins": "max_tres_minutes_per_job", "GrpTRES": "grp_tres",
}  # fmt: skip
_COMMON_COUNTS: Final = {"GrpJobs": "grp_jobs", "GrpSubmit": "grp_submit"}
_TRES: Final = {
    **_COMMON_TRES,
    "MaxTRESPerUser": "max_tres_per_user",
    "MaxTRESPerAccount": "max_tres_per_account",
    "MinTRES": "min_tres_per_job",
}
_QOS_COUNTS: Final = {
    **_COMMON_COUNTS,
    "MaxJobsPerUser": "max_jobs_per_user",
    "MaxSubmitJobsPerUser": "max_submit_per_user",
    "MaxJobsPerAccount": "max_jobs_per_account",
    "MaxSubmitJobsPerAccount": "max_submit_per_account",
}
_ASSOCIATION_COUNTS: Final = {
    **_COMMON_COUNTS, "MaxJobs": "max_jobs_per_user", "MaxSubmitJobs": "max_submit_per_user",
}  # fmt: skip
_COUNTS: Final = _QOS_COUNTS | _ASSOCIATION_COUNTS
_QOS_COLUMNS: Final = ("Name", "Flags", "LimitFactor", "MaxWall", *_QOS_COUNTS, *_TRES)
_ASSOCIATION_COLUMNS: Final = (
    "Account", "User", "Partition", "ParentName", "MaxWall", *_ASSOCIATION_COUNTS, *_COMMON_TRES,
)  # fmt: skip

_FIELD: Final = re.compile(r"(\w+)=(\S*)")
_JOB_DEFAULT: Final = re.compile(r"(\w+)=(\d{1,18})")
_MOST_MEM: Final = ("MaxMemPerNode", "MaxMemPerCPU")

Record = TypeVar("Record")


class LimitsReader:
    """Reads a site's limits and keeps them for some minutes.

    A limit that changed is seen later; Slurm enforces it anyway. Failures cost as little as possible: an unreadable
    line costs itself, and the last limits are kept. Nothing is raised.

    Args:
        commands: Runs commands.
        now: The clock, in seconds.
    """

    def __init__(self, commands: SlurmCommands, now: Callable[[], float] = time.monotonic) -> None:
        self._commands = commands
        self._now = now
        self._limits = SiteLimits(why_unknown="they were not read yet")
        self._read_again_s = float("-inf")

    @property
    def partitions(self) -> Mapping[str, PartitionLimits]:
        """The partitions as last read, by name."""
        return {partition.name: partition for partition in self._limits.partitions}

    def forget(self) -> None:
        """Read them anew the next time: Slurm has refused something that they allow."""
        self._read_again_s = float("-inf")

    def read(self) -> SiteLimits:
        """Return the limits, at most some minutes old."""
        if self._now() < self._read_again_s:
            return self._limits
        try:
            self._limits = self._fresh()
            self._read_again_s = self._now() + _KEEP_S
        except GatewayError as error:
            self._read_again_s = self._now() + _RETRY_S
            if self._limits.why_unknown:
                self._limits = replace(self._limits, why_unknown=str(error))
                log.warning("the site's limits are unknown, so no groups are formed until they can be read: %s", error)
            else:
                log.warning("the site's limits could not be read anew, the last known ones hold: %s", error)
        return self._limits

    def _fresh(self) -> SiteLimits:
        settings = slurm_settings(self._commands)
        shown = self._run("scontrol", "--all", "--oneliner", "show", "partition")
        partitions = tuple(_each(shown, lambda line: _partition(line, settings)))
        enforced = bool(_ENFORCING.intersection(settings.get("AccountingStorageEnforce", "").lower().split(",")))
        found = SiteLimits(partitions, enforced, priority_type=settings.get("PriorityType", ""))
        if not enforced:
            return found
        cluster = settings.get("ClusterName", "")
        qos = self._accounting("qos", _QOS_COLUMNS)
        associations = self._accounting("associations", _ASSOCIATION_COLUMNS, f"cluster={cluster}")
        return replace(found, qos=tuple(_each(qos, _qos)), associations=tuple(_each(associations, _association)))

    def _accounting(self, kind: str, columns: Sequence[str], *conditions: str) -> str:
        return self._run("sacctmgr", "-nP", "show", kind, *conditions, f"format={','.join(columns)}")

    def _run(self, *arguments: str) -> str:
        return self._commands.run("read the site's limits", arguments)


def slurm_settings(commands: SlurmCommands) -> dict[str, str]:
    """Return Slurm's configuration; a GatewayError where it cannot be asked."""
    text = commands.run("read Slurm's configuration", ["scontrol", "show", "config"])
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def _each(text: str, read: Callable[[str], Record]) -> Iterator[Record]:
    """Read line by line; an unreadable line is logged and left out."""
    for line in filter(str.strip, text.splitlines()):
        try:
            yield read(line)
        except LimitTextError as error:
            log.warning(
                "a limit cannot be read, so jobs that it concerns run alone: %s; in the line %.200r", error, line
            )


def _partition(line: str, settings: Mapping[str, str]) -> PartitionLimits:
    """Read a partition, whose own settings override the cluster's."""
    fields = dict(_FIELD.findall(line))
    if "PartitionName" not in fields:
        raise LimitTextError("it names no partition")
    # A partition's most memory is for each node or for each CPU, and replaces the cluster's, whichever it is.
    most_mem = fields if any(parse_count(fields.get(name, "")) is not None for name in _MOST_MEM) else settings
    defaults = (_JOB_DEFAULT.findall(each.get("JobDefaults", "")) for each in (settings, fields))
    per_gpu = {name: int(value) for found in defaults for name, value in found}
    sharing, _, most = fields.get("OverSubscribe", "").partition(":")
    jobs_on_cpu = parse_count(most) or 1
    own_select = fields.get("SelectTypeParameters", "NONE")
    select = settings.get("SelectTypeParameters", "") if own_select == "NONE" else own_select
    return PartitionLimits(
        name=fields["PartitionName"],
        state=fields.get("State", "UP"),
        max_time_s=parse_duration_s(fields.get("MaxTime", "")),
        qos="" if fields.get("QoS", "N/A") == "N/A" else fields["QoS"],
        exclusive=sharing == "EXCLUSIVE" or fields.get("Exclusive", "NO") not in ("NO", "USER"),
        max_mem_per_node_mib=parse_count(most_mem.get("MaxMemPerNode", "")),
        max_mem_per_cpu_mib=parse_count(most_mem.get("MaxMemPerCPU", "")),
        default_mem=_gives_mem(fields) or _gives_mem(settings),
        cpus_per_gpu=per_gpu.get("DefCpuPerGPU", 0),
        mem_per_gpu="DefMemPerGPU" in per_gpu,
        counts_mem="MEMORY" in select.upper(),
        oversubscribe=jobs_on_cpu if sharing == "YES" else 1,
        shares_all=sharing == "FORCE" and jobs_on_cpu > 1,
    )


def _gives_mem(settings: Mapping[str, str]) -> bool:
    """Whether settings of the cluster or a partition give memory to a job that asks for none."""
    return any(settings.get(name, "").isdecimal() for name in ("DefMemPerCPU", "DefMemPerNode"))


def _qos(line: str) -> Qos:
    row = _row(line, _QOS_COLUMNS)
    flags = set(row["Flags"].split(","))
    if "Relative" in flags:
        raise LimitTextError("its limits are percentages (the flag Relative)")
    return Qos(
        name=row["Name"],
        limits=_limits(row),
        over_partition_qos="OverPartQOS" in flags,
        over_partition_time="PartitionTimeLimit" in flags,
        limit_factor=_factor(row["LimitFactor"]),
    )


def _factor(text: str) -> float:
    try:
        return float(text or 1.0)
    except ValueError as err:
        raise LimitTextError(f"{text!r} is not a LimitFactor") from err


def _association(line: str) -> Association:
    row = _row(line, _ASSOCIATION_COLUMNS)
    return Association(row["Account"], row["User"], row["Partition"], row["ParentName"], _limits(row))


def _row(line: str, columns: Sequence[str]) -> dict[str, str]:
    values = line.split("|")
    if len(values) != len(columns):
        raise LimitTextError(f"it has {len(values)} columns instead of {len(columns)}")
    return dict(zip(columns, values, strict=True))


def _limits(row: Mapping[str, str]) -> Limits:
    fields: dict[str, object] = {"max_wall_s": parse_duration_s(row["MaxWall"])}
    fields |= {field: parse_count(row[column]) for column, field in _COUNTS.items() if column in row}
    fields |= {field: parse_tres(row[column]) for column, field in _TRES.items() if column in row}
    return Limits(**fields)  # type: ignore[arg-type]  # each field has its parser's type


_FIELDS: Final = (
    "JobIDRaw", "JobID", "User", "Account", "QOS", "State", "Submit", "Start", "End", "ElapsedRaw", "AllocTRES",
    "AdminComment",
)  # fmt: skip

_BETWEEN: Final = "\x1f"
"""Between fields, because a comment may hold a bar."""

_GPUS: Final = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")
_NO_DATABASE: Final = ("accounting storage is disabled", "not running a supported accounting_storage plugin")

_TIMEOUT_S: Final = 15.0

_NO_RECORD: Final = ("didn't affect anything", "Data has not changed")
"""Words of sacctmgr where nothing is to change; which of the two comes first depends on Slurm's release."""

_JOBS_AT_ONCE: Final = 500


class NoAccountingError(GatewayError):
    """Slurm keeps no accounts here."""


class Accounting:
    """Reads and completes the records that slurmdbd keeps."""

    def __init__(self, commands: SlurmCommands | None = None) -> None:
        self._commands = commands or SlurmCommands(_TIMEOUT_S)

    def runs_of(self, jobs: Iterable[int | str]) -> list[Run]:
        """Return every run of some jobs, in one call for some hundred of them.

        Args:
            jobs: Their ids, or "12_3" for a job array's task; an array's id means all its tasks.

        Raises:
            NoAccountingError: There are no accounts.
            GatewayError: sacct failed.
        """
        ids = sorted(set(map(str, jobs)))
        chunks = (ids[start : start + _JOBS_AT_ONCE] for start in range(0, len(ids), _JOBS_AT_ONCE))
        return [run for chunk in chunks for run in self._read([f"--jobs={','.join(chunk)}"])]

    def runs_between(self, since: str, until: str, filters: Sequence[str] = ()) -> list[Run]:
        """Return every run of the jobs that waited or ran between two times, such as "2026-11-01".

        `filters` are more options for sacct, such as "--user=alice".

        Raises:
            NoAccountingError: There are no accounts.
            GatewayError: sacct failed.
        """
        return self._read([f"--starttime={since}", f"--endtime={until}", *filters])

    def _read(self, chosen: Sequence[str]) -> list[Run]:
        options = ("--allocations", "--duplicates", "--noheader", "--parsable2", f"--delimiter={_BETWEEN}")
        try:
            text = self._commands.run(
                "read the accounts", ["sacct", *options, f"--format={','.join(_FIELDS)}", *chosen]
            )
        except GatewayError as error:
            raise _explained(error) from error
        return parse_runs(text)

    def set_admin_comment(self, job_id: int, comment: str, name: str = "") -> None:
        """Replace the AdminComment in an ended job's record; slurmctld itself refuses that once a job has ended.

        An array's own id means all its tasks, so `name` is the task's name in commands, such as "12_3".

        Raises:
            NoAccountingError: There are no accounts.
            NoSuchJobError: They have no such job.
            GatewayError: sacctmgr failed.
        """
        change = ["modify", "job", "where", f"jobid={name or job_id}", "set", f"AdminComment={comment}"]
        try:
            self._commands.run(f"complete the record of job {job_id}", ["sacctmgr", "--immediate", *change])
        except GatewayError as error:
            if any(words in str(error) for words in _NO_RECORD):
                raise NoSuchJobError(
                    f"{error}: the accounts do not have job {job_id} yet, or have these words"
                ) from error
            raise _explained(error) from error


def _explained(error: GatewayError) -> GatewayError:
    """Return the same error, or the one that there are no accounts."""
    if any(words in str(error).lower() for words in _NO_DATABASE):
        return NoAccountingError(
            f"{error}. Slurm keeps no accounts here (AccountingStorageType in slurm.conf): reports need slurmdbd"
        )
    if isinstance(error, GatewayUnavailableError):
        return NoAccountingError(str(error))
    return error


def parse_runs(text: str) -> list[Run]:
    """Read sacct's output; a line with other fields, such as half of a comment with a line break, is left out."""
    lines = (line.split(_BETWEEN) for line in text.split("\n"))
    return [_run(fields) for fields in lines if len(fields) == len(_FIELDS) and fields[0].isdigit()]


def _run(fields: Sequence[str]) -> Run:
    job_id, name, user, account, qos, state, submit_s, start_s, end_s, elapsed_s, tres, comment = fields
    gpus = _GPUS.search(tres)
    return Run(
        job_id=int(job_id), user=user, account=account, qos=qos, state=state.partition(" ")[0],
        submit_s=_time(submit_s), start_s=_time(start_s), end_s=_time(end_s), elapsed_s=_time(elapsed_s),
        gpu_count=int(gpus[1]) if gpus else 0, admin_comment=_with_quotes(comment),
        task=name if "_" in name else "",
    )  # fmt: skip


def _time(text: str) -> int:
    """Read a time; "Unknown" and "None" are 0."""
    return int(text) if text.isdigit() else 0


def _with_quotes(comment: str) -> str:
    """Undo sacctmgr's change of quotes in Muri's own words."""
    words = comment.split(" ")
    return " ".join(word.replace("`", '"') if word.startswith("muri") and '"' not in word else word for word in words)
