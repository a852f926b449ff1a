"""Slurm's state as Muri sees it: frozen records that can be written to a file and replayed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from muri.errors import UsageError
from muri.foreign import json_of
from muri.slurm_plugin.records.gpu_removal import NOT_TRIED, GpuRemoval
from muri.slurm_plugin.records.limits import NO_SITE_LIMITS, SiteLimits

SPECIAL_EXIT: Final = "SpecialExit"
"""Reason of a job that a site's RequeueExitHold, or `scontrol requeuehold state=SpecialExit`, has set aside."""

_SET_ASIDE: Final = frozenset({SPECIAL_EXIT, "JobHoldMaxRequeue"})

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
    """One job of the queue.

    Attributes:
        job_id: Slurm's job id; of an array's pending tasks, the id of the record that stands for them.
        user: Owner's name.
        uid: Owner's numeric id.
        gid: Owner's numeric group id.
        account: Slurm account, "" when accounting is off.
        partition: Partition name (the first, when several were asked for).
        qos: Quality of service, "" when none.
        name: Job name.
        state: Base state.
        reason: Why it waits, in Slurm's word ("JobHeldUser", "Dependency", …); "" when none.
        held: Priority is 0: nothing starts it but a release.
        submit_s: Submit time, seconds since the epoch.
        begin_s: Earliest start asked for with --begin, seconds since the epoch; 0 when none.
        start_s: Start time, 0 when it has not started.
        end_s: End time, 0 when it has not ended.
        time_limit_s: Time limit, 0 when unlimited or unknown.
        gpu_count: GPUs asked for by the whole job.
        gpu_request: Slurm's text of the per-node request ("gres/gpu:1"), "" when there is none.
        node_count: Nodes asked for.
        cpu_count: CPUs of the whole job.
        cpus_per_task: CPUs per task, 1 when not set.
        mem_per_node_mib: Memory per node asked for, 0 when not set.
        nodes: Nodes allocated, folded host list; "" while pending.
        required_nodes: Nodes asked for by name, folded host list.
        dependency: Dependency expression, "" when none.
        can_requeue: Whether Slurm may requeue it.
        restart_count: How often it was requeued.
        exit_code: Exit status of the batch script, 0 while it has none.
        batch: Whether it has a batch script.
        array: Whether it is an array's task, or the record of several.
        het: Whether it is part of a heterogeneous job.
        command: The batch script's path as submitted.
        work_dir: Working directory.
        submit_line: The sbatch command as typed, its words joined by spaces; "" when Slurm does not tell.
        admin_comment: AdminComment, Muri's tags among others' text.
        comment: The job's own comment, which its user may write.
        mem_per_cpu_mib: Memory per CPU, where it was asked for (or is the default) in this form; 0 otherwise.
        priority: Slurm's priority; 0 when held.
        nice: What it stands back in its priority (`--nice`).
        licenses: Licenses asked for, such as "matlab:1,muri_gate:1"; "" when none.
        reservation: Reservation asked for, "" when none.
        features: Node features asked for with --constraint, "" when none.
        excluded_nodes: Nodes that it must not get, folded host list.
        special: Options in its request that Muri does not carry over to jobs of its own, such as "--exclusive" or
            "--switches", in alphabetical order. Such a job runs alone, its request untouched.
        array_job_id: The job array that it belongs to, 0 for none.
        array_tasks: The array's tasks that this record stands for: "3" for one, "4-9,12" for those that wait and have
            no record of their own; "" where that is not known.
        array_limit: How many of the array's tasks may run at once (`--array=…%N`), 0 for any number.
        cpus_per_gpu: CPUs for each GPU that it gets because it names none, 0 where it names them or gets no more.
    """

    job_id: int
    user: str
    uid: int
    gid: int
    account: str
    partition: str
    qos: str
    name: str
    state: JobState
    reason: str
    held: bool
    submit_s: float
    begin_s: float
    start_s: float
    end_s: float
    time_limit_s: int
    gpu_count: int
    gpu_request: str
    node_count: int
    cpu_count: int
    cpus_per_task: int
    mem_per_node_mib: int
    nodes: str
    required_nodes: str
    dependency: str
    can_requeue: bool
    restart_count: int
    exit_code: int
    batch: bool
    array: bool
    het: bool
    command: str
    work_dir: str
    submit_line: str
    admin_comment: str
    comment: str
    mem_per_cpu_mib: int = 0
    priority: int = 1
    nice: int = 0
    licenses: str = ""
    reservation: str = ""
    features: str = ""
    excluded_nodes: str = ""
    special: tuple[str, ...] = ()
    array_job_id: int = 0
    array_tasks: str = ""
    array_limit: int = 0
    cpus_per_gpu: int = 0

    @property
    def given_cpus(self) -> int:
        """CPUs that Slurm gives it, which are more than it asks for where a site has a default for each GPU."""
        return max(self.cpu_count, self.cpus_per_gpu * self.gpu_count)

    @property
    def several_tasks(self) -> bool:
        """Whether it is the record of an array's tasks that wait and have none of their own."""
        return bool(self.array_tasks) and not self.array_tasks.isdecimal()

    @property
    def unknown_task(self) -> bool:
        """Whether it belongs to an array and stands for more than one task, or nobody knows for which."""
        return self.array and not self.array_tasks.isdecimal()

    @property
    def name_in_slurm(self) -> str:
        """What Slurm's commands call this record and no other: "12", "12_3" or "12_[4-9]".

        The bare id of an array means all its tasks, those included that run.
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
    """One node.

    Attributes:
        name: Node name.
        usable: Whether any new job can start there (it is not down, drained or unknown). A reservation alone does not
            close a node: its own jobs start there, and `Snapshot.reservations` tells for whom it is set aside.
        state: Slurm's text of the state, for people.
        partitions: Partitions that it belongs to.
        cpu_count: CPUs that jobs may have.
        cpus_allocated: CPUs given out.
        gpu_count: GPUs configured.
        gpus_allocated: GPUs given out.
        gpu_type: GRES type, "gpu" when untyped.
        mem_mib: Memory that jobs may have; 0 when unknown.
        mem_allocated_mib: Memory given out.
        threads_per_core: CPUs of one core, which jobs usually get together.
        features: Features that --constraint may ask for.
        gpus_in_use: Slurm's indices of the GPUs given out; () where it does not show them.
        gpu_islands: Indices of all its GPUs by island; () while unknown. Gateways leave it open; the controller, which
            reads gres.conf, fills it in.
    """

    name: str
    usable: bool
    state: str
    partitions: tuple[str, ...]
    cpu_count: int
    cpus_allocated: int
    gpu_count: int
    gpus_allocated: int
    gpu_type: str
    mem_mib: int = 0
    mem_allocated_mib: int = 0
    threads_per_core: int = 1
    features: tuple[str, ...] = ()
    gpus_in_use: tuple[int, ...] = ()
    gpu_islands: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation, active or to come.

    Attributes:
        name: Its name.
        nodes: Nodes that it sets aside, folded host list; "" when it has none.
        start_s: When it begins, seconds since the epoch.
        end_s: When it ends, seconds since the epoch.
        flags: Slurm's flags in upper case, such as "MAINT".
        licenses: Licenses that it withholds, "" when none.
    """

    name: str
    nodes: str
    start_s: float
    end_s: float
    flags: tuple[str, ...] = ()
    licenses: str = ""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A job whose record could not be read; Muri leaves it alone.

    Attributes:
        job_id: Slurm's job id, 0 where not even that could be read.
        why: What was wrong with the record.
    """

    job_id: int
    why: str


@dataclass(frozen=True)
class NodeIndex:
    """The nodes of a snapshot by name and by partition.

    Attributes:
        nodes: All nodes, by name.
    """

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

    def in_partition(self, partition: str) -> tuple[Node, ...]:
        """Return the nodes of a partition, none for one that is not known."""
        return self.by_partition.get(partition, ())

    @cached_property
    def gpu_types(self) -> Mapping[str, str]:
        """The GPU type of each partition that has GPUs, the first in alphabetical order where it has several."""
        types = {partition: {node.gpu_type for node in nodes if node.gpu_count} for partition, nodes in self._items}
        return {partition: min(found) for partition, found in types.items() if found}

    @cached_property
    def most_cpus(self) -> Mapping[str, int]:
        """The most CPUs that a node with GPUs has, by partition."""
        cpus = {partition: [node.cpu_count for node in nodes if node.gpu_count] for partition, nodes in self._items}
        return {partition: max(found) for partition, found in cpus.items() if found}

    @property
    def _items(self) -> tuple[tuple[str, tuple[Node, ...]], ...]:
        return tuple(self.by_partition.items())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue and the nodes at one instant.

    Attributes:
        taken_s: When, seconds since the epoch.
        cluster: ClusterName.
        slurm_version: Version of the slurmctld that answered.
        jobs: All jobs that slurmctld remembers, by job id.
        nodes: All nodes, by name.
        reservations: All reservations, by name.
        unreadable: Jobs that are missing in `jobs` because their records could not be read.
        limits: What the site allows; some minutes older than the rest.
        gpu_removal: Whether a waiting job's GPUs can be taken away. Gateways leave it open; the controller, which has
            it tried, fills it in.
    """

    taken_s: float
    cluster: str
    slurm_version: str
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]
    reservations: tuple[Reservation, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    limits: SiteLimits = NO_SITE_LIMITS
    gpu_removal: GpuRemoval = NOT_TRIED


@dataclass(frozen=True, slots=True)
class JobChange:
    """What to change in a pending job; None leaves a field as it is.

    Attributes:
        gpu_request: GRES request per node; what takes the GPUs away tells `Snapshot.gpu_removal`.
        required_nodes: Folded host list; "" clears it.
        cpu_count: CPUs of the whole job and the least per node; with `cpus_per_task` for one task.
        cpus_per_task: CPUs per task.
        dependency: Dependency expression; "" clears it.
        mem_per_node_mib: Memory per node.
        mem_per_cpu_mib: Memory per CPU; takes the place of `mem_per_node_mib`, never both.
        time_limit_s: Time limit, rounded up to Slurm's whole minutes; 0 = unlimited.
        start_now: Whether it may start at once. Slurm lets a requeued job wait for `cred_expire`, 120 s by default.
        admin_comment: The whole new AdminComment.
        name: Job name. Of a job that runs, too.
        licenses: All licenses; "" asks for none. Of a job that runs, too.
        nice: What it stands back in its priority. Slurm ignores it where somebody has fixed the priority.
        owner: The uid and gid of the job's user, in whose name its request is changed, and within whose limits; None:
            root changes it, and Slurm exempts what root changes from the limits of partition and QOS, for good.
    """

    gpu_request: str | None = None
    required_nodes: str | None = None
    cpu_count: int | None = None
    cpus_per_task: int | None = None
    dependency: str | None = None
    mem_per_node_mib: int | None = None
    mem_per_cpu_mib: int | None = None
    time_limit_s: int | None = None
    start_now: bool = False
    admin_comment: str | None = None
    name: str | None = None
    licenses: str | None = None
    nice: int | None = None
    owner: tuple[int, int] | None = None

    @property
    def by_root(self) -> "JobChange":
        """What only an administrator may change, whoever changes the rest."""
        return JobChange(admin_comment=self.admin_comment, licenses=self.licenses, nice=self.nice)

    @property
    def by_owner(self) -> "JobChange":
        """The rest: what the job asks for."""
        return replace(self, admin_comment=None, licenses=None, nice=None)

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
    """A batch job to submit in a user's name.

    Attributes:
        name: Job name.
        uid: The user to run as.
        gid: That user's group.
        script: Text of the batch script.
        environment: The whole environment of the script.
        partition: Partition.
        account: Account, "" for the user's default.
        qos: QOS, "" for the default.
        work_dir: Working directory.
        gpu_request: GRES per node ("gres/gpu:1"), "" for none.
        node_count: Nodes.
        cpu_count: CPUs for each task.
        mem_per_node_mib: Memory per node; 0 for the partition's default.
        time_limit_s: Time limit; 0 for none.
        required_nodes: Folded host list, "" for any.
        output: Path of stdout and stderr.
        admin_comment: AdminComment.
        requeue: Whether Slurm may requeue it.
        tasks_per_node: Tasks on each node.
        licenses: Licenses, "" for none.
        reservation: Reservation, "" for none.
        features: Node features as --constraint takes them, "" for any.
        excluded_nodes: Folded host list, "" for none.
        muri: What --muri says, "" where the job goes past Muri: it is submitted held then, to be tagged by root.
    """

    name: str
    uid: int
    gid: int
    script: str
    environment: dict[str, str]
    partition: str
    account: str = ""
    qos: str = ""
    work_dir: str = "/"
    gpu_request: str = ""
    node_count: int = 1
    cpu_count: int = 1
    mem_per_node_mib: int = 0
    time_limit_s: int = 0
    required_nodes: str = ""
    output: str = "/dev/null"
    admin_comment: str = ""
    requeue: bool = False
    tasks_per_node: int = 1
    licenses: str = ""
    reservation: str = ""
    features: str = ""
    excluded_nodes: str = ""
    muri: str = ""


class SnapshotFileError(UsageError):
    """A file is not a snapshot; the text names the place of the error."""


def dump_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot as JSON text: the same snapshot gives the same bytes, whatever order it was read in."""
    document = {
        "schema": _SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "taken_s": snapshot.taken_s,
        "cluster": snapshot.cluster,
        "slurm_version": snapshot.slurm_version,
        "jobs": [asdict(job) for job in sorted(snapshot.jobs, key=lambda job: job.job_id)],
        "nodes": [asdict(node) for node in sorted(snapshot.nodes, key=lambda node: node.name)],
        "reservations": [asdict(each) for each in sorted(snapshot.reservations, key=lambda each: each.name)],
        "unreadable": [asdict(each) for each in snapshot.unreadable],
        "limits": asdict(snapshot.limits),
        "gpu_removal": asdict(snapshot.gpu_removal),
    }
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
    """Parse the text of `dump_snapshot`.

    Args:
        text: JSON text.
        source: The file's name, for messages.

    Raises:
        SnapshotFileError: It is not a snapshot; the text says where and why.
    """
    try:
        document = json_of(text)
    except ValueError as err:
        raise SnapshotFileError(f"{source}: it is not JSON: {err}") from err
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise SnapshotFileError(f"{source}: it is not a snapshot; make one with `muri plan --save {source}`")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise SnapshotFileError(
            f"{source}: schema_version is {document.get('schema_version')!r}, this Muri reads {SCHEMA_VERSION}; take "
            "the snapshot again"
        )
    values = {name: value for name, value in document.items() if name not in ("schema", "schema_version")}
    snapshot: Snapshot = _record(Snapshot, values, source)
    _refuse_duplicates([job.job_id for job in snapshot.jobs], f"{source}: jobs", "job_id")
    _refuse_duplicates([node.name for node in snapshot.nodes], f"{source}: nodes", "name")
    return snapshot


def _record(kind: Any, value: object, place: str) -> Any:
    """Build one of the model's records, checking names and types of all fields."""
    if not isinstance(value, Mapping):
        raise SnapshotFileError(f"{place}: an object is expected, not {_shown(value)}")
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    # What has a default came later: older files lack it.
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [name for name in needed if name not in value]:
        raise SnapshotFileError(f"{place}: {', '.join(missing)} missing")
    if unknown := sorted(set(value) - set(names)):
        raise SnapshotFileError(f"{place}: unknown {', '.join(unknown)}; known are {', '.join(names)}")
    return kind(**{name: _value(hints[name], value[name], f"{place}: {name}") for name in names if name in value})


def _value(kind: Any, value: object, place: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise SnapshotFileError(f"{place}: a list is expected, not {_shown(value)}")
        item = get_args(kind)[0]
        return tuple(_value(item, element, f"{place}[{index}]") for index, element in enumerate(value))
    if is_dataclass(kind):
        return _record(kind, value, place)
    if kind is JobState:
        return _state(value, place)
    if isinstance(kind, UnionType):
        return None if value is None else _value(get_args(kind)[0], value, place)
    allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise SnapshotFileError(f"{place}: {kind.__name__} is expected, not {_shown(value)}")
    return value


def _state(value: object, place: str) -> JobState:
    try:
        return JobState(str(value))
    except ValueError:
        known = ", ".join(JobState)
        raise SnapshotFileError(f"{place}: {_shown(value)} is not a job state; known are {known}") from None


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _refuse_duplicates(keys: list[Any], place: str, name: str) -> None:
    seen: set[Any] = set()
    for index, key in enumerate(keys):
        if key in seen:
            raise SnapshotFileError(f"{place}[{index}]: {name} {key!r} appears twice")
        seen.add(key)


def task_numbers(text: str) -> Iterator[int]:
    """Yield the tasks in Slurm's text, such as 0, 2, 4 and 9 for "0-4:2,9"."""
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def task_count(job: Job) -> int:
    """Return how many jobs a record stands for."""
    return sum(1 for _ in task_numbers(job.array_tasks)) if job.several_tasks else 1
