"""What only `scontrol show job` tells of a job: squeue and pyslurm do not show it.

scontrol prints a job as `name=value`, and users' texts among them. A user can add to what his own job seems to ask for,
and nothing to another's: a job is told from the next by lines that begin with "JobId=", and one that two of them name
is asked for by itself.
"""

import logging
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError, TooLongAnswerError
from muri.slurm_plugin.gateway.slurm_commands import decoded
from muri.slurm_plugin.records.cluster import Unreadable
from muri.slurm_plugin.records.comment_tags import REQUEST_PREFIX, token

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
