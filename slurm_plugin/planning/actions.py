"""A cycle's changes in Slurm, as plain records: rendered for `--dry-run`, carried out by the executor."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from muri.profiler.records import StageProfile
from muri.profiler.sensitivity import SensitivityProfile
from muri.slurm_plugin.records.comment_tags import Original, Place


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """A job that is to become a member of a group."""

    job_id: int
    original: Original  # Its request before grouping
    solo_iteration_s: float | None  # Iteration time alone, from its profile; None where nothing is known of its model
    speed: float  # Predicted speed in the group, 1 = as fast as alone
    time_limit_s: int  # Its time limit inside the group, 0 = unlimited
    cpu_count: int = 1  # CPUs of its job: its own, or one for each task where its work runs as a thread of the pilot's
    gpu_mem_gib: float = 0.0  # Its peak GPU memory alone, from its profile; 0 when not known
    estimated: bool = False  # Whether its profile is an estimate
    min_speed: float = 0.0  # The speed there that it is promised, 1 = as fast as alone; 0: none
    accumulate_steps: int = 1  # Into how many micro-batches its batches are split
    isolation: Literal["thread", "process"] = "process"  # As in `MemberSpec.isolation`
    isolation_why: str = ""  # Why so, for people; "" on a site without threads


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Submit a pilot job and turn jobs into its members."""

    members: tuple[MemberPlan, ...]  # In the planned ordering
    node: str  # Where: a node, or a folded list of them
    uid: int  # Owner of all members
    gid: int
    user: str
    partition: str
    account: str
    qos: str
    gpu_request: str  # GRES per node of the pilot
    cpu_count: int  # CPUs of each of the pilot's tasks
    mem_per_node_mib: int  # Memory of the pilot; 0 = default
    time_limit_s: int  # Time limit of the pilot; 0 = default
    efficiency: float  # Predicted γ
    period_s: float  # Predicted T
    reasons: tuple[str, ...]
    node_count: int = 1  # Nodes of the pilot
    gpus_per_node: int = 1  # GPUs on each; each gets a runtime of its own
    mode: Literal["interleave", "plain"] = "interleave"  # How members share, as in `Group.mode`
    reservation: str = ""  # Reservation of all members, "" for none
    oversubscribe: bool = False  # Whether pilot and members share their CPUs, as all jobs on their nodes do then
    python: str = ""  # The Python that runs the runtime because members are its threads, "" for the site's


@dataclass(frozen=True, slots=True)
class GivenShare:
    """CPUs and memory that a job gets in place of those it asked for."""

    cpu_count: int  # CPUs of the whole job
    cpus_per_task: int  # CPUs of each task
    mem_per_node_mib: int  # Memory on each node; 0 leaves it as it is
    nodes: str  # Where they are free, folded host list
    original: Original  # What the job had asked for


@dataclass(frozen=True, slots=True)
class ReleaseSolo:
    """Release a job to run alone."""

    job_id: int
    reasons: tuple[str, ...]
    share: GivenShare | None = None  # CPUs and memory to give it before; None leaves its own request untouched


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Give a pending job its own CPUs and memory back; whether it is held stays as it is."""

    job_id: int
    why: str


@dataclass(frozen=True, slots=True)
class StartDryRun:
    """Measure a job's model in a dry-run job."""

    job_id: int  # The waiting job whose script is run
    key: str  # Text of the profile key, for people
    again: bool = False  # Whether the model has a profile already; its jobs need not wait for the new one
    # CPUs of a dry run that also measures how the throughput follows their number; None: it does not
    sweep_cpus: int | None = None


@dataclass(frozen=True, slots=True)
class ResumeGroup:
    """Finish a group's start that was interrupted."""

    token: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Close an intent that cannot be resumed; other actions undo its effects."""

    token: str
    why: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Give a member its original request back and open its gate, so that it runs alone."""

    job_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """End one of Muri's own jobs (a pilot or a dry run)."""

    job_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a running job that has a checkpoint and put it back into the queue."""

    job_id: int
    run: int  # How often it was requeued before: the stop is for this run only
    reasons: tuple[str, ...]
    token: str = ""  # The intent that was begun for it, "" for a new one
    served_gpu_s: float = 0.0  # GPU-seconds that this run of the job has had


@dataclass(frozen=True, slots=True)
class KeepGate:
    """Say how a running job's gate stands once it is back in the queue: a member waits for Muri again.

    Where holds are the gate, the next hold of a job that runs alone, or that its user has released, is not Muri's.
    """

    job_id: int


@dataclass(frozen=True, slots=True)
class ExtendPilot:
    """Let a pilot job outlive a member whose time limit was raised."""

    job_id: int
    limit_s: int  # Its time limit from now on, 0 = unlimited
    why: str


@dataclass(frozen=True, slots=True)
class MoveToLicense:
    """Put a job that Muri holds behind the license instead of the hold."""

    job_id: int


@dataclass(frozen=True, slots=True)
class ReturnToQueue:
    """Make a job that was stopped a candidate again, with its original request."""

    job_id: int
    token: str  # The intent that stopped it, "" when it stopped by itself
    why: str


@dataclass(frozen=True, slots=True)
class AskForMore:
    """Make a member that ran out of GPU memory a candidate again, with a larger request."""

    job_id: int
    gpu_mem_gib: float  # Its request on each of its GPUs from now on
    why: str


@dataclass(frozen=True, slots=True)
class Regroup:
    """Make a member whose pilot job did not start a candidate again, for a smaller group."""

    job_id: int
    largest_group: int  # How large a group it may be in for a while, 1 when it is to run alone
    why: str


@dataclass(frozen=True, slots=True)
class Join:
    """Add a waiting job to a group that runs."""

    pilot: int
    node: str
    member: MemberPlan
    # Members that it joins, with the time limits that they need beside it, 0 = unlimited
    others: tuple[tuple[int, int], ...]
    pilot_limit_s: int  # Time limit that the pilot needs, 0 = as it is
    reasons: tuple[str, ...]
    token: str = ""  # The intent that was begun for it, "" for a new one
    # How many jobs join the group together, this one among them; their time limits allow for all of them
    joining: int = 1
    oversubscribe: bool = False  # Whether the jobs of the group share their CPUs

    @property
    def size(self) -> int:
        """Members of the group once all have joined."""
        return len(self.others) + self.joining


@dataclass(frozen=True, slots=True)
class KeepProfile:
    """Store a profile from a dry run, or from a job's first iterations."""

    token: str  # The dry run's intent; "" where there was none
    profile: StageProfile
    accumulates: bool = False  # Whether the script declared that its batches can be split
    python: str = ""  # The script's, "" for the site's
    environment: str = ""  # Digest of the environment that the job was submitted in, "" when unknown
    sensitivity: SensitivityProfile | None = None  # How the throughput follows the CPUs, of a dry run that measured it


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """Note that a member's run told too little of its model."""

    key: str  # Text of the profile key
    why: str  # What was missing
    at_s: float  # When that was clear, seconds since the epoch


@dataclass(frozen=True, slots=True)
class DryRunFailed:
    """Note that a dry run gave no profile."""

    token: str  # The dry run's intent
    key: str  # Text of the profile key
    why: str  # What went wrong


@dataclass(frozen=True, slots=True)
class SplitTasks:
    """Give tasks of a job array records of their own, so that they can be planned."""

    job_id: int  # The record that stands for them
    tasks: tuple[int, ...]  # Which of its tasks


@dataclass(frozen=True, slots=True)
class StandBack:
    """Let an array's task that is kept back stand behind siblings that may start, or where Slurm has it."""

    job_id: int  # The task, or the record of several
    place: Place | None  # What makes it stand there; None takes that away


Action = (
    StartGroup
    | ReleaseSolo
    | ResetRequest
    | StartDryRun
    | ResumeGroup
    | Abandon
    | Restore
    | Cancel
    | Preempt
    | KeepGate
    | ExtendPilot
    | MoveToLicense
    | ReturnToQueue
    | AskForMore
    | Regroup
    | Join
    | KeepProfile
    | DryRunFailed
    | NotMeasured
    | SplitTasks
    | StandBack
)


_MEMBERS: Final = TypeAdapter(tuple[MemberPlan, ...])
_JOIN: Final = TypeAdapter(Join)


def members_in(payload: Mapping[str, Any]) -> tuple[MemberPlan, ...]:
    """Read the members of a start from what the journal keeps of it."""
    return _MEMBERS.validate_python(payload["members"])


def join_payload(join: Join) -> dict[str, Any]:
    """Return what the journal keeps of a join."""
    payload: dict[str, Any] = _JOIN.dump_python(join, exclude={"token"})
    return payload


def join_in(payload: Mapping[str, Any], token: str) -> Join:
    """Read a join from what the journal keeps of it; `token` is the intent's."""
    return _JOIN.validate_python({**payload, "token": token})


def started(actions: Iterable[Action]) -> frozenset[int]:
    """The jobs that these actions start: alone, in a new group, or in one that runs."""
    found: set[int] = set()
    for action in actions:
        match action:
            case StartGroup(members=members):
                found |= {member.job_id for member in members}
            case ReleaseSolo(job_id=job_id):
                found.add(job_id)
            case Join(member=member):
                found.add(member.job_id)
    return frozenset(found)


_ONLY_OF_SWEEPS: Final = {"sweep_cpus", "sensitivity"}
"""Fields that other dry runs do not have."""


def render_action(action: Action) -> dict[str, Any]:
    """Return an action as plain values under its name, as `--dry-run` and `muri plan` print it."""
    told = {name: value for name, value in asdict(action).items() if value is not None or name not in _ONLY_OF_SWEEPS}
    return {"action": type(action).__name__, **told}
