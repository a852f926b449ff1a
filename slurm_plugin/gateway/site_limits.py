"""Read a site's limits from scontrol and sacctmgr, some minutes apart.

Limits of QOS and associations come from slurmdbd through sacctmgr. `scontrol show assoc_mgr` needs no slurmdbd, but it
shows neither a QOS's flags nor, before a user's first job, its limits for each user.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeVar

from muri.slurm_plugin.gateway.base import GatewayError
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

log = logging.getLogger(__name__)

_KEEP_S: Final = 300.0
_RETRY_S: Final = 60.0

_ENFORCING: Final = frozenset({"limits", "safe", "all"})
"""Words of AccountingStorageEnforce with which slurmctld enforces limits of QOS and associations."""

# Slurm's names of the columns that hold limits, each with the field of Limits.
_COMMON_TRES: Final = {
    "MaxTRES": "max_tres_per_job",
    "MaxTRESMins": "max_tres_minutes_per_job",
    "GrpTRES": "grp_tres",
}
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
    **_COMMON_COUNTS,
    "MaxJobs": "max_jobs_per_user",
    "MaxSubmitJobs": "max_submit_per_user",
}
_COUNTS: Final = _QOS_COUNTS | _ASSOCIATION_COUNTS
_QOS_COLUMNS: Final = ("Name", "Flags", "LimitFactor", "MaxWall", *_QOS_COUNTS, *_TRES)
_ASSOCIATION_COLUMNS: Final = (
    "Account", "User", "Partition", "ParentName", "MaxWall", *_ASSOCIATION_COUNTS, *_COMMON_TRES,
)  # fmt: skip

_FIELD: Final = re.compile(r"(\w+)=(\S*)")
_JOB_DEFAULT: Final = re.compile(r"(\w+)=(\d{1,18})")
_MOST_MEM: Final = ("MaxMemPerNode", "MaxMemPerCPU")

Record = TypeVar("Record")


class Commands(Protocol):
    """A way to run Slurm's commands."""

    def run(self, action: str, arguments: Sequence[str]) -> str:
        """Run one command and return its output.

        Raises:
            GatewayError: It failed.
        """
        ...


class LimitsReader:
    """Reads a site's limits and keeps them for some minutes.

    A limit that changed is seen later; Slurm enforces it anyway.

    What cannot be read costs as little as possible: a line costs itself, and what was read before is kept. Nothing is
    raised.

    Args:
        commands: How commands are run.
        now: The clock, in seconds.
    """

    def __init__(self, commands: Commands, now: Callable[[], float] = time.monotonic) -> None:
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
        settings = config_settings(self._run("scontrol", "show", "config"))
        partitions = tuple(read_partitions(self._run("scontrol", "--all", "--oneliner", "show", "partition"), settings))
        enforced = limits_enforced(settings)
        found = SiteLimits(partitions, enforced, priority_type=settings.get("PriorityType", ""))
        if not enforced:
            return found
        cluster = settings.get("ClusterName", "")
        qos = self._accounting("qos", _QOS_COLUMNS)
        associations = self._accounting("associations", _ASSOCIATION_COLUMNS, f"cluster={cluster}")
        return replace(found, qos=tuple(read_qos(qos)), associations=tuple(read_associations(associations)))

    def _accounting(self, kind: str, columns: Sequence[str], *conditions: str) -> str:
        return self._run("sacctmgr", "-nP", "show", kind, *conditions, f"format={','.join(columns)}")

    def _run(self, *arguments: str) -> str:
        return self._commands.run("read the site's limits", arguments)


def config_settings(text: str) -> dict[str, str]:
    """Parse `scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def limits_enforced(settings: Mapping[str, str]) -> bool:
    """Whether slurmctld enforces limits of QOS and associations.

    Args:
        settings: Of `scontrol show config`.
    """
    return bool(_ENFORCING.intersection(settings.get("AccountingStorageEnforce", "").lower().split(",")))


def read_partitions(text: str, settings: Mapping[str, str]) -> Iterator[PartitionLimits]:
    """Read `scontrol --oneliner show partition`; a line that cannot be read is logged and left out.

    Args:
        text: What it printed.
        settings: The cluster's, of `scontrol show config`; a partition's own go before.
    """
    return _each(text, partial(_partition, settings=settings))


def read_qos(text: str) -> Iterator[Qos]:
    """Read `sacctmgr -nP show qos`; a line that cannot be read is logged and left out."""
    return _each(text, _qos)


def read_associations(text: str) -> Iterator[Association]:
    """Read `sacctmgr -nP show associations`; a line that cannot be read is logged and left out."""
    return _each(text, _association)


def _each(text: str, read: Callable[[str], Record]) -> Iterator[Record]:
    for line in filter(str.strip, text.splitlines()):
        try:
            yield read(line)
        except LimitTextError as error:
            log.warning(
                "a limit cannot be read, so jobs that it concerns run alone: %s; in the line %.200r", error, line
            )


def _partition(line: str, settings: Mapping[str, str]) -> PartitionLimits:
    fields = dict(_FIELD.findall(line))
    if "PartitionName" not in fields:
        raise LimitTextError("it names no partition")
    # A partition's most memory is for each node or for each CPU, and takes the place of the cluster's, whichever it is.
    most_mem = fields if any(_limit_of(fields, name) is not None for name in _MOST_MEM) else settings
    defaults = (_JOB_DEFAULT.findall(each.get("JobDefaults", "")) for each in (settings, fields))
    per_gpu = {name: int(value) for found in defaults for name, value in found}
    own_select = fields.get("SelectTypeParameters", "NONE")
    select = settings.get("SelectTypeParameters", "") if own_select == "NONE" else own_select
    return PartitionLimits(
        name=fields["PartitionName"],
        state=fields.get("State", "UP"),
        max_time_s=parse_duration_s(fields.get("MaxTime", "")),
        qos="" if fields.get("QoS", "N/A") == "N/A" else fields["QoS"],
        exclusive=fields.get("OverSubscribe") == "EXCLUSIVE" or fields.get("Exclusive", "NO") not in ("NO", "USER"),
        max_mem_per_node_mib=_limit_of(most_mem, "MaxMemPerNode"),
        max_mem_per_cpu_mib=_limit_of(most_mem, "MaxMemPerCPU"),
        default_mem=_gives_mem(fields) or _gives_mem(settings),
        cpus_per_gpu=per_gpu.get("DefCpuPerGPU", 0),
        mem_per_gpu="DefMemPerGPU" in per_gpu,
        counts_mem="MEMORY" in select.upper(),
    )


def _limit_of(fields: Mapping[str, str], name: str) -> int | None:
    return parse_count(fields.get(name, ""))


def _gives_mem(settings: Mapping[str, str]) -> bool:
    """Whether a job gets memory that asked for none: by the cluster's settings or a partition's."""
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
