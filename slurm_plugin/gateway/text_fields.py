"""Slurm's notations and requests, read alike for both gateways; options that Muri does not carry over.

Both gateways bring a job's record into one form, `Request`, so that they agree on its options; its names are those of
`squeue --json`.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from muri.clock import GIB, KIB, MIB, whole_minutes
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.cluster import SPECIAL_EXIT, JobState
from muri.slurm_plugin.records.limits import MIB_OF_UNIT, WAYS

#: When a requeued job may start again. Up to 25.05 a node takes a run that begins in the second of the
#: requeue for the one that was ended ("Job credential revoked"), and the job fails.
SOON: Final = "now+2"

#: Slurm's words for a flag in place of a base state, and the state that Muri takes it for.
_SHOWN_FLAGS: Final[Mapping[str, JobState]] = {
    **dict.fromkeys(("CONFIGURING", "RESIZING", "SIGNALING", "STOPPED"), JobState.RUNNING),
    **dict.fromkeys(
        ("EXPEDITING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"), JobState.PENDING
    ),
    "STAGE_OUT": JobState.COMPLETING,
    "REVOKED": JobState.CANCELLED,
}

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


def mem_of_cpus_mib(mem_per_cpu_mib: int, cpu_count: int, node_count: int) -> int:
    """Return the memory per node of a request per CPU."""
    return mem_per_cpu_mib * -(-cpu_count // max(1, node_count))


_COUNTED: Final = re.compile(r"(?:^|,)(node|mem)=(\d{1,15})(\.\d+)?([KMGTP]?)")


@lru_cache(maxsize=4096)
def counted_tres(text: str) -> Mapping[str, float]:
    """Read nodes, and memory in MiB, of a text such as "cpu=3,mem=2100M,node=1"."""
    return {
        name: float(whole + (part or "")) * (MIB_OF_UNIT[unit] if name == "mem" else 1.0)
        for name, whole, part, unit in _COUNTED.findall(text)
    }


@lru_cache(maxsize=4096)
def gres_counts(text: str) -> Mapping[str, int]:
    """Count per GRES, keyed "gpu" or "gpu:a100", of any of Slurm's notations.

    Requests ("gres/gpu:a100:2", in Slurm 22.05 "gres:gpu:2", per task "gres/gpu=1"), a node's configuration
    and its use ("gpu:2(S:0-1)", "gpu:a100:1(IDX:0)") differ in their dressing only. Without a number it is one.
    """
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


class Field(NamedTuple):
    """A part of a request that an option sets; "" where a source does not show it."""

    option: str
    squeue: str = ""  # Field of `squeue --Format`
    scontrol: str = ""  # Name in `scontrol show job`
    pyslurm: str = ""  # Attribute of `pyslurm.Job`


FIELDS: Final[Mapping[str, Field]] = {
    "burst_buffer": Field("--bb", "BurstBuffer", "", "burst_buffer"),
    "cluster_features": Field("--cluster-constraint", "ClusterFeature", "", "cluster_constraints"),
    "container": Field("--container", "Container", "", "container"),
    "container_id": Field("--container-id", "ContainerID", "", "container_id"),
    "contiguous": Field("--contiguous", "Contiguous", "", "requires_contiguous_nodes"),
    "core_spec": Field("--core-spec", "CoreSpec"),
    "cores_per_socket": Field("--cores-per-socket", "Cores", "", "cores_per_socket"),
    "cpu_frequency_governor": Field("--cpu-freq", "", "Governor", "cpu_frequency_governor"),
    "cpu_frequency_maximum": Field("--cpu-freq", "", "CPU_max_freq", "cpu_frequency_max"),
    "cpu_frequency_minimum": Field("--cpu-freq", "", "CPU_min_freq", "cpu_frequency_min"),
    "deadline": Field("--deadline", "Deadline", "", "deadline"),
    "extra": Field("--extra", "", "Extra", "extra"),
    "mcs_label": Field("--mcs-label"),
    "minimum_tmp_disk_per_node": Field("--tmp", "MinTmpDisk", "", "temporary_disk_per_node"),
    "network": Field("--network", "Network", "", "network"),
    "prefer": Field("--prefer", "Prefer", "", "preferred_features"),
    "reboot": Field("--reboot", "Reboot", "", "requires_node_reboot"),
    "required_switches": Field("--switches", "ReqSwitch", "", "required_switches"),
    "segment_size": Field("--segment", "SegmentSize", "", "segment_size"),
    "sockets_per_node": Field("--sockets-per-node", "Sockets", "", "sockets_per_node"),
    "tasks_per_board": Field("--ntasks-per-board", "NTPerBoard", "", "ntasks_per_board"),
    "tasks_per_core": Field("--ntasks-per-core", "NTPerCore", "", "ntasks_per_core"),
    "tasks_per_socket": Field("--ntasks-per-socket", "NTPerSocket", "", "ntasks_per_socket"),
    "tasks_per_tres": Field("--ntasks-per-gpu", "", "NtasksPerTRES", "ntasks_per_gpu"),
    "threads_per_core": Field("--threads-per-core", "Threads", "", "threads_per_core"),
    "time_minimum": Field("--time-min", "MinTime", "", "time_limit_min"),
    "tres_bind": Field("--gpu-bind", "tres-bind", "TresBind"),
    "tres_freq": Field("--gpu-freq", "tres-freq", "TresFreq"),
}
"""Fields of a request that are empty unless an option set them."""

SHARED: Final = "oversubscribe"

SHARING: Final[Mapping[str, str]] = {
    "NO": "none", "NODE": "none", "YES": SHARED, "USER": "user", "MCS": "mcs", "TOPO": "topo",
}  # fmt: skip
"""Slurm's words for how a job shares nodes, and those of `Request.sharing`."""

_OPTION_OF_SHARING: Final[Mapping[str, str]] = {
    "none": "--exclusive",
    "user": "--exclusive=user",
    "mcs": "--exclusive=mcs",
    "topo": "--exclusive=topo",
}

_OPTION_OF_FLAG: Final[Mapping[str, str]] = {
    "CONSOLIDATE_SEGMENTS": "--consolidate-segments",
    "EXPEDITED_REQUEUE": "--requeue=expedite",
    "GRES_BINDING_ENFORCED": "--gres-flags",
    "GRES_ENFORCE_BIND": "--gres-flags",
    "SPREAD_JOB": "--spread-job",
    "SPREAD_SEGMENTS": "--spread-segments",
}

_GRES_FIELDS: Final = ("tres_per_node", "tres_per_job", "tres_per_task", "tres_per_socket")

Said = tuple[tuple[str, str], ...]
"""Names of fields that are set, and their texts where these count."""


def said(values: Mapping[str, object]) -> Said:
    """Bring fields into the form of `Request`; of most it counts only that they are set."""
    return tuple((name, "" if name in FIELDS else str(value)) for name, value in values.items() if value)


@dataclass(frozen=True, slots=True)
class Request:
    """All that tells which options a job was submitted with; many jobs have the same. 0 stands for not set."""

    values: Said = ()
    sharing: tuple[str, ...] = ()  # How it shares nodes, in words of `_OPTION_OF_SHARING`
    flags: tuple[str, ...] = ()
    partition: str = ""  # Names of the partitions asked for
    wckey: str = ""  # Workload characterization key; Slurm marks a default one with an asterisk
    node_count: int = 1  # The least number of nodes
    max_nodes: int = 0
    task_count: int = 1
    tasks_per_node: int = 0
    cpu_count: int = 1  # CPUs of the whole job
    cpus_per_task: int = 1
    min_cpus_per_node: int = 0
    all_mem: bool = False  # It asks for all memory of its nodes
    shares_all: bool = False  # Its partition shares CPUs of all jobs

    @property
    def shares_cpus(self) -> bool:
        """Whether it shares CPUs with others that do."""
        return SHARED in self.sharing


@lru_cache(maxsize=4096)
def special_options(request: Request) -> tuple[str, ...]:
    """Return the names of options that Muri does not carry over, in alphabetical order."""
    return tuple(sorted({*_of_fields(request), *_of_counts(request), *_of_gpus(request)}))


def _of_fields(request: Request) -> Iterator[str]:
    yield from (FIELDS[name].option for name, _ in request.values if name in FIELDS)
    yield from (_OPTION_OF_SHARING[word] for word in request.sharing if word in _OPTION_OF_SHARING)
    yield from (_OPTION_OF_FLAG[word] for word in request.flags if word in _OPTION_OF_FLAG)
    if request.shares_all:
        yield "--oversubscribe"
    if "," in request.partition:
        yield "--partition"
    if request.wckey.strip("*") and not request.wckey.startswith("*"):
        yield "--wckey"


def _of_counts(request: Request) -> Iterator[str]:
    # Without --nodes Slurm itself allows as many nodes as there are tasks.
    if request.max_nodes > request.node_count and request.max_nodes != request.task_count:
        yield "--nodes"
    if request.task_count > request.cpu_count:
        yield "--overcommit"
    if request.min_cpus_per_node > request.cpus_per_task * max(1, request.tasks_per_node):
        yield "--mincpus"
    if request.all_mem:
        yield "--mem"  # --mem=0


def _of_gpus(request: Request) -> Iterator[str]:
    values = dict(request.values)
    counts = {name: gres_counts(values.get(name, "")) for name in _GRES_FIELDS}
    if request_text(counts["tres_per_node"]) in WAYS:
        counts["tres_per_node"] = {}  # a member's: Muri has taken its GPUs away
    options = {"tres_per_job": "--gpus", "tres_per_task": "--gpus-per-task", "tres_per_socket": "--gpus-per-socket"}
    yield from (option for name, option in options.items() if any(_is_gpu(key) for key in counts[name]))
    kinds = {key for each in counts.values() for key in each}
    if any(not _is_gpu(kind) for kind in kinds) or len(kinds) > 1:
        yield "--gres"
    for name, option in (("cpus_per_tres", "--cpus-per-gpu"), ("memory_per_tres", "--mem-per-gpu")):
        # The partition's own default stands there as "gpu:3", what was asked for as "gres/gpu:3" or "gres:gpu:3".
        if re.match("gres[:/]", values.get(name, "")):
            yield option


def _is_gpu(kind: str) -> bool:
    return kind == "gpu" or kind.startswith("gpu:")


# A user may write any of these: Python refuses to read a number of thousands of digits.
_SUBMIT_LINE: Final = re.compile(r" SubmitLine=(.*?) WorkDir=/", re.DOTALL)
_REQUESTED: Final = re.compile(r" ReqTRES=(\S+)")
_THROTTLE: Final = re.compile(r"^JobId=\d+ ArrayJobId=\d+ ArrayTaskId=\S+ ArrayTaskThrottle=(\d{1,10}) ", re.MULTILINE)
_EXCLUDED: Final = re.compile(r" ExcNodeList=(\S+)")

_FLAGS: Final[Mapping[str, str]] = {
    " ExpeditedRequeue=Yes": "EXPEDITED_REQUEUE",  # once it is back, its user may not change it
    " GresEnforceBind=": "GRES_ENFORCE_BIND",
    " SpreadJob=Yes": "SPREAD_JOB",
    " SpreadSegments=Yes": "SPREAD_SEGMENTS",
    " ConsolidateSegments=Yes": "CONSOLIDATE_SEGMENTS",
}

_OPTIONS: Final[Mapping[str, str]] = {field.scontrol: name for name, field in FIELDS.items() if field.scontrol} | {
    "TresPerJob": "tres_per_job",
    "TresPerSocket": "tres_per_socket",
    "CpusPerTres": "cpus_per_tres",
    "MemPerTres": "memory_per_tres",
}

_OPTION: Final = re.compile(rf" ({'|'.join(_OPTIONS)})=(?!\(null\)|N/A)(\S+)")


@dataclass(frozen=True, slots=True)
class JobDetails:
    """The text of `scontrol show job` about one job's request."""

    submit_line: str = ""  # "" where Slurm does not keep it
    excluded_nodes: str = ""
    mem_per_cpu: bool = False  # Memory was asked for each CPU
    all_mem: bool = False  # It asked for no figure of memory, which stands for all of a node's
    array_limit: int = 0  # How many of its array's tasks may run at once, 0 for any number
    mem_mib: int = 0  # All memory that it asks for
    flags: tuple[str, ...] = ()  # In words of `_OPTION_OF_FLAG`
    options: Mapping[str, str] = field(default_factory=dict)  # Other fields by their names in `Request.values`


NO_DETAILS: Final = JobDetails()


def details_of(text: str) -> JobDetails:
    """Read Slurm's text of one job, all on one line."""
    throttle, requested = _THROTTLE.search(text), _REQUESTED.search(text)
    options = {_OPTIONS[name]: value for name, value in _OPTION.findall(text)}
    if "per_task" in options.get("tres_bind", "") and " TresPerTask=" in text:
        del options["tres_bind"]  # newer releases set it for --gpus-per-task
    memory = text[text.find(" MinMemory") :] if " MinMemory" in text else ""
    return JobDetails(
        submit_line=kept_text(_found(_SUBMIT_LINE, text)),
        excluded_nodes=_found(_EXCLUDED, text),
        mem_per_cpu=memory.startswith(" MinMemoryCPU="),
        all_mem=memory.startswith(" MinMemoryNode=0 "),
        array_limit=0 if throttle is None else bounded(int(throttle[1])),
        mem_mib=0 if requested is None else int(counted_tres(requested[1]).get("mem", 0.0)),
        flags=tuple(flag for word, flag in _FLAGS.items() if word in text),
        options=options,
    )


def _found(form: re.Pattern[str], text: str) -> str:
    match = form.search(text)
    return "" if match is None or match[1] == "(null)" else match[1]
