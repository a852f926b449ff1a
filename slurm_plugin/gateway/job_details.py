"""What a job asks for beyond what squeue and pyslurm show, and which of sbatch's options Muri does not carry over.

scontrol prints a job as `name=value`, and users' texts among them. A user can add to what his own job seems to ask for,
and nothing to another's: a job is told from the next by lines that begin with "JobId=", and one that two of them name
is asked for by itself.

Both gateways bring a job's record into one form, `Request`, so that they agree on its options; its names are those of
`squeue --json`.
"""

import logging
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError, TooLongAnswerError
from muri.slurm_plugin.gateway.slurm_commands import decoded
from muri.slurm_plugin.records.cluster import Unreadable
from muri.slurm_plugin.records.comment_tags import REQUEST_PREFIX, token
from muri.slurm_plugin.records.limits import WAYS

OPTION_OF_FIELD: Final[Mapping[str, str]] = {
    "burst_buffer": "--bb",
    "cluster_features": "--cluster-constraint",
    "container": "--container",
    "container_id": "--container-id",
    "contiguous": "--contiguous",
    "core_spec": "--core-spec",
    "cores_per_socket": "--cores-per-socket",
    "cpu_frequency_governor": "--cpu-freq",
    "cpu_frequency_maximum": "--cpu-freq",
    "cpu_frequency_minimum": "--cpu-freq",
    "deadline": "--deadline",
    "extra": "--extra",
    "mcs_label": "--mcs-label",
    "minimum_tmp_disk_per_node": "--tmp",
    "network": "--network",
    "prefer": "--prefer",
    "reboot": "--reboot",
    "required_switches": "--switches",
    "segment_size": "--segment",
    "sockets_per_node": "--sockets-per-node",
    "tasks_per_board": "--ntasks-per-board",
    "tasks_per_core": "--ntasks-per-core",
    "tasks_per_socket": "--ntasks-per-socket",
    "tasks_per_tres": "--ntasks-per-gpu",
    "threads_per_core": "--threads-per-core",
    "time_minimum": "--time-min",
    "tres_bind": "--gpu-bind",
    "tres_freq": "--gpu-freq",
}
"""Fields that say nothing unless an option set them."""

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
"""Names of fields that say something, and their texts where these count."""


def said(values: Mapping[str, object]) -> Said:
    """Bring fields into the form that `Request` takes; of most it counts only that they say something."""
    return tuple((name, "" if name in OPTION_OF_FIELD else str(value)) for name, value in values.items() if value)


@dataclass(frozen=True, slots=True)
class Request:
    """What decides which options a job was submitted with; many jobs have the same.

    Attributes:
        values: What fields say, as far as they are known.
        sharing: How it shares nodes, in words of `_OPTION_OF_SHARING`.
        flags: Flags of the request.
        partition: Names of the partitions asked for.
        wckey: Workload characterisation key; Slurm marks a default one with an asterisk.
        node_count: Nodes asked for, at least.
        max_nodes: Nodes asked for, at most; 0 when not set.
        task_count: Tasks.
        tasks_per_node: Tasks on each node, 0 when not set.
        cpu_count: CPUs of the whole job.
        cpus_per_task: CPUs of a task.
        min_cpus_per_node: CPUs that each node must have.
        all_mem: Whether it asks for all memory of its nodes.
    """

    values: Said = ()
    sharing: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    partition: str = ""
    wckey: str = ""
    node_count: int = 1
    max_nodes: int = 0
    task_count: int = 1
    tasks_per_node: int = 0
    cpu_count: int = 1
    cpus_per_task: int = 1
    min_cpus_per_node: int = 0
    all_mem: bool = False


@lru_cache(maxsize=4096)
def special_options(request: Request) -> tuple[str, ...]:
    """Return the names of the options, in alphabetical order."""
    return tuple(sorted({*_of_fields(request), *_of_counts(request), *_of_gpus(request)}))


def _of_fields(request: Request) -> Iterator[str]:
    yield from (OPTION_OF_FIELD[name] for name, _ in request.values if name in OPTION_OF_FIELD)
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

_OPTIONS: Final[Mapping[str, str]] = {
    "CPU_min_freq": "cpu_frequency_minimum",
    "CPU_max_freq": "cpu_frequency_maximum",
    "Governor": "cpu_frequency_governor",
    "Extra": "extra",
    "NtasksPerTRES": "tasks_per_tres",
    "TresBind": "tres_bind",
    "TresFreq": "tres_freq",
    "TresPerJob": "tres_per_job",
    "TresPerSocket": "tres_per_socket",
    "CpusPerTres": "cpus_per_tres",
    "MemPerTres": "memory_per_tres",
}

_OPTION: Final = re.compile(rf" ({'|'.join(_OPTIONS)})=(?!\(null\)|N/A)(\S+)")

Show = Callable[[int], bytes | bytearray]
"""Returns what Slurm prints of one job, or of all for 0."""


@dataclass(frozen=True, slots=True)
class JobDetails:
    """What Slurm told once of a job.

    Attributes:
        submit_line: The command line that it was submitted with, "" where Slurm does not keep it.
        excluded_nodes: Nodes that it must not get.
        mem_per_cpu: Whether memory was asked for each CPU.
        all_mem: Whether it asked for no figure of memory, which stands for all of a node's.
        array_limit: How many of its array's tasks may run at once, 0 for any number.
        mem_mib: All memory that it asks for.
        flags: Words of flags as `special_options` knows them.
        options: Other fields by the names that `special_options` has for them.
    """

    submit_line: str = ""
    excluded_nodes: str = ""
    mem_per_cpu: bool = False
    all_mem: bool = False
    array_limit: int = 0
    mem_mib: int = 0
    flags: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


NO_DETAILS: Final = JobDetails()


def untold(wanted: Iterable[int], told: Mapping[int, JobDetails]) -> list[Unreadable]:
    """Return the jobs that have to wait, for nobody knows all that they ask for."""
    return [Unreadable(job_id, "Slurm did not tell all it asks for") for job_id in wanted if job_id not in told]


def wants_details(admin_comment: str, state: str) -> bool:
    """Whether all that a job asks for counts: Muri may start it, or has started it.

    Args:
        admin_comment: Its AdminComment.
        state: Slurm's word for its state.
    """
    # The first test spares most texts the second.
    tagged = REQUEST_PREFIX in admin_comment and token(admin_comment, REQUEST_PREFIX) is not None
    return tagged and text_fields.job_state((state,)).is_active


def details_of(text: str) -> JobDetails:
    """Read what Slurm prints of one job, all on one line."""
    line, excluded, throttle = _SUBMIT_LINE.search(text), _EXCLUDED.search(text), _THROTTLE.search(text)
    options = {_OPTIONS[name]: value for name, value in _OPTION.findall(text)}
    if "per_task" in options.get("tres_bind", "") and " TresPerTask=" in text:
        del options["tres_bind"]  # newer releases set it for --gpus-per-task
    memory, requested = text.find(" MinMemory"), _REQUESTED.search(text)
    return JobDetails(
        submit_line="" if line is None or line[1] == "(null)" else text_fields.kept_text(line[1]),
        excluded_nodes="" if excluded is None or excluded[1] == "(null)" else excluded[1],
        mem_per_cpu=text.startswith(" MinMemoryCPU=", memory) if memory >= 0 else False,
        all_mem=text.startswith(" MinMemoryNode=0 ", memory) if memory >= 0 else False,
        array_limit=0 if throttle is None else text_fields.bounded(int(throttle[1])),
        mem_mib=0 if requested is None else int(text_fields.counted_tres(requested[1]).get("mem", 0.0)),
        flags=tuple(flag for word, flag in _FLAGS.items() if word in text),
        options=options,
    )


class DetailsReader:
    """Keeps what was told of jobs as long as they are asked about; each is asked for once.

    Args:
        show: Asks Slurm.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._told: dict[int, tuple[object, JobDetails]] = {}

    def read(self, wanted: Mapping[int, object]) -> Mapping[int, JobDetails]:
        """Return what is known of jobs; one that cannot be read now is missing.

        Args:
            wanted: The jobs, and of each what its details belong to: where that differs from the last time they are
                asked for anew.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
        """
        self._told = {job_id: self._told[job_id] for job_id in wanted if job_id in self._told}
        new = sorted(job_id for job_id, of in wanted.items() if job_id not in self._told or self._told[job_id][0] != of)
        for job_id, text in self._texts(new):
            self._told[job_id] = wanted[job_id], details_of(text)
        return {job_id: details for job_id, (_, details) in self._told.items()}

    def _texts(self, job_ids: Collection[int]) -> Iterator[tuple[int, str]]:
        alone: Iterable[int] = job_ids
        if len(job_ids) > _FEW:
            together = self._together()
            found = {job_id: together[job_id] for job_id in job_ids if len(together.get(job_id, ())) == 1}
            yield from ((job_id, decoded(texts[0])) for job_id, texts in found.items())
            alone = _some([job_id for job_id in job_ids if job_id not in found])
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


def _some(job_ids: list[int]) -> list[int]:
    """Return as many as may be asked for one by one: others each time, so that nobody's text keeps a job waiting."""
    if len(job_ids) <= _MOST_ALONE:
        return job_ids
    log.warning(
        "texts of users pretend to be %d other jobs, or all jobs say too much: what %d of these ask for is read now",
        len(job_ids), _MOST_ALONE,
    )  # fmt: skip
    return sorted(random.sample(job_ids, _MOST_ALONE))
