"""The protocol of both gateways, its errors, their common functions, and how calls are counted."""

import logging
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from muri.errors import MuriError
from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob, Snapshot
from muri.slurm_plugin.records.limits import GpuRemoval, Place

Calls = Counter[str]
"""Number of calls to Slurm, by kind."""

# Kinds of calls.
JOBS: Final = "jobs"  # All jobs
JOB: Final = "job"  # One job
NODES: Final = "nodes"
RESERVATIONS: Final = "reservations"
LEASE: Final = "lease"  # A change of the reservation that withholds the gate's license
CHANGE: Final = "change"  # A change of one job
SUBMISSION: Final = "submission"

_SHOWN: Final[Mapping[str, str]] = {
    "nodes": NODES, "node": NODES, "reservation": RESERVATIONS, "partition": "partitions", "config": "configuration",
    "license": "licenses",
}  # fmt: skip

_OF_COMMAND: Final[Mapping[str, str]] = {
    "sbatch": SUBMISSION, "scancel": "cancellation", "sacctmgr": "accounts", "sacct": "accounts", "sinfo": NODES,
}  # fmt: skip


def kind_of(arguments: Sequence[str]) -> str:
    """Return the kind of call of a command with its arguments, "" where it asks no daemon."""
    command, words = arguments[0], [word for word in arguments[1:] if not word.startswith("-")]
    if command == "squeue":
        if "--helpFormat" in arguments:
            return ""
        chosen = [word for word in arguments if word.startswith("--jobs=")]
        return JOB if chosen and "," not in chosen[0] else JOBS  # squeue fetches all jobs to show several
    if command == "scontrol" and len(words) > 1:
        verb, what, *others = words
        if verb == "show" and what == "job":
            return JOB if others else JOBS
        if verb == "show":
            return _SHOWN.get(what, "other")
        return LEASE if "reservation" in what else CHANGE
    return _OF_COMMAND.get(command, "other")


_UNREACHABLE: Final = (
    "unable to contact slurm controller",
    "communication connection failure",
    "communication send failure",
    "communication receive failure",
    "communication shutdown failure",
    "connection refused",
    "connection timed out",
    "connection reset",
    "socket timed out",
    "unable to establish controller machine",
    "unable to establish configuration source",
    "could not establish a configuration source",
    "slurm backup controller in standby mode",
    "zero bytes were transmitted",
    "unexpected message received",
)

_SPEAKER: Final = re.compile(r"\s*(?:[\w./-]+(?: error| fatal)?:\s*)*")
"""Program prefix of a Slurm message, such as "squeue: error: " or "slurm_update error: "."""

_NO_SUCH_JOB: Final = ("invalid job id",)
_ENDED: Final = ("already completing or completed", "job has already finished", "already finished")
_PENDING: Final = ("job is pending execution",)
_NO_SUCH_GRES: Final = ("generic resource",)
_STARTED: Final = ("job is no longer pending execution", "job has already started")

_LONGEST_REASON: Final = 500

#: slurmctld spreads its job directories over this many folders.
_HASH_FOLDERS: Final = 10

log = logging.getLogger(__name__)


class GatewayError(MuriError):
    """Slurm refused, or could not be reached; the text carries Slurm's own words."""


class SlurmUnreachableError(GatewayError):
    """slurmctld does not answer; the cycle is skipped and tried again at the next."""


class CommandTimeoutError(SlurmUnreachableError):
    """A command did not end in time: slurmctld does not answer, or the answer is too long."""


class SubmissionTimeoutError(GatewayError):
    """A submission's process, which belongs to the job's user, did not end in time; that says nothing about the job."""


class TooLongAnswerError(GatewayError):
    """Slurm answered with more text than is read at once."""


class NoSuchJobError(GatewayError):
    """slurmctld no longer knows the job, or the job has ended."""


class NoGateLicenseError(GatewayError):
    """Slurm has no license `muri_gate`, so jobs can be kept waiting by a hold only."""


class GatewayUnavailableError(GatewayError):
    """This way of speaking to Slurm cannot work on this machine; the text says what to do instead."""

    worth_retrying = False


class JobGateway(Protocol):
    """The requests that carry out an action. Each call is one RPC unless it says otherwise.

    Each method raises SlurmUnreachableError when slurmctld does not answer, GatewayError when Slurm refuses, and
    NoSuchJobError when the job is gone.
    """

    def submit(self, job: NewJob) -> int:
        """Submit a batch job as its user and return its id, in several RPCs.

        Raises:
            GatewayError: Slurm refused it, or a process of the user's interfered.
        """
        ...

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a pending job, all at once or not at all; licenses also of a running one."""
        ...

    def split_tasks(self, job: Job, tasks: Sequence[int]) -> None:
        """Give some of a job array's waiting tasks records, and so job ids, of their own. Nothing else changes.

        Args:
            job: The record that stands for them, and for at least one task more.
            tasks: Their numbers.
        """
        ...

    def hold(self, job_id: int) -> None:
        """Hold a pending job; holding a held one is not an error."""
        ...

    def release(self, job_id: int) -> None:
        """Release a held job; releasing a released one is not an error."""
        ...

    def requeue(self, job_id: int) -> None:
        """End a running job and put it back into the queue; a hold on it stays, and a pending one stays as it is."""
        ...

    def requeue_hold(self, job_id: int) -> None:
        """End a running job, put it back into the queue and hold it."""
        ...

    def cancel(self, job_id: int) -> None:
        """Cancel a job, of an array's id all tasks; cancelling an ended one is not an error."""
        ...

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        """Return the environment that a pending job was submitted with, None when it cannot be read.

        Slurm offers no RPC for it; it is read from slurmctld's state directory when the controller runs beside
        slurmctld.
        """
        ...


class Gateway(JobGateway, Protocol):
    """All requests of Muri to Slurm.

    A job's id means its record in the last `snapshot` or `queue` alone: of a job array one task, or the tasks that wait
    and have no record of their own; never tasks that run.
    """

    @property
    def name(self) -> str:
        """Return "pyslurm" or "command"."""
        ...

    @property
    def slurm_calls(self) -> Calls:
        """Return the number of calls to Slurm, by kind."""
        ...

    def snapshot(self) -> Snapshot:
        """Read all jobs and nodes, in bulk RPCs whose number does not depend on the queue's length.

        Reservations and the site's limits may be some minutes older. A job that cannot be read is among the snapshot's
        `unreadable`.
        """
        ...

    def queue(self) -> Snapshot:
        """Read only the jobs, in one or two RPCs: neither nodes nor what only administrators may see."""
        ...

    def one_job(self, job_id: int) -> Snapshot:
        """Read one job, of an array's id all its records, in one or two small RPCs: nothing else is in the snapshot."""
        ...

    def gpu_removal(self, known: GpuRemoval, place: Place, waiting: Job | None, now_s: float) -> GpuRemoval:
        """Return whether and how a waiting job's GPUs can be taken away.

        If the known answer is stale, it is tried, in about a dozen RPCs, with jobs of Muri's own that are cancelled
        again.

        Args:
            known: The last answer.
            place: Where such a job can be submitted.
            waiting: A job that Muri may start; where root may not submit, it is tried in its user's name.
            now_s: Seconds since the epoch.
        """
        ...

    def extend_lease(self, end_s: float) -> None:
        """Withhold the license `muri_gate` until a time (seconds since the epoch), making its reservation if needed.

        Raises:
            NoGateLicenseError: Slurm has no such license.
        """
        ...

    def end_lease(self) -> None:
        """Stop withholding the license: Slurm starts the jobs that wait for it. No error where it is not withheld."""
        ...

    def gpus_in_use(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Return the GPUs of running jobs: a folded host list and Slurm's indices on each of its nodes.

        Some releases of Slurm do not tell it in the nodes' table.
        """
        ...


def slurm_error(action: str, words: str) -> GatewayError:
    """Return the error of the class that fits Slurm's words.

    Slurm quotes users in some of its messages, so slurmctld only counts as unreachable where a message begins that way.

    Args:
        action: The request, such as "hold job 12".
        words: Slurm's message.
    """
    bare = first_line(words) or "Slurm gave no reason"
    text = f"cannot {action}: {bare}"
    if _SPEAKER.sub("", bare.lower(), count=1).startswith(_UNREACHABLE):
        return SlurmUnreachableError(f"{text}; is slurmctld running? (`scontrol ping`)")
    if _says(bare, _NO_SUCH_JOB + _ENDED):
        return NoSuchJobError(text)
    return GatewayError(text)


def first_line(words: str) -> str:
    """Return the first line of a message that is not empty; later ones of Slurm's repeat it in other words."""
    return next((line.strip() for line in words.split("\n") if line.strip()), "")[:_LONGEST_REASON]


def _says(words: object, phrases: tuple[str, ...]) -> bool:
    lowered = str(words).lower()
    return any(phrase in lowered for phrase in phrases)


def job_ended(error: GatewayError) -> bool:
    """Whether Slurm refused because the job has ended already."""
    return _says(error, _ENDED)


def job_pending(error: GatewayError) -> bool:
    """Whether Slurm refused because the job has not started yet."""
    return _says(error, _PENDING)


def no_such_gres(error: GatewayError) -> bool:
    """Whether Slurm refused a request because of its GRES."""
    return _says(error, _NO_SUCH_GRES)


def job_started(error: GatewayError) -> bool:
    """Whether Slurm refused because the job has started already."""
    return _says(error, _STARTED)


@contextmanager
def passing_over(*reasons: Callable[[GatewayError], bool]) -> Iterator[None]:
    """Ignore a refusal of Slurm's for one of these reasons."""
    try:
        yield
    except GatewayError as error:
        if not any(reason(error) for reason in reasons):
            raise


def check_new_job(job: NewJob) -> None:
    """Refuse what Slurm or a gateway would misread.

    sbatch reads options from the lines of a script up to the first command, so that has to stand in the second line.

    Raises:
        GatewayError: The job cannot be submitted; the text says which part is wrong.
    """
    checks = {
        "its script must begin with #! and an interpreter, and its second line with `exec `": not re.match(
            r"#![^\n]*\nexec ", job.script
        ),
        "its script holds a NUL character": "\0" in job.script,
        "its admin comment holds a NUL character": "\0" in job.admin_comment,
        "its script has DOS line ends (\\r\\n); convert them to \\n": "\r\n" in job.script,
        "it needs at least one CPU and one node": job.cpu_count < 1 or job.node_count < 1,
    }
    checks |= {
        f"its environment variable {name!r} is malformed": not name or "=" in name or "\0" in name + value
        for name, value in job.environment.items()
    }
    if wrong := next((text for text, found in checks.items() if found), ""):
        raise GatewayError(f"job {job.name!r}: {wrong}")


def job_environment(state_save_location: str, job_id: int) -> dict[str, str] | None:
    """Return the environment that a batch job was submitted with, None when it cannot be read.

    It can be read by root or SlurmUser on slurmctld's machine, from the submission until the job has ended.
    """
    path = Path(state_save_location, f"hash.{job_id % _HASH_FOLDERS}", f"job.{job_id}", "environment")
    try:
        return parse_environment(path.read_bytes())
    except OSError as err:
        log.debug("job %d: its environment cannot be read: %s", job_id, err)
    except ValueError as err:
        log.warning("job %d: %s is not in the form that Muri knows: %s", job_id, path, err)
    return None


def parse_environment(content: bytes) -> dict[str, str]:
    """Parse slurmctld's file: the count as a 32-bit number in the machine's order, then NUL-ended strings.

    Raises:
        ValueError: The content has another form.
    """
    if len(content) < struct.calcsize("=I"):
        raise ValueError("it is shorter than its header")
    (count,) = struct.unpack_from("=I", content)
    items = content[struct.calcsize("=I") :].split(b"\0")
    if items.pop() != b"" or len(items) != count:
        raise ValueError(f"it announces {count} variables and holds {len(items)}")
    pairs = [item.decode("utf-8", "surrogateescape").partition("=") for item in items]
    return {name: value for name, separator, value in pairs if name and separator}


Requests = Counter[tuple[str, str]]
"""Number of requests: the method, and "done", "refused", "gone" or "unreachable"."""

_Way = TypeVar("_Way")


def counted(way: _Way, requests: Requests) -> _Way:
    """Return the same way to Slurm, a gateway or the accounts; each of its calls is counted."""
    return cast("_Way", _Counted(way, requests))


class _Counted:
    def __init__(self, way: object, requests: Requests) -> None:
        self._way = way
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._way, name)
        if not callable(value):
            return value

        @wraps(value)
        def count(*arguments: Any, **named: Any) -> Any:
            outcome = "refused"
            try:
                result = value(*arguments, **named)
                outcome = "done"
            except SlurmUnreachableError:
                outcome = "unreachable"
                raise
            except NoSuchJobError:
                outcome = "gone"
                raise
            finally:
                self._requests[name, outcome] += 1
            return result

        return count
