"""What a site allows: limits of partitions, QOS and associations, and Slurm's words for a limit that is reached."""

import re
from dataclasses import dataclass
from typing import Final

from muri.errors import MuriError


class LimitTextError(MuriError, ValueError):
    """Slurm's text of a limit cannot be read; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Tres:
    """An amount of one of Slurm's trackable resources.

    Attributes:
        name: Slurm's name of it: "cpu", "mem", "node", "gres/gpu", "gres/gpu:a100", …
        amount: How much; of "mem" in MiB. Of a limit in minutes: this much for so many minutes.
    """

    name: str
    amount: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a QOS or an association sets; None, or a resource that is missing, means that it sets none.

    Attributes:
        max_wall_s: Longest time limit of a job.
        max_tres_per_job: Most that one job may have.
        max_tres_minutes_per_job: Most resources × minutes that one job may ask for.
        min_tres_per_job: Least that one job must have.
        max_jobs_per_user: Running jobs of a user; of an association: of it.
        max_submit_per_user: Waiting and running jobs of a user; of an association: of it.
        max_tres_per_user: Most that a user's running jobs may have together.
        max_jobs_per_account: Running jobs of an account.
        max_submit_per_account: Waiting and running jobs of an account.
        max_tres_per_account: Most that an account's running jobs may have together.
        grp_jobs: Running jobs of all, together with those of associations below.
        grp_submit: Waiting and running jobs of all.
        grp_tres: Most that all running jobs may have together.
    """

    max_wall_s: int | None = None
    max_tres_per_job: tuple[Tres, ...] = ()
    max_tres_minutes_per_job: tuple[Tres, ...] = ()
    min_tres_per_job: tuple[Tres, ...] = ()
    max_jobs_per_user: int | None = None
    max_submit_per_user: int | None = None
    max_tres_per_user: tuple[Tres, ...] = ()
    max_jobs_per_account: int | None = None
    max_submit_per_account: int | None = None
    max_tres_per_account: tuple[Tres, ...] = ()
    grp_jobs: int | None = None
    grp_submit: int | None = None
    grp_tres: tuple[Tres, ...] = ()


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """What a partition allows.

    Attributes:
        name: Its name.
        state: UP, DOWN (jobs wait), DRAIN (takes no new jobs) or INACTIVE (both).
        max_time_s: Longest time limit, None for any.
        qos: QOS whose limits hold for all of its jobs, "" for none.
        exclusive: Whether its jobs get whole nodes, which nothing can share.
        max_mem_per_node_mib: Most memory of a job on each node, None for all.
        max_mem_per_cpu_mib: Most memory for each CPU, None for any; Slurm gives a job that asks for more further CPUs.
        default_mem: Whether a job that asks for no memory gets some, not all of a node.
        cpus_per_gpu: CPUs that a job which names none gets for each GPU (DefCpuPerGPU), 0 where nothing is set.
        mem_per_gpu: Whether jobs get memory for each GPU where they name none (DefMemPerGPU).
        counts_mem: Whether Slurm gives out each MiB of a node's memory once.
    """

    name: str
    state: str = "UP"
    max_time_s: int | None = None
    qos: str = ""
    exclusive: bool = False
    max_mem_per_node_mib: int | None = None
    max_mem_per_cpu_mib: int | None = None
    default_mem: bool = False
    cpus_per_gpu: int = 0
    mem_per_gpu: bool = False
    counts_mem: bool = False

    @property
    def all_mem(self) -> bool:
        """Whether a job that asks for no memory gets all of its nodes', so that nothing runs beside it."""
        return self.counts_mem and not self.default_mem and not self.mem_per_gpu

    @property
    def has_defaults_per_gpu(self) -> bool:
        """Whether Slurm writes into each job what it gets for a GPU, and so refuses some changes of its GPUs."""
        return self.mem_per_gpu or self.cpus_per_gpu > 0


@dataclass(frozen=True, slots=True)
class Qos:
    """A QOS.

    Attributes:
        name: Its name.
        limits: Its limits.
        over_partition_qos: Whether its limits go before those of the partition's QOS.
        over_partition_time: Whether its jobs may exceed the partition's time limit.
        limit_factor: What an association's limits on resources are multiplied by for its jobs.
    """

    name: str
    limits: Limits = NO_LIMITS
    over_partition_qos: bool = False
    over_partition_time: bool = False
    limit_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Association:
    """An account, or a user in an account.

    Attributes:
        account: The account.
        user: The user, "" for the account itself.
        partition: The partition that it is for, "" for all.
        parent: The account above, "" for none. A user's association is below its account.
        limits: Its limits. All but the `grp_` ones include what is inherited from above.
    """

    account: str
    user: str = ""
    partition: str = ""
    parent: str = ""
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class SiteLimits:
    """What a site allows; the default is a site without limits.

    Attributes:
        partitions: All partitions whose limits could be read.
        enforced: Whether Slurm enforces limits of QOS and associations.
        qos: All QOS whose limits could be read.
        associations: All associations of this cluster whose limits could be read.
        priority_type: PriorityType.
        why_unknown: Why limits could not be read at all, "" when they could.
    """

    partitions: tuple[PartitionLimits, ...] = ()
    enforced: bool = False
    qos: tuple[Qos, ...] = ()
    associations: tuple[Association, ...] = ()
    priority_type: str = ""
    why_unknown: str = ""

    def partition(self, name: str) -> PartitionLimits:
        """Return what a partition allows; one that is not known sets nothing."""
        return next((each for each in self.partitions if each.name == name), PartitionLimits(name))


NO_SITE_LIMITS: Final = SiteLimits()


_DURATION: Final = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<clock>\d{1,9}(?::\d{1,9}){0,2})")
_AMOUNT: Final = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,18})?)(?P<unit>[KMGTP]?)")
_MEM_UNITS_MIB: Final = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_COUNT_UNITS: Final = {"": 1.0, "K": 1024.0, "M": 1024.0**2, "G": 1024.0**3, "T": 1024.0**4, "P": 1024.0**5}


def parse_duration_s(text: str) -> int | None:
    """Read a time limit such as "2-00:00:00", "30:00" or "90" (minutes); None for "", UNLIMITED and NONE.

    Raises:
        LimitTextError: It is none.
    """
    if text.upper() in ("", "UNLIMITED", "INFINITE", "NONE", "N/A"):
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise LimitTextError(f"{text!r} is not a time limit")
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # MM[:SS]
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_tres(text: str) -> tuple[Tres, ...]:
    """Read resources such as "cpu=4,mem=64G,gres/gpu:a100=2".

    Raises:
        LimitTextError: An item has another form.
    """
    return tuple(_tres(item) for item in text.split(",") if item)


def _tres(item: str) -> Tres:
    name, _, value = item.partition("=")
    match = _AMOUNT.fullmatch(value)
    if match is None or not name:
        raise LimitTextError(f"{item!r} is not a resource with an amount")
    units = _MEM_UNITS_MIB if name == "mem" else _COUNT_UNITS
    return Tres(name, int(float(match["number"]) * units[match["unit"]]))


def parse_count(text: str) -> int | None:
    """Read a limit of a count; None for "" and UNLIMITED.

    Raises:
        LimitTextError: It is none.
    """
    if text.upper() in ("", "UNLIMITED", "N/A"):
        return None
    if not re.fullmatch("[0-9]{1,18}", text):
        raise LimitTextError(f"{text[:80]!r} is not a count")
    return int(text)


_LIMIT_REASON: Final = re.compile(
    r"(Assoc(Grp|Max)|Association(Job|Resource|Time)Limit|QOS(Grp|Max|Min|Job|Resource|Time|Usage)|Max\w+Per(Account|User)"
    r"|Partition(Node|Time)Limit|AccountingPolicy|MaxMemPerLimit)\w*"
)
"""Reasons of Slurm 22.05 and 26.05 that name a limit of an association, a QOS or a partition."""

_COMPETES: Final = frozenset({"", "None", "Priority", "Resources"})

_LIMIT_REFUSALS: Final = (
    "accounting/qos policy",
    "requested time limit is invalid",
    "required partition not available",
    "requested partition configuration not available",
    "node count specification invalid",
)


def is_limit_reason(reason: str) -> bool:
    """Whether a job's reason for waiting is a limit of its partition, QOS or association.

    Args:
        reason: Slurm's word, such as "QOSMaxGRESPerUser".
    """
    return _LIMIT_REASON.fullmatch(_first_word(reason)) is not None


def will_start_by_itself(reason: str) -> bool:
    """Whether a job with this reason for waiting starts as soon as it has resources: nothing else stands in its way.

    Slurm will give it the GPUs that it waits for. With any other reason (BadConstraints, ReqNodeNotAvail, Reservation,
    Dependency, BeginTime, Licenses, JobHeldUser, limits, …) free GPUs do not help it.
    """
    return reason.strip() in _COMPETES


def is_limit_refusal(text: str) -> bool:
    """Whether Slurm refused a submission or a change because of a limit; it may be accepted later, or smaller.

    Args:
        text: Slurm's words. Those of sbatch begin with the reason, such as "QOSMaxSubmitJobPerUserLimit".
    """
    lowered = text.lower()
    return any(words in lowered for words in _LIMIT_REFUSALS) or any(map(is_limit_reason, re.findall(r"\w+", text)))


def _first_word(reason: str) -> str:
    return re.split(r"[,( ]", reason.strip(), maxsplit=1)[0]
