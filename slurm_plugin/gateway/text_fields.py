"""Slurm's small notations and its records, read alike for both gateways: states, GRES, dependencies, numbers."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.cluster import SPECIAL_EXIT, JobState, Unreadable
from muri.units import GIB, KIB, MIB, whole_minutes

#: When a requeued job may start again. Up to 24.11 at least, a node takes a run that begins in the second of the
#: requeue for the one that was ended ("Job credential revoked"), and the job fails.
SOON: Final = "now+2"

#: Slurm's words for a flag in place of a base state, and the state that Muri takes it for.
_SHOWN_FLAGS: Final[Mapping[str, JobState]] = {
    "CONFIGURING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.CANCELLED,
}

#: Node states and flags under which no new job starts there, whatever it asks for. Reservations are not among them:
#: their own jobs start on nodes that are RESERVED or in MAINT.
_CLOSED_NODE_WORDS: Final = frozenset(
    {
        "BLOCKED", "CLOUD_DOWN", "DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE",
        "INVAL", "INVALID", "INVALID_REG", "NOT_RESPONDING", "NO_RESPOND", "POWERING_DOWN", "POWER_DOWN",
        "POWER_DRAIN", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "UNKNOWN",
    }
)  # fmt: skip
_OPEN_NODE_STATES: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED"})
#: The one-letter suffixes of a node state, see the section "NODE STATE CODES" of sinfo's manual.
_NODE_SUFFIXES: Final = {
    "*": "NOT_RESPONDING", "$": "MAINTENANCE", "@": "REBOOT", "^": "REBOOT", "%": "POWERING_DOWN",
    "!": "POWERING_DOWN", "~": "POWERED_DOWN", "#": "POWERING_UP", "-": "PLANNED",
}  # fmt: skip

_GRES: Final = re.compile(
    r"^(?:gres[:/])?(?P<name>[^:/=(]+)(?::(?P<type>[A-Za-z_][^:=(]*))?(?:[:=](?P<count>\d+)(?P<unit>[KMGT]?))?$"
)
_NOT_GRES: Final = frozenset({"N", "null", "none", "cpu", "mem", "node", "billing", "energy"})
"""Words for nothing, and resources in tres_per_task other than GRES."""
_NICE: Final = re.compile(r"-?[0-9]{1,10}\Z")
_TASKS: Final = re.compile(r"[0-9]{1,7}(-[0-9]{1,7}(:[1-9][0-9]{0,6})?)?")

MOST: Final = 1_000_000
"""More nodes, GPUs or CPUs than any cluster has: larger numbers are a mistake, or an attack on what counts."""

LARGEST: Final = 2**53 - 1
"""The largest number that JSON, SQLite and floating-point numbers all keep exactly."""

_UNITS: Final = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": KIB * GIB}

_LONGEST_KEPT: Final = 16 * 1024
"""Characters. Slurm takes a submit line of 1 MiB, and each record of each job is in memory at once."""

_MOST_DEVICES: Final = 64


def waiting_tasks(text: str) -> str:
    """Return the tasks in Slurm's text of an array's record, such as "0-9,12" of "0-9,12%3".

    Where Slurm cuts a long list off (`SLURM_BITSTR_LEN` prevents it), the tasks that are left out are missing.
    """
    return ",".join(part for part in text.partition("%")[0].split(",") if _TASKS.fullmatch(part))


def kept_text(text: str) -> str:
    """Return a user's text, or in place of a very long one its length and digest."""
    if len(text) <= _LONGEST_KEPT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(text)} characters with the SHA-256 {digest}"


def bounded(value: int, most: int = LARGEST) -> int:
    """Return a number between 0 and `most`."""
    return value if 0 <= value <= most else min(max(value, 0), most)


def job_state(words: Iterable[str]) -> JobState:
    """Map Slurm's state words to one state, UNKNOWN for unknown words."""
    names = [word.upper() for word in words]
    if "COMPLETING" in names:
        return JobState.COMPLETING
    shown = [_SHOWN_FLAGS[name] for name in names if name in _SHOWN_FLAGS]
    return next(iter(shown + [JobState[name] for name in names if name in JobState.__members__]), JobState.UNKNOWN)


def node_words(text: str) -> list[str]:
    """Split a node's state such as "IDLE+DRAIN*" into words, suffix signs spelled out."""
    words = []
    for part in text.upper().split("+"):
        bare = part.rstrip("".join(_NODE_SUFFIXES))
        words += [bare, *(_NODE_SUFFIXES[sign] for sign in part[len(bare) :])]
    return [word for word in words if word]


def node_usable(words: Iterable[str]) -> bool:
    """Whether new jobs can start on a node in this state."""
    names = [word.upper() for word in words]
    return bool(_OPEN_NODE_STATES.intersection(names)) and not _CLOSED_NODE_WORDS.intersection(names)


def mem_of_cpus_mib(mem_per_cpu_mib: int, cpu_count: int, node_count: int) -> int:
    """Return the memory per node of a request per CPU."""
    return mem_per_cpu_mib * -(-cpu_count // max(1, node_count))


MIB_OF_UNIT: Final = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}

_COUNTED: Final = re.compile(r"(?:^|,)(node|mem)=(\d{1,15})(\.\d+)?([KMGTP]?)")


@lru_cache(maxsize=4096)
def counted_tres(text: str) -> Mapping[str, float]:
    """Read nodes, and memory in MiB, of a text such as "cpu=3,mem=2100M,node=1"."""
    return {
        name: float(whole + (part or "")) * (MIB_OF_UNIT[unit] if name == "mem" else 1.0)
        for name, whole, part, unit in _COUNTED.findall(text)
    }


def gres_counts(text: str) -> dict[str, int]:
    """Count per GRES, keyed "gpu" or "gpu:a100", of any of Slurm's notations.

    Requests ("gres/gpu:a100:2", in Slurm 22.05 "gres:gpu:2", per task "gres/gpu=1"), a node's configuration
    and its use ("gpu:2(S:0-1)", "gpu:a100:1(IDX:0)") differ in their dressing only. Without a number it is one.
    """
    return dict(_gres_counts(text))


@lru_cache(maxsize=4096)
def _gres_counts(text: str) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for item in re.sub(r"\([^()]*\)", "", text or "").split(","):
        match = _GRES.match(item.strip())
        if match and match["name"] not in _NOT_GRES:
            key = f"{match['name']}:{match['type']}" if match["type"] else match["name"]
            counts[key] = bounded(counts.get(key, 0) + int(match["count"] or 1) * _UNITS[match["unit"] or ""])
    return counts


def gpu_total(counts: Mapping[str, int]) -> int:
    """Sum the GPUs of all types. Where Slurm lists both the sum and the types, the larger is the truth."""
    typed = sum(count for key, count in counts.items() if key.startswith("gpu:"))
    return max(counts.get("gpu", 0), typed) if typed and "gpu" in counts else counts.get("gpu", 0) + typed


def gpu_type(counts: Mapping[str, int]) -> str:
    """Return the first GPU type in alphabetical order, "gpu" when untyped or there is none."""
    return min((key.split(":", 1)[1] for key in counts if key.startswith("gpu:")), default="gpu")


@lru_cache(maxsize=4096)
def gres_request(text: str) -> str:
    """Bring a GRES request of any of Slurm's notations into one form, as `request_text` writes it."""
    return request_text(gres_counts(text))


def request_text(counts: Mapping[str, int]) -> str:
    """Write a GRES request in the notation of Slurm 23 and later, "gres/gpu:a100:2"."""
    return ",".join(f"gres/{key}:{count}" for key, count in sorted(counts.items()))


def gres_argument(request: str, prefix: str = "") -> str:
    """Return a GRES request as an option takes it, such as "gpu:a100:2", each item behind a prefix.

    Raises:
        GatewayError: It is malformed.
    """
    counts = gres_counts(request)
    if not counts:
        raise GatewayError(f"GRES request {request!r} is malformed: write for example gres/gpu:1 or gres/gpu:a100:2")
    return ",".join(f"{prefix}{name}:{count}" for name, count in sorted(counts.items()))


@lru_cache(maxsize=4096)
def job_gpus(*, per_job: str, per_node: str, per_socket: str, per_task: str, node_count: int, task_count: int) -> int:
    """Return the number of GPUs that a job asks for, by any option of sbatch.

    --gpus counts for the whole job and --gpus-per-node (as --gres) once per node. --gpus-per-socket is taken
    as one socket per node, the least that Slurm can give.
    """
    asked = (
        gpu_total(gres_counts(per_job))
        or gpu_total(gres_counts(per_node)) * max(1, node_count)
        or gpu_total(gres_counts(per_task)) * max(1, task_count)
        or gpu_total(gres_counts(per_socket)) * max(1, node_count)
    )
    return bounded(asked, MOST)


def nice_value(text: str) -> int:
    """Read a nice value; 0 where Slurm shows none."""
    return int(text) if _NICE.match(text) else 0


def dependency_text(text: str) -> str:
    """Bring a dependency into one form: no progress notes such as "(unfulfilled)", one job each, sorted.

    The order of the parts means nothing to Slurm; sorting makes both gateways give the same text.
    """
    bare = re.sub(r"\([^()]*\)", "", text or "")
    delimiter = "?" if "?" in bare else ","
    parts = set()
    for part in filter(None, (piece.strip() for piece in bare.split(delimiter))):
        kind, *jobs = part.split(":")
        parts.update([f"{kind}:{job}" for job in jobs] or [kind])
    return delimiter.join(sorted(parts))


def reason_text(text: str | None, state_words: Iterable[str] = ()) -> str:
    """Return Slurm's reason, "" where it says "None"; the state SPECIAL_EXIT, whose reason tells nothing, replaces it.

    Reasons of several words have underscores between them, as squeue prints them; in JSON and in pyslurm they have
    spaces.
    """
    if any(word.upper() == "SPECIAL_EXIT" for word in state_words):
        return SPECIAL_EXIT
    return "" if text in (None, "None") else str(text).replace(" ", "_")


def time_limit_text(time_limit_s: int) -> str:
    """Write a time limit as whole minutes, rounded up; 0 seconds means no limit."""
    return str(whole_minutes(time_limit_s)) if time_limit_s else "UNLIMITED"


def license_text(text: str) -> str:
    """Bring licenses into one form: Slurm 26.05 joins those of a requeued job with semicolons."""
    return text.replace(";", ",")


def first_partition(text: str | None) -> str:
    """Return the first of the partitions that a job asked for."""
    return (text or "").split(",")[0]


def indices_in(gres_used: str) -> tuple[int, ...]:
    """Return the indices of the GPUs in use, of a node's GresUsed such as "gpu:a100:2(IDX:0,3),muri:1".

    Slurm shows them for GPUs with files; "N/A" stands for none.
    """
    found: set[int] = set()
    for listed in re.findall(r"(?:^|,)gpu(?::[^,():]+)*(?::\d+)?\(IDX:([0-9,-]+)\)", gres_used):
        for part in listed.split(","):
            first, _, last = part.partition("-")
            if first.isdecimal() and (not last or last.isdecimal()):
                found.update(range(int(first), min(int(last or first), int(first) + _MOST_DEVICES) + 1))
    return tuple(sorted(found))


_BROKEN_RECORD: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading a record of an unexpected form."""

Record = TypeVar("Record")


def read_each(
    records: Iterable[Any], read: Callable[[Any], Record], job_id: Callable[[Any], int]
) -> tuple[list[Record], list[Unreadable]]:
    """Read Slurm's records of jobs one by one, so that a broken one costs only itself.

    Args:
        records: Slurm's records.
        read: Makes one of Muri's records.
        job_id: Returns the job's id, even of a broken record.
    """
    found: list[Record] = []
    unreadable: list[Unreadable] = []
    for record in records:
        try:
            found.append(read(record))
        except _BROKEN_RECORD as error:
            unreadable.append(Unreadable(job_id(record), f"its record cannot be read: {error!r}"))
    return found, unreadable
