"""Limits of a site's partitions, QOS and associations, Slurm's words for them, and removal of GPUs. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from muri.errors import MuriError


class LimitTextError(MuriError, ValueError):
    """Slurm's text of a limit cannot be read; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Tres:
    """An amount of one of Slurm's trackable resources."""

    name: str  # Slurm's: "cpu", "mem", "node", "gres/gpu", "gres/gpu:a100", …
    amount: int  # Of "mem" in MiB; of a limit in minutes: this much for so many minutes


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a QOS or an association sets; None, or a resource that is missing, stands for no limit.

    Those per user of an association count its own jobs. Limits on submission count waiting and running jobs.
    """

    max_wall_s: int | None = None  # Longest time limit of a job
    max_tres_per_job: tuple[Tres, ...] = ()
    max_tres_minutes_per_job: tuple[Tres, ...] = ()  # Resources × minutes that one job may ask for
    min_tres_per_job: tuple[Tres, ...] = ()
    max_jobs_per_user: int | None = None
    max_submit_per_user: int | None = None
    max_tres_per_user: tuple[Tres, ...] = ()
    max_jobs_per_account: int | None = None
    max_submit_per_account: int | None = None
    max_tres_per_account: tuple[Tres, ...] = ()
    grp_jobs: int | None = None  # Running jobs of all, together with those of associations below
    grp_submit: int | None = None
    grp_tres: tuple[Tres, ...] = ()


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """Limits and defaults of a partition; None stands for no limit, "" and 0 for no default."""

    name: str
    state: str = "UP"  # UP, DOWN (jobs wait), DRAIN (takes no new jobs) or INACTIVE (both)
    max_time_s: int | None = None
    qos: str = ""  # QOS whose limits hold for all of its jobs
    exclusive: bool = False  # Its jobs get whole nodes, which nothing can share
    max_mem_per_node_mib: int | None = None
    max_mem_per_cpu_mib: int | None = None  # Slurm gives a job that asks for more further CPUs
    default_mem: bool = False  # A job that asks for no memory gets some, not all of a node
    cpus_per_gpu: int = 0  # DefCpuPerGPU, for jobs that name no CPUs
    mem_per_gpu: bool = False  # Jobs get memory for each GPU where they name none (DefMemPerGPU)
    counts_mem: bool = False  # Slurm gives out each MiB of a node's memory once
    oversubscribe: int = 1  # How many jobs that agree to it may share a CPU (OverSubscribe=YES:N), 1 for none
    shares_all: bool = False  # Its jobs share CPUs whether they agree or not (OverSubscribe=FORCE:N)

    @property
    def all_mem(self) -> bool:
        """Whether a job that asks for no memory gets all of its nodes', so that nothing runs beside it."""
        return self.counts_mem and not self.default_mem and not self.mem_per_gpu


@dataclass(frozen=True, slots=True)
class Qos:
    """A QOS."""

    name: str
    limits: Limits = NO_LIMITS
    over_partition_qos: bool = False  # Its limits go before those of the partition's QOS
    over_partition_time: bool = False  # Its jobs may exceed the partition's time limit
    limit_factor: float = 1.0  # Multiplies an association's limits on resources for its jobs


@dataclass(frozen=True, slots=True)
class Association:
    """An account, or a user in an account. All limits but the `grp_` ones include those inherited from above."""

    account: str
    user: str = ""  # "" for the account itself
    partition: str = ""  # "" for all
    parent: str = ""  # The account above; a user's association is below its account
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class SiteLimits:
    """All limits of a site that could be read; the default is a site without limits."""

    partitions: tuple[PartitionLimits, ...] = ()
    enforced: bool = False  # Slurm enforces limits of QOS and associations
    qos: tuple[Qos, ...] = ()
    associations: tuple[Association, ...] = ()
    priority_type: str = ""
    why_unknown: str = ""  # Why limits could not be read at all, "" when they could

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits; an unknown one has none."""
        return next((each for each in self.partitions if each.name == name), PartitionLimits(name))


NO_SITE_LIMITS: Final = SiteLimits()


_DURATION: Final = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<clock>\d{1,9}(?::\d{1,9}){0,2})")
_AMOUNT: Final = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,18})?)(?P<unit>[KMGTP]?)")
MIB_OF_UNIT: Final = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_COUNT_UNITS: Final = {"": 1.0, "K": 1024.0, "M": 1024.0**2, "G": 1024.0**3, "T": 1024.0**4, "P": 1024.0**5}


def parse_duration_s(text: str) -> int | None:
    """Read a time limit such as "2-00:00:00", "30:00" or "90" (minutes); None for "", UNLIMITED and NONE.

    Raises:
        LimitTextError: It is malformed.
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
    units = MIB_OF_UNIT if name == "mem" else _COUNT_UNITS
    return Tres(name, int(float(match["number"]) * units[match["unit"]]))


def parse_count(text: str) -> int | None:
    """Read a limit of a count; None for "" and UNLIMITED.

    Raises:
        LimitTextError: It is malformed.
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

_LIMIT_REFUSALS: Final = (
    "accounting/qos policy",
    "requested time limit is invalid",
    "required partition not available",
    "requested partition configuration not available",
    "node count specification invalid",
)


def is_limit_reason(reason: str) -> bool:
    """Whether Slurm's reason for waiting, such as "QOSMaxGRESPerUser", names a limit."""
    return _LIMIT_REASON.fullmatch(re.split(r"[,( ]", reason.strip(), maxsplit=1)[0]) is not None


def is_limit_refusal(text: str) -> bool:
    """Whether Slurm refused a submission or a change because of a limit; it may be accepted later, or smaller.

    Slurm's text from sbatch begins with the reason, such as "QOSMaxSubmitJobPerUserLimit".
    """
    lowered = text.lower()
    return any(words in lowered for words in _LIMIT_REFUSALS) or any(map(is_limit_reason, re.findall(r"\w+", text)))


WAYS: Final = ("gres/gpu:0,gres/muri:1", "gres/gpu:0")
"""Requests per node in whose favor a job may lose its GPUs, the better one first.

Slurm 24.11 replaces a waiting job's request only by one that asks for something; the count-only GRES `muri` does that,
and counts who shares. Slurm 26.05 takes either.
"""

PER_NODE: Final = "--gres=gpu:N"
TYPED: Final = "--gres=gpu:TYPE:N"
EVERY_FORM: Final = (PER_NODE, "--gpus-per-node=N", "--gpus=N", "--gpus-per-task=N")
"""Those of jobs without a type of GPU."""

_TRY_AGAIN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class TriedForm:
    """The outcome of trying to take GPUs away from a job that asked for them in one form."""

    form: str  # Such as "--gres=gpu:N"
    request: str = ""  # The request per node that took them away; "" where none did
    why: str = ""  # Why none did, or why that is not known
    conclusive: bool = True  # The answer holds until slurmctld starts anew


@dataclass(frozen=True, slots=True)
class GpuRemoval:
    """Whether, and by which request, a waiting job's GPUs can be taken away, which a group needs: found by trying."""

    site: str = ""
    """Slurm's version, start and settings, and the partitions that Muri serves; a change means another try."""
    tried_s: float = 0.0  # Seconds since the epoch
    forms: tuple[TriedForm, ...] = ()
    why: str = "it has not been tried yet whether Slurm can take a waiting job's GPUs away"  # "" when tried

    def way_for(self, gpu_request: str) -> TriedForm:
        """Return the outcome for jobs with a request per node, such as "gres/gpu:a100:2"."""
        wanted = TYPED if re.search(r"gpu:[A-Za-z_]", gpu_request) else PER_NODE
        found = next((form for form in self.forms if form.form == wanted), None)
        return found or TriedForm(wanted, why=self.why or "this form of request was not tried", conclusive=False)

    def holds(self, site: str, now_s: float) -> bool:
        """Whether there is no need to try again, on this site at this time."""
        settled = bool(self.forms) and all(form.conclusive for form in self.forms)
        return self.site == site and (settled or 0 <= now_s - self.tried_s < _TRY_AGAIN_S)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job that asks for GPUs can be submitted."""

    partition: str  # One whose nodes have GPUs
    gpu_type: str  # "gpu" when untyped
    served: tuple[str, ...] = ()  # Partitions that Muri serves, as configured; empty for all


NOT_TRIED: Final = GpuRemoval()
