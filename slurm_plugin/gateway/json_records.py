"""Read the JSON of squeue, sinfo and scontrol; all differences between Slurm's versions live here.

Tried with Slurm 22.05 (openapi v0.0.38) and 26.05 (data_parser v0.0.45).
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.cluster import Job, JobState, Node

#: Slurm's NO_VAL and INFINITE of 16, 32 and 64 bits. Slurm 22.05 prints some of them as plain numbers.
_NOT_A_VALUE = frozenset({0xFFFE, 0xFFFF, 0xFFFF_FFFE, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFE, 0xFFFF_FFFF_FFFF_FFFF})


def parse_document(text: str, command: str) -> Mapping[str, Any]:
    """Parse a command's JSON output.

    Raises:
        GatewayError: It is no JSON, or Slurm reports errors inside.
    """
    try:
        document = json.loads(text)
    except ValueError as err:
        raise GatewayError(f"`{command}` did not print JSON ({err}): is its JSON plug-in installed?") from err
    if not isinstance(document, dict):
        raise GatewayError(f"`{command}` printed JSON that is not an object")
    errors = [str(error.get("description") or error.get("error")) for error in document.get("errors") or []]
    if errors:
        raise GatewayError(f"`{command}` reports: {'; '.join(errors)}")
    return document


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
    """Read a number in either form.

    Newer versions write `{"set": true, "infinite": false, "number": 5}`, older ones plain numbers, null, or
    the raw constants for "not set" and "unlimited"; those all give `default`.
    """
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return default
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) in _NOT_A_VALUE:
        return default
    return int(value)


def words(value: object) -> list[str]:
    """Read a list of words, which older versions write as one string."""
    if isinstance(value, str):
        return [value] if value else []
    return [str(item) for item in value] if isinstance(value, list) else []


def jobs(document: Mapping[str, Any], taken_s: float) -> Iterator[Job]:
    """Convert `squeue --json`, in the document's order."""
    for record in _records(document, "jobs"):
        try:
            yield job(record, taken_s)
        except (KeyError, TypeError, ValueError) as err:
            raise GatewayError(f"job {record.get('job_id')}: cannot read its record: {err!r}") from err


def job(record: Mapping[str, Any], taken_s: float) -> Job:
    """Convert one record of `squeue --json`."""
    state = text_fields.job_state(words(record.get("job_state")))
    node_count = _node_count(record, state)
    task_count = number(record.get("tasks"), 1)
    cpu_count = number(record.get("cpus"), 1)
    eligible_s = number(record.get("eligible_time"))
    return Job(
        job_id=int(record["job_id"]),
        user=record.get("user_name") or str(record["user_id"]),
        uid=int(record["user_id"]),
        gid=int(record["group_id"]),
        account=record.get("account") or "",
        partition=text_fields.first_partition(record.get("partition") or ""),
        qos=record.get("qos") or "",
        name=record.get("name") or "",
        state=state,
        reason=text_fields.reason_text(
            record.get("state_description") or record.get("state_reason"), words(record.get("job_state"))
        ),
        held=number(record.get("priority"), 1) == 0,
        submit_s=number(record.get("submit_time")),
        begin_s=eligible_s if state is state.PENDING and eligible_s > taken_s else 0,
        start_s=0 if state is state.PENDING else number(record.get("start_time")),
        end_s=0 if state.is_active else number(record.get("end_time")),
        time_limit_s=60 * number(record.get("time_limit")),
        gpu_count=_gpu_count(record, node_count, task_count),
        gpu_request=text_fields.request_text(text_fields.gres_counts(record.get("tres_per_node") or "")),
        node_count=node_count,
        cpu_count=cpu_count,
        cpus_per_task=number(record.get("cpus_per_task")) or max(1, cpu_count // max(1, task_count)),
        mem_per_node_mib=_mem_per_node_mib(record, cpu_count, node_count),
        nodes=record.get("nodes") or "",
        required_nodes=record.get("required_nodes") or "",
        dependency=text_fields.dependency_text(record.get("dependency") or ""),
        can_requeue=bool(record.get("requeue")),
        restart_count=number(record.get("restart_cnt")),
        exit_code=_exit_code(record.get("exit_code")),
        batch=bool(record.get("batch_flag")),
        array=bool(number(record.get("array_job_id")) or record.get("array_task_string")),
        het=bool(number(record.get("het_job_id"))),
        command=record.get("command") or "",
        submit_line=record.get("submit_line") or "",
        work_dir=record.get("current_working_directory") or "",
        admin_comment=record.get("admin_comment") or "",
        comment=record.get("comment") or "",
        mem_per_cpu_mib=number(record.get("memory_per_cpu")),
    )


def _node_count(record: Mapping[str, Any], state: JobState) -> int:
    """Nodes asked for. Of a pending job Slurm 22.05 guesses `node_count` from its CPUs; the TRES text is right."""
    match = re.search(r"(?:^|,)node=(\d+)", record.get("tres_req_str") or "") if state is JobState.PENDING else None
    return int(match[1]) if match else number(record.get("node_count"), 1)


def _gpu_count(record: Mapping[str, Any], node_count: int, task_count: int) -> int:
    return text_fields.job_gpus(
        per_job=record.get("tres_per_job") or "",
        per_node=record.get("tres_per_node") or "",
        per_socket=record.get("tres_per_socket") or "",
        per_task=record.get("tres_per_task") or "",
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
    """Convert the nodes of `sinfo --json` or `scontrol show nodes --json`, in the document's order."""
    for record in _records(document, "nodes"):
        try:
            yield node(record)
        except (KeyError, TypeError, ValueError) as err:
            raise GatewayError(f"node {record.get('name')}: cannot read its record: {err!r}") from err


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
    )


def _split(value: object) -> Sequence[str] | object:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value
