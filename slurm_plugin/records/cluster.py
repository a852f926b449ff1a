"""Slurm's state as Muri sees it: frozen records that can be written to a file and replayed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from muri.errors import UsageError
from muri.slurm_plugin.records.limits import NO_SITE_LIMITS, NOT_TRIED, GpuRemoval, SiteLimits
from muri.text import json_of

SPECIAL_EXIT: Final = "SpecialExit"
"""Reason of a job that a site's RequeueExitHold, or `scontrol requeuehold state=SpecialExit`, has set aside."""

_SET_ASIDE: Final = frozenset({SPECIAL_EXIT, "JobHoldMaxRequeue"})
_COMPETES: Final = frozenset({"", "None", "Priority", "Resources"})
_MAYBE_DOWN: Final = "Nodes_required_for_job_are_DOWN"
"""How Slurm begins its reason also where another partition's job only comes first."""

#: Raised whenever a file of the old form could no longer be read.
SCHEMA_VERSION = 1

_SCHEMA = "muri-snapshot"


class JobState(StrEnum):
    """A job's base state in Slurm's own words; UNKNOWN for one that this version cannot name."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"

    @property
    def is_active(self) -> bool:
        """Whether the job still waits or runs; an unknown state counts, so that nothing is forgotten."""
        return self in _ACTIVE


_ACTIVE = {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING, JobState.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the queue. Times are seconds since the epoch, 0 when not known; texts are "" when not set."""

    job_id: int  # Of an array's pending tasks, the id of the record that stands for them
    user: str
    uid: int
    gid: int
    account: str
    partition: str  # The first, when several were asked for
    qos: str
    name: str
    state: JobState
    reason: str  # Why it waits, in Slurm's word ("JobHeldUser", "Dependency", …)
    held: bool  # Its priority is 0: only a release lets it start
    submit_s: float
    begin_s: float  # Earliest start asked for with --begin
    start_s: float
    end_s: float
    time_limit_s: int  # 0 when unlimited or unknown
    gpu_count: int  # GPUs of the whole job
    gpu_request: str  # Per node ("gres/gpu:1")
    node_count: int
    cpu_count: int  # CPUs of the whole job
    cpus_per_task: int
    mem_per_node_mib: int  # 0 when not set
    nodes: str  # Allocated nodes, a folded host list
    required_nodes: str  # Nodes asked for by name, a folded host list
    dependency: str
    can_requeue: bool
    restart_count: int  # How often it was requeued
    exit_code: int  # Of the batch script, 0 while it has none
    batch: bool
    array: bool  # It is an array's task, or the record of several
    het: bool  # It is part of a heterogeneous job
    command: str  # The batch script's path as submitted
    work_dir: str
    submit_line: str  # The sbatch command as typed, its words joined by spaces
    admin_comment: str  # Muri's tags among others' text
    comment: str  # Its own comment, which its user may write
    mem_per_cpu_mib: int = 0  # Where memory was asked for (or is the default) in this form
    priority: int = 1  # 0 when held
    nice: int = 0
    licenses: str = ""  # Such as "matlab:1,muri_gate:1"
    reservation: str = ""
    features: str = ""  # Asked for with --constraint
    excluded_nodes: str = ""  # Folded host list
    special: tuple[str, ...] = ()
    """Options in its request that Muri does not carry over to jobs of its own, such as "--exclusive", in alphabetical
    order. Such a job runs alone, its request untouched."""
    array_job_id: int = 0  # The job array that it belongs to, 0 for none
    array_tasks: str = ""
    """The array's tasks that this record stands for: "3" for one, "4-9,12" for those that wait and have no record of
    their own; "" where that is not known."""
    array_limit: int = 0  # How many of the array's tasks may run at once (`--array=…%N`), 0 for any number
    cpus_per_gpu: int = 0  # CPUs for each GPU that it gets because its request names none
    oversubscribe: bool = False  # It shares CPUs with others of its kind where its partition allows that

    @property
    def given_cpus(self) -> int:
        """CPUs that Slurm gives it, which are more than it asks for where a site has a default for each GPU."""
        return max(self.cpu_count, self.cpus_per_gpu * self.gpu_count)

    @property
    def several_tasks(self) -> bool:
        """Whether it is the record of an array's tasks that wait and have none of their own."""
        return bool(self.array_tasks) and not self.array_tasks.isdecimal()

    @property
    def tasks(self) -> Iterator[int]:
        """The array's tasks that this record stands for, in their order."""
        return task_numbers(self.array_tasks)

    @property
    def job_count(self) -> int:
        """How many jobs this record stands for."""
        return sum(1 for _ in self.tasks) if self.several_tasks else 1

    @property
    def waits_for_resources(self) -> bool:
        """Whether it starts as soon as it has resources, by Slurm's reason; if not, free GPUs do not help."""
        return self.reason.strip() in _COMPETES or self.reason.startswith(_MAYBE_DOWN)

    @property
    def unknown_task(self) -> bool:
        """Whether it belongs to an array and stands for more than one task, or for an unknown one."""
        return self.array and not self.array_tasks.isdecimal()

    @property
    def name_in_slurm(self) -> str:
        """The name of this record alone in Slurm's commands: "12", "12_3" or "12_[4-9]".

        The bare id of an array means all its tasks, including running ones.
        """
        if not self.array_tasks:
            return str(self.job_id)
        return f"{self.array_job_id}_{f'[{self.array_tasks}]' if self.several_tasks else self.array_tasks}"

    @property
    def task_count(self) -> int:
        """Tasks that Slurm counts CPUs for."""
        return max(1, self.cpu_count // max(1, self.cpus_per_task))

    @property
    def set_aside(self) -> bool:
        """Whether Slurm holds it for inspection; released without, it would only fail again."""
        return self.held and self.reason in _SET_ASIDE

    @property
    def gpus_per_node(self) -> int:
        """GPUs on each of its nodes."""
        return self.gpu_count // max(1, self.node_count)


@dataclass(frozen=True, slots=True)
class Node:
    """One node; CPUs and memory are those that jobs may have, 0 when unknown."""

    name: str
    usable: bool
    """Whether any new job can start there (it is not down, drained or unknown). A reservation alone does not close a
    node: its own jobs start there."""
    state: str  # Slurm's text, for people
    partitions: tuple[str, ...]
    cpu_count: int
    cpus_allocated: int
    gpu_count: int
    gpus_allocated: int
    gpu_type: str  # GRES type, "gpu" when untyped
    mem_mib: int = 0
    mem_allocated_mib: int = 0
    threads_per_core: int = 1  # CPUs of one core, which jobs usually get together
    features: tuple[str, ...] = ()  # That --constraint may ask for
    gpus_in_use: tuple[int, ...] = ()  # Slurm's indices of the GPUs given out; () where it does not show them
    gpu_islands: tuple[tuple[int, ...], ...] = ()
    """Indices of all its GPUs by island; () while unknown. Gateways leave it open; the controller, which reads
    gres.conf, fills it in."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation, active or to come. Times are seconds since the epoch."""

    name: str
    nodes: str  # That it sets aside, a folded host list
    start_s: float
    end_s: float
    flags: tuple[str, ...] = ()  # Slurm's, in upper case
    licenses: str = ""  # That it withholds


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A job whose record could not be read, and the reason; Muri leaves it alone."""

    job_id: int  # 0 where not even that could be read
    why: str


@dataclass(frozen=True)
class NodeIndex:
    """The nodes of a snapshot, to look up by name and by partition."""

    nodes: tuple[Node, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Each node by its name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def by_partition(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes of each partition, by name."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for partition in node.partitions:
                found.setdefault(partition, []).append(node)
        return {partition: tuple(nodes) for partition, nodes in found.items()}

    @cached_property
    def _gpu_nodes(self) -> Mapping[str, list[Node]]:
        """The nodes with GPUs of each partition that has some."""
        found = ((name, [node for node in nodes if node.gpu_count]) for name, nodes in self.by_partition.items())
        return {partition: nodes for partition, nodes in found if nodes}

    @cached_property
    def gpu_types(self) -> Mapping[str, str]:
        """The GPU type of each partition that has GPUs, the first in alphabetical order where it has several."""
        return {partition: min(node.gpu_type for node in nodes) for partition, nodes in self._gpu_nodes.items()}

    @cached_property
    def most_cpus(self) -> Mapping[str, int]:
        """The most CPUs of a node with GPUs, by partition."""
        return {partition: max(node.cpu_count for node in nodes) for partition, nodes in self._gpu_nodes.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue and the nodes at one instant, in seconds since the epoch."""

    taken_s: float
    cluster: str
    slurm_version: str  # Of the slurmctld that answered
    jobs: tuple[Job, ...]  # All that slurmctld remembers, by job id
    nodes: tuple[Node, ...]  # By name
    reservations: tuple[Reservation, ...] = ()  # By name
    unreadable: tuple[Unreadable, ...] = ()  # Jobs that are missing in `jobs`
    limits: SiteLimits = NO_SITE_LIMITS  # Some minutes older than the rest
    gpu_removal: GpuRemoval = NOT_TRIED
    """Whether a waiting job's GPUs can be taken away. Gateways leave it open; the controller, which tries it, fills it
    in."""


@dataclass(frozen=True, slots=True)
class JobChange:
    """A change of a pending job; None leaves a field as it is, "" clears it."""

    gpu_request: str | None = None  # Per node; `Snapshot.gpu_removal` says which one takes the GPUs away
    required_nodes: str | None = None  # Folded host list
    cpu_count: int | None = None  # Of the whole job and the least per node; with `cpus_per_task` for one task
    cpus_per_task: int | None = None
    dependency: str | None = None
    mem_per_node_mib: int | None = None
    mem_per_cpu_mib: int | None = None  # In place of `mem_per_node_mib`, never both
    time_limit_s: int | None = None  # Rounded up to Slurm's whole minutes; 0 = unlimited
    start_now: bool = False  # Slurm lets a requeued job wait for `cred_expire`, 120 s by default, otherwise
    admin_comment: str | None = None
    name: str | None = None  # Of a running job, too
    licenses: str | None = None  # Of a running job, too
    nice: int | None = None  # Slurm ignores it where the priority was fixed
    oversubscribe: bool | None = None
    """True: its CPUs may be shared (OverSubscribe). Slurm cannot take that back, so False leaves a job as it is: the
    opposite that Slurm knows stands for a node of its own (`--exclusive`)."""
    owner: tuple[int, int] | None = None
    """The uid and gid of the job's user, in whose name its request is changed, and within whose limits; None: root
    changes it, and Slurm exempts what root changes from the limits of partition and QOS, for good."""

    @property
    def by_root(self) -> "JobChange":
        """The part that only an administrator may change."""
        return JobChange(
            admin_comment=self.admin_comment, licenses=self.licenses, nice=self.nice, oversubscribe=self.oversubscribe
        )

    @property
    def by_owner(self) -> "JobChange":
        """The rest: the job's request."""
        return replace(self, admin_comment=None, licenses=None, nice=None, oversubscribe=None)

    @property
    def least_cpus(self) -> int | None:
        """CPUs on each node that the job cannot do without; sbatch sets them from --cpus-per-task."""
        return self.cpus_per_task if self.cpus_per_task is not None else self.cpu_count

    @property
    def has_several_tasks(self) -> bool:
        """Whether its CPUs are for several tasks."""
        return self.cpu_count is not None and self.cpu_count != self.least_cpus


@dataclass(frozen=True, slots=True)
class NewJob:
    """A batch job to submit in a user's name; "" and 0 stand for Slurm's defaults."""

    name: str
    uid: int
    gid: int
    script: str  # Text of the batch script
    environment: dict[str, str]  # The whole environment of the script
    partition: str
    account: str = ""
    qos: str = ""
    work_dir: str = "/"
    gpu_request: str = ""  # GRES per node ("gres/gpu:1")
    node_count: int = 1
    cpu_count: int = 1  # CPUs for each task
    mem_per_node_mib: int = 0
    time_limit_s: int = 0
    required_nodes: str = ""  # Folded host list
    output: str = "/dev/null"  # Path of stdout and stderr
    admin_comment: str = ""
    requeue: bool = False  # Whether Slurm may requeue it
    tasks_per_node: int = 1
    licenses: str = ""
    reservation: str = ""
    features: str = ""  # As --constraint takes them
    excluded_nodes: str = ""  # Folded host list
    oversubscribe: bool = False  # Whether its CPUs may be shared (--oversubscribe)
    muri: str = ""
    """Value of --muri; "" where the job goes past Muri: it is submitted held then, to be tagged by root."""


class SnapshotFileError(UsageError):
    """A file is not a snapshot; the text names the place of the error."""


def dump_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot as JSON text: the same snapshot gives the same bytes, whatever order it was read in."""
    document: dict[str, Any] = {"schema": _SCHEMA, "schema_version": SCHEMA_VERSION} | asdict(snapshot)
    for name, key in (("jobs", "job_id"), ("nodes", "name"), ("reservations", "name")):
        document[name] = sorted(document[name], key=lambda record: record[key])
    # In ASCII alone: users' texts hold bytes that cannot be decoded, and characters that terminals obey.
    return json.dumps(document, indent=1) + "\n"


def load_snapshot(path: Path) -> Snapshot:
    """Read a snapshot file.

    Raises:
        SnapshotFileError: It cannot be read or is not a snapshot.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise SnapshotFileError(f"{path}: cannot be read: {err}") from err
    return parse_snapshot(text, str(path))


def parse_snapshot(text: str, source: str = "snapshot") -> Snapshot:
    """Parse the text of `dump_snapshot`; `source` is the file's name, for messages.

    Raises:
        SnapshotFileError: It is not a snapshot; the text says where and why.
    """
    try:
        document = json_of(text)
    except ValueError as err:
        raise SnapshotFileError(f"{source}: it is not JSON: {err}") from err
    if not isinstance(document, dict) or document.pop("schema", None) != _SCHEMA:
        raise SnapshotFileError(f"{source}: it is not a snapshot; make one with `muri plan --save {source}`")
    if (version := document.pop("schema_version", None)) != SCHEMA_VERSION:
        raise SnapshotFileError(
            f"{source}: schema_version is {version!r}, this Muri reads {SCHEMA_VERSION}; take the snapshot again"
        )
    try:
        snapshot: Snapshot = record_of(Snapshot, document, source)
        _refuse_duplicates([job.job_id for job in snapshot.jobs], f"{source}: jobs", "job_id")
        _refuse_duplicates([node.name for node in snapshot.nodes], f"{source}: nodes", "name")
    except RecordError as error:
        raise SnapshotFileError(str(error)) from error
    return snapshot


class RecordError(ValueError):
    """A value is not a record of the wanted kind; the text names the place of the error."""


# pydantic refuses texts with bytes that cannot be decoded, which users' texts hold, and is missing in users' Pythons.
def record_of(kind: Any, value: object, place: str = "", *, exact: bool = True) -> Any:
    """Build a dataclass from JSON, checking names and types of all fields; unless `exact`, others are ignored.

    Raises:
        RecordError: A field is missing, unknown or of another type.
    """
    if not isinstance(value, Mapping):
        raise RecordError(f"{place}: an object is expected, not {_shown(value)}")
    hints = _hints(kind)
    # Fields with a default came later: older files lack them.
    if missing := [each.name for each in fields(kind) if each.default is MISSING and each.name not in value]:
        raise RecordError(f"{place}: {', '.join(missing)} missing")
    if exact and (unknown := sorted(set(value) - set(hints))):
        raise RecordError(f"{place}: unknown {', '.join(unknown)}; known are {', '.join(hints)}")
    given = {name: (hint, value[name], f"{place}: {name}") for name, hint in hints.items() if name in value}
    return kind(**{name: _value(*each, exact=exact) for name, each in given.items()})


_hints: Final = lru_cache(get_type_hints)


def _value(kind: Any, value: object, place: str, *, exact: bool) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise RecordError(f"{place}: a list is expected, not {_shown(value)}")
        item = get_args(kind)[0]
        return tuple(_value(item, each, f"{place}[{index}]", exact=exact) for index, each in enumerate(value))
    if is_dataclass(kind):
        return record_of(kind, value, place, exact=exact)
    if kind is JobState:
        if str(value) not in JobState.__members__:
            known = ", ".join(JobState)
            raise RecordError(f"{place}: {_shown(value)} is not a job state; known are {known}")
        return JobState(str(value))
    if isinstance(kind, UnionType):
        return None if value is None else _value(get_args(kind)[0], value, place, exact=exact)
    allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{place}: {kind.__name__} is expected, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _refuse_duplicates(keys: list[Any], place: str, name: str) -> None:
    places: dict[Any, int] = {}
    for index, key in enumerate(keys):
        if places.setdefault(key, index) != index:
            raise RecordError(f"{place}[{index}]: {name} {key!r} appears twice")


def task_numbers(text: str) -> Iterator[int]:
    """Yield the tasks in Slurm's text, such as 0, 2, 4 and 9 for "0-4:2,9"."""
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))
