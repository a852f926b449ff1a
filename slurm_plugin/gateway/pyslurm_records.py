"""Translate between Muri's records and pyslurm's."""

import pwd
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.json_records import mem_of_cpus_mib
from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob


class Cleared(str):
    """An empty text that pyslurm passes on.

    pyslurm takes an empty string for "leave as it is", so a field could never be cleared. This one looks
    filled in to pyslurm's two checks (its truth and its first character) and is empty when it is copied.
    """

    __slots__ = ()

    def __new__(cls) -> "Cleared":
        """Make one; it takes no text."""
        return super().__new__(cls, "")

    def __bool__(self) -> bool:
        """Look filled in."""
        return True

    def __getitem__(self, _: object) -> str:
        """Show a first character that is not NUL."""
        return " "


@lru_cache(maxsize=4096)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def job_record(job: Any, taken_s: float) -> Job:
    """Convert a `pyslurm.Job`."""
    state = text_fields.job_state([job.state or ""])
    node_count, cpu_count, task_count = job.num_nodes or 1, job.cpus or 1, job.ntasks or 1
    per_node = ",".join(f"{name}:{count}" for name, count in (job.gres_per_node or {}).items())
    eligible_s = job.eligible_time or 0
    return Job(
        job_id=job.id,
        user=_user_name(job.user_id),
        uid=job.user_id,
        gid=job.group_id,
        account=job.account or "",
        partition=text_fields.first_partition(job.partition),
        qos=job.qos or "",
        name=job.name or "",
        state=state,
        reason=text_fields.reason_text(job.state_reason, [job.state or ""]),
        held=job.priority == 0,
        submit_s=job.submit_time or 0,
        begin_s=eligible_s if state is state.PENDING and eligible_s > taken_s else 0,
        start_s=0 if state is state.PENDING else job.start_time or 0,
        end_s=0 if state.is_active else job.end_time or 0,
        time_limit_s=60 * (job.time_limit or 0),
        gpu_count=_gpu_count(job, per_node, node_count, task_count),
        gpu_request=text_fields.request_text(text_fields.gres_counts(per_node)),
        node_count=node_count,
        cpu_count=cpu_count,
        cpus_per_task=job.cpus_per_task or 1,
        mem_per_node_mib=_mem_per_node_mib(job, cpu_count, node_count),
        nodes=job.allocated_nodes or "",
        required_nodes=job.required_nodes or "",
        dependency=_dependency(job.dependencies),
        can_requeue=bool(job.is_requeueable),
        restart_count=job.requeue_count or 0,
        exit_code=job.exit_code,
        batch=bool(job.is_batch_job),
        array=bool(job.array_id or job.array_tasks_waiting),
        het=bool(job.heterogeneous_id),
        command=job.command or "",
        submit_line=job.submit_line or "",
        work_dir=job.working_directory or "",
        admin_comment=job.admin_comment or "",
        comment=job.comment or "",
        mem_per_cpu_mib=int(job.memory_per_cpu or 0),
    )


def _gpu_count(job: Any, per_node: str, node_count: int, task_count: int) -> int:
    tracked = _gres_of_tres(job.requested_tres)  # whatever the option, but known only where slurmdbd runs
    return text_fields.job_gpus(
        per_job=tracked,
        per_node=per_node,
        per_socket="",
        per_task=_gres_of_tres(job.tres_per_task),
        node_count=node_count,
        task_count=task_count,
    )


def _gres_of_tres(tres: Any) -> str:
    gres: Mapping[str, Any] = tres.gres if tres is not None else {}
    counts = [(name, entry.count) for name, entry in gres.items()]
    return ",".join(f"gpu:{count}" for name, count in counts if name == "gpu" or not name.startswith("gpu:"))


def _mem_per_node_mib(job: Any, cpu_count: int, node_count: int) -> int:
    if job.memory_per_node:
        return int(job.memory_per_node)
    return mem_of_cpus_mib(job.memory_per_cpu or 0, cpu_count, node_count)


def _dependency(parts: Mapping[str, Any] | None) -> str:
    if parts is None:
        return ""
    items = [f"{kind}:{job}" for kind, jobs in parts.items() if isinstance(jobs, list) for job in jobs]
    if parts["singleton"] or not items:  # pyslurm overlooks "singleton(unfulfilled)"
        items.append("singleton")
    return text_fields.dependency_text(("?" if parts["satisfy"] == "any" else ",").join(items))


def change_fields(change: JobChange) -> dict[str, Any]:
    """Return the keyword arguments of `pyslurm.JobSubmitDescription` that make a change."""
    fields: dict[str, Any] = {
        "gres_per_node": _gres_argument(change.gpu_request) if change.gpu_request else None,
        "required_nodes": _text(change.required_nodes),
        "dependencies": _text(change.dependency),
        "admin_comment": _text(change.admin_comment),
        "min_cpus_per_node": change.cpu_count,
        "cpus_per_task": change.cpus_per_task,
        "memory_per_node": None if change.mem_per_node_mib is None else f"{change.mem_per_node_mib}M",
        "memory_per_cpu": None if change.mem_per_cpu_mib is None else f"{change.mem_per_cpu_mib}M",
        "time_limit": None if change.time_limit_s is None else time_limit_argument(change.time_limit_s),
        "begin_time": "now" if change.start_now else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _text(value: str | None) -> str | None:
    return Cleared() if value == "" else value


def _gres_argument(request: str) -> str:
    counts = text_fields.gres_counts(request)
    if not counts:
        raise GatewayError(f"GRES request {request!r} is malformed: write for example gres/gpu:1 or gres/gpu:a100:2")
    return ",".join(f"{name}:{count}" for name, count in sorted(counts.items()))


def time_limit_argument(time_limit_s: int) -> int | str:
    """Whole minutes, rounded up; 0 seconds means no limit."""
    return -(-time_limit_s // 60) if time_limit_s else "unlimited"


def submit_fields(job: NewJob) -> dict[str, Any]:
    """Return the keyword arguments of `pyslurm.JobSubmitDescription` that submit a job."""
    fields: dict[str, Any] = {
        "name": job.name,
        "user_id": job.uid,
        "group_id": job.gid,
        "script": job.script,
        "environment": job.environment,
        "partitions": job.partition,
        "account": job.account or None,
        "qos": job.qos or None,
        "working_directory": job.work_dir,
        "gres_per_node": _gres_argument(job.gpu_request) if job.gpu_request else None,
        "nodes": str(job.node_count),
        "ntasks": job.node_count * job.tasks_per_node,
        "ntasks_per_node": job.tasks_per_node if job.tasks_per_node > 1 else None,
        "cpus_per_task": job.cpu_count,
        "memory_per_node": f"{job.mem_per_node_mib}M" if job.mem_per_node_mib else None,
        "time_limit": time_limit_argument(job.time_limit_s) if job.time_limit_s else None,
        "required_nodes": job.required_nodes or None,
        "standard_output": job.output,
        "standard_in": "/dev/null",
        "admin_comment": job.admin_comment or None,
        "is_requeueable": job.requeue,
    }
    return {name: value for name, value in fields.items() if value is not None}
