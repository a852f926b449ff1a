"""Read the JSON of squeue, sinfo and scontrol; all differences between Slurm's versions live here.

Tried with Slurm 22.05 (openapi v0.0.38) and 26.05 (data_parser v0.0.45).
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from muri.slurm_plugin.gateway import json_stream, text_fields
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.special_options import OPTION_OF_FIELD, Request, special_options
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Unreadable

log = logging.getLogger(__name__)

BROKEN_RECORD: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record of an unexpected form may raise."""

Record = TypeVar("Record")

_TEXTS_OF_GPUS: Final = (
    "tres_per_node", "tres_per_job", "tres_per_task", "tres_per_socket", "cpus_per_tres", "memory_per_tres",
)  # fmt: skip

_NO_THREADS: Final = 0x7FFE

#: Slurm's NO_VAL and INFINITE of 16, 32 and 64 bits. Slurm 22.05 prints some of them as plain numbers.
_NOT_A_VALUE = frozenset({0xFFFE, 0xFFFF, 0xFFFF_FFFE, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFE, 0xFFFF_FFFF_FFFF_FFFF})


def parse_document(text: str, command: str) -> Mapping[str, Any]:
    """Parse a command's JSON output.

    Raises:
        GatewayError: It is no JSON, or Slurm reports errors inside.
    """
    try:
        document = json.loads(text, strict=False)
    except (ValueError, RecursionError) as err:
        raise _no_json(command, err) from err
    if not isinstance(document, dict):
        raise GatewayError(f"`{command}` printed JSON that is not an object")
    _check_errors(document, command)
    return document


def _no_json(command: str, error: Exception) -> GatewayError:
    return GatewayError(f"`{command}` did not print JSON ({error}): is its JSON plug-in installed?")


def _check_errors(document: Mapping[str, Any], command: str) -> None:
    errors = document.get("errors")
    if errors and isinstance(errors, list):
        said = [
            error.get("description") or error.get("error") if isinstance(error, dict) else error for error in errors
        ]
        raise GatewayError(f"`{command}` reports: {'; '.join(map(str, said))}")


def queue_command(data_parsers: str = "") -> list[str]:
    """Return the command that prints one record per job.

    Args:
        data_parsers: What `squeue --json=list` prints. Slurm 26.05's own form of the JSON, v0.0.45, has lost which
            jobs asked for --exclusive; the form before it has not.
    """
    form = "=v0.0.44" if "v0.0.44" in data_parsers and "v0.0.45" in data_parsers else ""
    return ["squeue", "--all", "--states=all", f"--json{form}"]


def node_command(version: tuple[int, ...]) -> list[str]:
    """Return the command that prints one record per node.

    Slurm 22.05's scontrol knows no JSON; newer versions' sinfo groups the nodes by state instead.
    """
    return ["sinfo", "--all", "--json"] if version < (22, 11) else ["scontrol", "--all", "show", "nodes", "--json"]


def _records(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    records = document.get(key)
    if not isinstance(records, list):
        raise GatewayError(f"Slurm's JSON holds no {key!r}: this version of Slurm is not known to Muri")
    return records


def number(value: object, default: int = 0) -> int:
    """Read a number in either form, no larger than any that is meant.

    Newer versions write `{"set": true, "infinite": false, "number": 5}`, older ones plain numbers, null, or
    the raw constants for "not set" and "unlimited"; those all give `default`.
    """
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return default
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) in _NOT_A_VALUE:
        return default
    return text_fields.bounded(int(value))


def _text(record: Mapping[str, Any], name: str) -> str:
    """Read a text; "" where there is none."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _free_text(record: Mapping[str, Any], name: str) -> str:
    """Read a text that its user may make as long as he likes."""
    return text_fields.kept_text(_text(record, name))


def words(value: object) -> list[str]:
    """Read a list of words, which older versions write as one string."""
    if isinstance(value, str):
        return [value] if value else []
    return [str(item) for item in value] if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class Queue:
    """What squeue prints.

    Attributes:
        jobs: The jobs.
        unreadable: Those whose records cannot be read.
        slurmctld_s: slurmctld's time, in seconds since the epoch; 0 where it does not tell.
    """

    jobs: list[Job]
    unreadable: list[Unreadable]
    slurmctld_s: float = 0.0


def read_queue(output: bytes | bytearray, command: str, taken_s: float) -> Queue:
    """Read the output of `squeue --json`, one record after the other.

    Raises:
        GatewayError: It is no JSON, holds no jobs, or Slurm reports errors inside.
    """
    document: dict[str, Any] = {}
    try:
        records = json_stream.items(output, "jobs", document)
        found, unreadable = read_each(records, lambda record: job(record, taken_s), _job_id)
    except (ValueError, RecursionError) as err:
        raise _no_json(command, err) from err
    _check_errors(document, command)
    _records(document, "jobs")
    return Queue(found, unreadable, number(document.get("last_update")))


def read_each(
    records: Iterable[Any], read: Callable[[Any], Record], job_id: Callable[[Any], int]
) -> tuple[list[Record], list[Unreadable]]:
    """Read records one by one, so that a broken one costs itself only.

    Args:
        records: As Slurm gives them.
        read: Makes one of Muri's records.
        job_id: Returns the job's id, whatever else is broken.
    """
    found: list[Record] = []
    unreadable: list[Unreadable] = []
    for record in records:
        try:
            found.append(read(record))
        except BROKEN_RECORD as error:
            unreadable.append(Unreadable(job_id(record), f"its record cannot be read: {error!r}"))
    return found, unreadable


def _job_id(record: Any) -> int:
    return number(record.get("job_id")) if isinstance(record, Mapping) else 0


def job(record: Mapping[str, Any], taken_s: float) -> Job:
    """Convert one record of `squeue --json`."""
    state = text_fields.job_state(words(record.get("job_state")))
    node_count = _node_count(record, state)
    task_count = _count(record, "tasks")
    cpu_count = _count(record, "cpus")
    eligible_s = number(record.get("eligible_time"))
    priority = number(record.get("priority"), 1)
    reason = _text(record, "state_description") or _text(record, "state_reason")
    return Job(
        job_id=_required(record, "job_id"),
        user=_text(record, "user_name") or str(_required(record, "user_id")),
        uid=_required(record, "user_id"),
        gid=_required(record, "group_id"),
        account=_text(record, "account"),
        partition=text_fields.first_partition(_text(record, "partition")),
        qos=_text(record, "qos"),
        name=_free_text(record, "name"),
        state=state,
        reason=text_fields.reason_text(reason, words(record.get("job_state"))),
        held=priority == 0,
        submit_s=number(record.get("submit_time")),
        begin_s=eligible_s if state is state.PENDING and eligible_s > taken_s else 0,
        start_s=0 if state is state.PENDING else number(record.get("start_time")),
        end_s=0 if state.is_active else number(record.get("end_time")),
        time_limit_s=60 * number(record.get("time_limit")),
        gpu_count=_gpu_count(record, node_count, task_count),
        gpu_request=text_fields.request_text(text_fields.gres_counts(_text(record, "tres_per_node"))),
        node_count=node_count,
        cpu_count=cpu_count,
        cpus_per_task=_cpus_per_task(record, cpu_count, task_count),
        mem_per_node_mib=_mem_per_node_mib(record, cpu_count, node_count),
        nodes=_text(record, "nodes"),
        required_nodes=_text(record, "required_nodes"),
        dependency=text_fields.dependency_text(_text(record, "dependency")),
        can_requeue=bool(record.get("requeue")),
        restart_count=number(record.get("restart_cnt")),
        exit_code=_exit_code(record.get("exit_code")),
        batch=bool(record.get("batch_flag")),
        array=bool(number(record.get("array_job_id")) or record.get("array_task_string")),
        het=bool(number(record.get("het_job_id"))),
        command=_free_text(record, "command"),
        submit_line=_free_text(record, "submit_line"),
        work_dir=_free_text(record, "current_working_directory"),
        admin_comment=_text(record, "admin_comment"),
        comment=_free_text(record, "comment"),
        mem_per_cpu_mib=number(record.get("memory_per_cpu")),
        priority=priority,
        licenses=text_fields.license_text(_text(record, "licenses")),
        reservation=_text(record, "resv_name"),
        features=_text(record, "features"),
        excluded_nodes=_text(record, "excluded_nodes"),
        special=special_options(_request(record, node_count, cpu_count, task_count)),
        array_job_id=number(record.get("array_job_id")),
        array_tasks=_array_tasks(record),
        array_limit=number(record.get("array_max_tasks")),
    )


def _array_tasks(record: Mapping[str, Any]) -> str:
    """Read which tasks of its array a record stands for."""
    if waiting := text_fields.waiting_tasks(_text(record, "array_task_string")):
        return waiting
    task = number(record.get("array_task_id"), -1)
    return str(task) if number(record.get("array_job_id")) and task >= 0 else ""


def _required(record: Mapping[str, Any], name: str) -> int:
    """Read a number that every record has.

    Raises:
        ValueError: It has not, or it is none.
    """
    value = number(record[name], -1)
    if value < 0:
        raise ValueError(f"{name} is no number")
    return value


def _count(record: Mapping[str, Any], name: str) -> int:
    return text_fields.bounded(number(record.get(name), 1), text_fields.MOST)


def _cpus_per_task(record: Mapping[str, Any], cpu_count: int, task_count: int) -> int:
    asked = text_fields.bounded(number(record.get("cpus_per_task")), text_fields.MOST)
    return asked or max(1, cpu_count // max(1, task_count))


def _request(record: Mapping[str, Any], node_count: int, cpu_count: int, task_count: int) -> Request:
    values = {name: _said(record.get(name)) for name in (*OPTION_OF_FIELD, *_TEXTS_OF_GPUS)}
    # Slurm 22.05 confuses the two, and 26.05 shows 0x7FFE where no threads are set aside.
    threads = number(record.get("thread_spec"))
    values["core_spec"] = number(record.get("core_spec")) or (threads if threads != _NO_THREADS else 0)
    if "per_task" in _text(record, "tres_bind") and _text(record, "tres_per_task"):
        values["tres_bind"] = ""  # newer releases set it for --gpus-per-task
    if _text(record, "mcs_label") == _text(record, "user_name"):
        values["mcs_label"] = ""  # mcs/user gives every job its user's
    return Request(
        values=values,
        sharing=tuple(words(record.get("shared"))),
        flags=tuple(words(record.get("flags"))),
        partition=_text(record, "partition"),
        wckey=_text(record, "wckey"),
        node_count=node_count,
        max_nodes=number(record.get("max_nodes")),
        task_count=task_count,
        tasks_per_node=number(record.get("tasks_per_node")),
        cpu_count=cpu_count,
        cpus_per_task=_cpus_per_task(record, cpu_count, task_count),
        min_cpus_per_node=number(record.get("minimum_cpus_per_node")),
        mem_mib=number(record.get("memory_per_node")) or number(record.get("memory_per_cpu")),
    )


def _said(value: object) -> object:
    """Return a field's value, nothing where it says that it is not set."""
    return value if isinstance(value, (str, bool)) else number(value)


def _node_count(record: Mapping[str, Any], state: JobState) -> int:
    """Nodes asked for. Of a pending job Slurm 22.05 guesses `node_count` from its CPUs; the TRES text is right."""
    pending = state is JobState.PENDING
    match = re.search(r"(?:^|,)node=(\d{1,15})", _text(record, "tres_req_str")) if pending else None
    count = int(match[1]) if match else number(record.get("node_count"), 1)
    return text_fields.bounded(count, text_fields.MOST)


def _gpu_count(record: Mapping[str, Any], node_count: int, task_count: int) -> int:
    return text_fields.job_gpus(
        per_job=_text(record, "tres_per_job"),
        per_node=_text(record, "tres_per_node"),
        per_socket=_text(record, "tres_per_socket"),
        per_task=_text(record, "tres_per_task"),
        node_count=node_count,
        task_count=task_count,
    )


def _mem_per_node_mib(record: Mapping[str, Any], cpu_count: int, node_count: int) -> int:
    if per_node := number(record.get("memory_per_node")):
        return per_node
    return mem_of_cpus_mib(number(record.get("memory_per_cpu")), cpu_count, node_count)


def mem_of_cpus_mib(mem_per_cpu_mib: int, cpu_count: int, node_count: int) -> int:
    """Memory per node that a request per CPU comes to."""
    return mem_per_cpu_mib * -(-cpu_count // max(1, node_count))


def _exit_code(value: object) -> int:
    """Read an exit status: an object in newer versions, the raw wait status in Slurm 22.05."""
    if isinstance(value, dict):
        return number(value.get("return_code"))
    status = number(value)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0


def nodes(document: Mapping[str, Any]) -> Iterator[Node]:
    """Convert the nodes of `sinfo --json` or `scontrol show nodes --json`; one that cannot be read is left out."""
    for record in _records(document, "nodes"):
        try:
            yield node(record)
        except BROKEN_RECORD as error:
            log.warning("a node is left out, for its record cannot be read: %r; in %.200r", error, record)


def node(record: Mapping[str, Any]) -> Node:
    """Convert one node record."""
    flags = [word for word in words(record.get("state_flags")) if word]
    state = [word.upper() for word in (*words(record.get("state")), *flags)]
    configured = text_fields.gres_counts(record.get("gres") or "")
    return Node(
        name=str(record["name"]),
        usable=text_fields.node_usable(state),
        state="+".join(state),
        partitions=tuple(sorted(words(_split(record.get("partitions"))))),
        cpu_count=number(record.get("effective_cpus")) or number(record["cpus"]),
        cpus_allocated=number(record.get("alloc_cpus")),
        gpu_count=text_fields.gpu_total(configured),
        gpus_allocated=text_fields.gpu_total(text_fields.gres_counts(record.get("gres_used") or "")),
        gpu_type=text_fields.gpu_type(configured),
        mem_mib=text_fields.node_mem_mib(number(record.get("real_memory")), number(record.get("specialized_memory"))),
        mem_allocated_mib=number(record.get("alloc_memory")),
        threads_per_core=max(1, number(record.get("threads"), 1)),
        features=tuple(words(_split(record.get("features")))),
    )


def _split(value: object) -> Sequence[str] | object:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value
