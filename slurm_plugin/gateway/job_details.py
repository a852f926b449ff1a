"""The parts of a job's request that squeue and pyslurm do not show, and the options that Muri does not carry over.

scontrol prints a job as `name=value`, with users' texts among them. A user can add to the apparent request of his own
job, and nothing to another's: jobs are told apart by lines that begin with "JobId=", and one that two of them name is
asked for by itself. Both gateways bring a job's record into one form, `Request`, so that they agree on its options; its
names are those of `squeue --json`.
"""

import logging
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError, TooLongAnswerError
from muri.slurm_plugin.gateway.slurm_commands import decoded
from muri.slurm_plugin.records.cluster import Unreadable
from muri.slurm_plugin.records.comment_tags import REQUEST_PREFIX, token
from muri.slurm_plugin.records.limits import WAYS


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

_OPTION_OF_SHARING: Final[Mapping[str, str]] = {
    "none": "--exclusive",
    "user": "--exclusive=user",
    "mcs": "--exclusive=mcs",
    "topo": "--exclusive=topo",
    "oversubscribe": "--oversubscribe",
    "shared": "--oversubscribe",
}

_OPTION_OF_FLAG: Final[Mapping[str, str]] = {
    "CONSOLIDATE_SEGMENTS": "--consolidate-segments",
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


@lru_cache(maxsize=4096)
def special_options(request: Request) -> tuple[str, ...]:
    """Return the names of options that Muri does not carry over, in alphabetical order."""
    return tuple(sorted({*_of_fields(request), *_of_counts(request), *_of_gpus(request)}))


def _of_fields(request: Request) -> Iterator[str]:
    yield from (FIELDS[name].option for name, _ in request.values if name in FIELDS)
    yield from (_OPTION_OF_SHARING[word] for word in request.sharing if word in _OPTION_OF_SHARING)
    yield from (_OPTION_OF_FLAG[word] for word in request.flags if word in _OPTION_OF_FLAG)
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
    counts = {name: text_fields.gres_counts(values.get(name, "")) for name in _GRES_FIELDS}
    if text_fields.request_text(counts["tres_per_node"]) in WAYS:
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


log = logging.getLogger(__name__)

#: So many jobs are asked for one by one, each a small RPC; more of them together with all others.
_FEW: Final = 8

#: So many are asked for one by one at the most, where all together say too much, or texts pretend to be jobs.
_MOST_ALONE: Final = 1000

_BEGIN: Final = re.compile(rb"^JobId=([1-9][0-9]{0,9}) ", re.MULTILINE)
_SUBMIT_LINE: Final = re.compile(r" SubmitLine=(.*?) WorkDir=/", re.DOTALL)
_REQUESTED: Final = re.compile(r" ReqTRES=(\S+)")
_THROTTLE: Final = re.compile(r"^JobId=\d+ ArrayJobId=\d+ ArrayTaskId=\S+ ArrayTaskThrottle=(\d+) ", re.MULTILINE)
_EXCLUDED: Final = re.compile(r" ExcNodeList=(\S+)")

_FLAGS: Final[Mapping[str, str]] = {
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

Show = Callable[[int], bytes | bytearray]
"""Returns Slurm's text of one job, or of all for 0."""


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


def untold(wanted: Iterable[int], told: Mapping[int, JobDetails]) -> list[Unreadable]:
    """Return the jobs that have to wait because their details are unknown."""
    return [Unreadable(job_id, "Slurm did not tell all it asks for") for job_id in wanted if job_id not in told]


def wants_details(admin_comment: str, state: str) -> bool:
    """Whether the details of a job with that AdminComment and Slurm state count: Muri may start it, or has done so."""
    # The first test spares most texts the second.
    tagged = REQUEST_PREFIX in admin_comment and token(admin_comment, REQUEST_PREFIX) is not None
    return tagged and text_fields.job_state((state,)).is_active


def details_of(text: str) -> JobDetails:
    """Read Slurm's text of one job, all on one line."""
    throttle, requested = _THROTTLE.search(text), _REQUESTED.search(text)
    options = {_OPTIONS[name]: value for name, value in _OPTION.findall(text)}
    if "per_task" in options.get("tres_bind", "") and " TresPerTask=" in text:
        del options["tres_bind"]  # newer releases set it for --gpus-per-task
    memory = text[text.find(" MinMemory") :] if " MinMemory" in text else ""
    return JobDetails(
        submit_line=text_fields.kept_text(_found(_SUBMIT_LINE, text)),
        excluded_nodes=_found(_EXCLUDED, text),
        mem_per_cpu=memory.startswith(" MinMemoryCPU="),
        all_mem=memory.startswith(" MinMemoryNode=0 "),
        array_limit=0 if throttle is None else text_fields.bounded(int(throttle[1])),
        mem_mib=0 if requested is None else int(text_fields.counted_tres(requested[1]).get("mem", 0.0)),
        flags=tuple(flag for word, flag in _FLAGS.items() if word in text),
        options=options,
    )


def _found(form: re.Pattern[str], text: str) -> str:
    match = form.search(text)
    return "" if match is None or match[1] == "(null)" else match[1]


class DetailsReader:
    """Keeps the details of jobs as long as they are wanted; each is asked for once.

    Args:
        show: Asks Slurm.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._kept: dict[int, tuple[object, JobDetails]] = {}

    def read(self, wanted: Mapping[int, object]) -> Mapping[int, JobDetails]:
        """Return the known details of jobs; one that cannot be read now is missing.

        Args:
            wanted: The jobs, each with a value; where that differs from the last time, they are asked for anew.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        self._kept = {job_id: self._kept[job_id] for job_id in wanted if job_id in self._kept}
        new = sorted(job_id for job_id, of in wanted.items() if job_id not in self._kept or self._kept[job_id][0] != of)
        for job_id, text in self._texts(new):
            self._kept[job_id] = wanted[job_id], details_of(text)
        return {job_id: details for job_id, (_, details) in self._kept.items()}

    def _texts(self, job_ids: Collection[int]) -> Iterator[tuple[int, str]]:
        alone = list(job_ids)
        if len(job_ids) > _FEW:
            together = self._together()
            found = {job_id: together[job_id] for job_id in job_ids if len(together.get(job_id, ())) == 1}
            yield from ((job_id, decoded(texts[0])) for job_id, texts in found.items())
            alone = [job_id for job_id in job_ids if job_id not in found]
        if len(alone) > _MOST_ALONE:
            log.warning(
                "texts of users pretend to be %d other jobs, or all jobs say too much: %d requests are read now",
                len(alone),
                _MOST_ALONE,
            )
            # Others each time, so that no user's text keeps a job waiting.
            alone = sorted(random.sample(alone, _MOST_ALONE))
        for job_id in alone:
            if text := self._alone(job_id):
                yield job_id, text

    def _together(self) -> Mapping[int, list[bytes]]:
        """Return the texts of all jobs, more than one for a job where a user's text pretends to be another job."""
        try:
            text = self._show(0)
        except TooLongAnswerError as error:
            log.warning("jobs are asked for one by one: %s", error)
            return {}
        begins = [(int(match[1]), match.start()) for match in _BEGIN.finditer(text)]
        ends = [start for _, start in begins[1:]] + [len(text)]
        texts: dict[int, list[bytes]] = {}
        for (job_id, start), end in zip(begins, ends, strict=True):
            texts.setdefault(job_id, []).append(bytes(text[start:end]))
        return texts

    def _alone(self, job_id: int) -> str:
        try:
            return decoded(self._show(job_id))
        except SlurmUnreachableError:
            raise
        except NoSuchJobError:
            return ""
        except GatewayError as error:
            log.warning("cannot learn all that job %d asks for: %s", job_id, error)
            return ""
