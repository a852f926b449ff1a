"""Translates between Muri's records and pyslurm's, and reads tables that pyslurm lacks from libslurm."""

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import GatewayUnavailableError
from muri.slurm_plugin.gateway.queue_reader import wants_details
from muri.slurm_plugin.gateway.slurm_commands import decoded
from muri.slurm_plugin.gateway.text_fields import (
    FIELDS,
    NO_DETAILS,
    SHARING,
    JobDetails,
    Request,
    said,
    special_options,
)
from muri.slurm_plugin.private_files import user_name
from muri.slurm_plugin.records.cluster import Job, JobChange
from muri.slurm_plugin.records.limits import PartitionLimits

_SHOW_ALL = 0x0001
_SHOW_DETAIL = 0x0002
#: libslurm counts its interface: the number in libslurm.so.45 → Slurm's release.
_RELEASES = {38: "22.05", 39: "23.02", 40: "23.11", 41: "24.05", 42: "24.11", 43: "25.05", 44: "25.11", 45: "26.05"}


class Libslurm:
    """The copy of libslurm that pyslurm has loaded into this process, for the tables of nodes and reservations.

    pyslurm's `Nodes.load()` asks for the partitions as well, and shows allocated GPUs only where slurmdbd tracks them.
    libslurm's own printing function has neither flaw, takes one RPC, and unlike its structures, its text and its
    functions' signatures are the same from release to release.

    Raises:
        GatewayUnavailableError: It does not offer them.
    """

    def __init__(self) -> None:
        try:
            self._slurm = ctypes.CDLL(None, use_errno=True)
            self._libc = ctypes.CDLL("libc.so.6")
            self._declare()
        except (AttributeError, OSError) as err:
            raise GatewayUnavailableError(
                f"libslurm cannot be called: {err}; set `gateway: command` in muri.yaml"
            ) from err

    def _declare(self) -> None:
        pointer = ctypes.c_void_p
        self._slurm.slurm_api_version.restype = ctypes.c_long
        self._slurm.slurm_load_node.argtypes = [ctypes.c_long, ctypes.POINTER(pointer), ctypes.c_uint16]
        self._slurm.slurm_load_reservations.argtypes = [ctypes.c_long, ctypes.POINTER(pointer)]
        for name in ("node", "reservation"):
            show = getattr(self._slurm, f"slurm_print_{name}_info_msg")
            show.argtypes, show.restype = [pointer, pointer, ctypes.c_int], None
            free = getattr(self._slurm, f"slurm_free_{name}_info_msg")
            free.argtypes, free.restype = [pointer], None
        self._slurm.slurm_strerror.argtypes = [ctypes.c_int]
        self._slurm.slurm_strerror.restype = ctypes.c_char_p
        self._libc.open_memstream.argtypes = [ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t)]
        self._libc.open_memstream.restype = pointer
        self._libc.fclose.argtypes = [pointer]
        self._libc.free.argtypes = [pointer]

    def release(self) -> str:
        """Return the release of the library that is loaded, such as "26.05"; "" when it is not known to Muri."""
        return _RELEASES.get(int(self._slurm.slurm_api_version()) >> 16 & 0xFF, "")

    def node_table(self) -> str:
        """Return the text of `scontrol --details --oneliner show nodes`, without the partitions.

        Raises:
            OSError: The RPC failed; `errno` is Slurm's error number.
        """
        return self._table("node", lambda message: self._slurm.slurm_load_node(0, message, _SHOW_ALL | _SHOW_DETAIL))

    def reservation_table(self) -> str:
        """Return the text of `scontrol --oneliner show reservation`.

        Raises:
            OSError: The RPC failed; `errno` is Slurm's error number.
        """
        os.environ["SLURM_TIME_FORMAT"] = "%s"  # libslurm reads it once, before it prints its first time
        return self._table("reservation", lambda message: self._slurm.slurm_load_reservations(0, message))

    def _table(self, name: str, load: Callable[[Any], int]) -> str:
        message = ctypes.c_void_p()
        ctypes.set_errno(0)
        if load(ctypes.byref(message)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, self._slurm.slurm_strerror(number).decode("utf-8", "replace"))
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        try:
            stream = self._libc.open_memstream(ctypes.byref(buffer), ctypes.byref(size))
            if not stream:
                raise MemoryError("open_memstream failed")
            try:
                getattr(self._slurm, f"slurm_print_{name}_info_msg")(stream, message, 1)
            finally:
                self._libc.fclose(stream)
                text = ctypes.string_at(buffer, size.value) if buffer.value else b""
                self._libc.free(buffer)
        finally:
            getattr(self._slurm, f"slurm_free_{name}_info_msg")(message)
        return decoded(text)


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


_user_name: Final = lru_cache(maxsize=4096)(user_name)


class LenientRecord:
    """A `pyslurm.Job` whose texts may hold any bytes.

    pyslurm decodes a text when it is asked for, strictly. The error that it raises has the bytes.
    """

    def __init__(self, job: Any) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Any:
        """Return one of the job's attributes."""
        try:
            return getattr(self._job, name)
        except UnicodeDecodeError as error:
            return error.object.decode("utf-8", "surrogateescape")


def has_request(job: Any) -> bool:
    """Whether a `pyslurm.Job` has Muri's tag and has not ended."""
    return wants_details(LenientRecord(job).admin_comment or "", job.state or "")


def job_record(
    job: Any,
    taken_s: float,
    details: JobDetails | None = None,
    partitions: Mapping[str, PartitionLimits] = MappingProxyType({}),
) -> Job:
    """Convert a `pyslurm.Job`.

    Args:
        job: The job.
        taken_s: The time, in seconds since the epoch.
        details: Its details from `scontrol show job`, None where it was not asked.
        partitions: Defaults of partitions, by name.
    """
    try:
        return _record(job, taken_s, details or NO_DETAILS, partitions)
    except UnicodeDecodeError:
        return _record(LenientRecord(job), taken_s, details or NO_DETAILS, partitions)


def _record(job: Any, taken_s: float, details: JobDetails, partitions: Mapping[str, PartitionLimits]) -> Job:
    state = text_fields.job_state([job.state or ""])
    partition = text_fields.first_partition(job.partition)
    default = partitions.get(partition) or PartitionLimits(partition)
    request = _request(job, details, default)
    per_node, cpu_count, node_count = (
        dict(request.values).get("tres_per_node", ""),
        request.cpu_count,
        request.node_count,
    )
    eligible_s = job.eligible_time or 0
    priority = 1 if job.priority is None else _number(job.priority)
    # Where jobs get memory for each GPU, Slurm shows that figure, whatever a job has named itself.
    per_gpu = default.mem_per_gpu and state is state.PENDING
    mem_mib = int(job.memory_per_node or 0) or text_fields.mem_of_cpus_mib(
        job.memory_per_cpu or 0, cpu_count, node_count
    )
    tasks = text_fields.waiting_tasks(job.array_tasks_waiting or "")
    return Job(
        job_id=job.id,
        user=_user_name(job.user_id),
        uid=job.user_id,
        gid=job.group_id,
        account=job.account or "",
        partition=partition,
        qos=job.qos or "",
        name=text_fields.kept_text(job.name or ""),
        state=state,
        reason=text_fields.reason_text(job.state_reason, [job.state or ""]),
        held=priority == 0,
        submit_s=_number(job.submit_time),
        begin_s=eligible_s if state is state.PENDING and eligible_s > taken_s else 0,
        start_s=0 if state is state.PENDING else _number(job.start_time),
        end_s=0 if state.is_active else _number(job.end_time),
        time_limit_s=60 * _number(job.time_limit),
        gpu_count=text_fields.job_gpus(
            # Whatever the option, but known only where slurmdbd runs.
            per_job=_gres_of_tres(job.requested_tres) or details.options.get("tres_per_job", ""),
            per_node=per_node,
            per_socket=details.options.get("tres_per_socket", ""),
            per_task=_gres_of_tres(job.tres_per_task),
            node_count=node_count,
            task_count=request.task_count,
        ),
        gpu_request=text_fields.gres_request(per_node),
        node_count=node_count,
        cpu_count=cpu_count,
        cpus_per_task=request.cpus_per_task,
        mem_per_node_mib=details.mem_mib // node_count if per_gpu else mem_mib,
        nodes=job.allocated_nodes or "",
        required_nodes=job.required_nodes or "",
        dependency=_dependency(job.dependencies),
        can_requeue=bool(job.is_requeueable),
        restart_count=_number(job.requeue_count),
        exit_code=job.exit_code,
        batch=bool(job.is_batch_job),
        array=bool(job.array_id or job.array_tasks_waiting),
        het=bool(job.heterogeneous_id),
        command=text_fields.kept_text(job.command or ""),
        submit_line=text_fields.kept_text(job.submit_line or ""),
        work_dir=text_fields.kept_text(job.working_directory or ""),
        admin_comment=job.admin_comment or "",
        comment=text_fields.kept_text(job.comment or ""),
        mem_per_cpu_mib=0 if per_gpu else _number(job.memory_per_cpu),
        priority=priority,
        nice=job.nice or 0,
        licenses=text_fields.license_text(",".join(job.licenses or ())),
        reservation=job.reservation or "",
        features=",".join(job.constraints or ()),
        excluded_nodes=job.excluded_nodes or "",
        special=special_options(request),
        array_job_id=_number(job.array_id),
        array_tasks=tasks or (str(_number(job.array_task_id)) if job.array_id else ""),  # pyslurm shows no task 0
        array_limit=_number(job.array_tasks_parallel),
        cpus_per_gpu=default.cpus_per_gpu if job.cpus_per_task is None else 0,
        oversubscribe=request.shares_cpus,
    )


def _number(value: Any) -> int:
    """Read a number within the bounds of any real one; 0 for one that is unset or unlimited."""
    if value is None:  # as in most fields of most jobs
        return 0
    return text_fields.bounded(int(value)) if isinstance(value, (int, float)) else 0


def _count(value: Any) -> int:
    return text_fields.bounded(_number(value), text_fields.MOST) or 1


_NAMES: Final = tuple(name for name, field in FIELDS.items() if field.pyslurm)
_attributes: Final = attrgetter(*(FIELDS[name].pyslurm for name in _NAMES))

_FLAG_OF_ATTRIBUTE: Final[Mapping[str, str]] = {
    "spreads_over_nodes": "SPREAD_JOB",
    "spread_segments": "SPREAD_SEGMENTS",
    "consolidate_segments": "CONSOLIDATE_SEGMENTS",
    "gres_binding": "GRES_BINDING_ENFORCED",
}


def _request(job: Any, details: JobDetails, default: PartitionLimits) -> Request:
    """Return a job's request, with the options that pyslurm does not know, such as --gpus and --gpu-bind."""
    given = zip(_NAMES, _attributes(job), strict=True)
    values: dict[str, Any] = {name: value for name, value in given if value and value != "UNLIMITED"}
    values["core_spec"] = job.cores_reserved_for_system or job.threads_reserved_for_system
    values["mcs_label"] = "" if job.mcs_label == _user_name(job.user_id) else job.mcs_label
    values["tres_per_node"] = ",".join(f"{name}:{count}" for name, count in (job.gres_per_node or {}).items())
    values["tres_per_task"] = _gres_of_tres(job.tres_per_task)
    flags = tuple(flag for attribute, flag in _FLAG_OF_ATTRIBUTE.items() if getattr(job, attribute))
    return Request(
        values=said({**values, **details.options}),
        sharing=tuple(filter(None, [SHARING.get(job.resource_sharing or "")])),
        flags=flags + details.flags,
        partition=job.partition or "",
        wckey=job.wckey or "",
        node_count=_count(job.num_nodes),
        max_nodes=_number(job.max_nodes),
        task_count=_count(job.ntasks),
        tasks_per_node=_number(job.ntasks_per_node),
        cpu_count=_count(job.cpus),
        cpus_per_task=_count(job.cpus_per_task),
        min_cpus_per_node=_number(job.min_cpus_per_node),
        all_mem=details.all_mem and default.default_mem,
        shares_all=default.shares_all,
    )


def _gres_of_tres(tres: Any) -> str:
    gres: Mapping[str, Any] = tres.gres if tres is not None else {}
    counts = [(name, entry.count) for name, entry in gres.items()]
    return ",".join(f"gpu:{count}" for name, count in counts if name == "gpu" or not name.startswith("gpu:"))


def _dependency(parts: Mapping[str, Any] | None) -> str:
    if parts is None:
        return ""
    items = [f"{kind}:{job}" for kind, jobs in parts.items() if isinstance(jobs, list) for job in jobs]
    if parts["singleton"] or not items:  # pyslurm overlooks "singleton(unfulfilled)"
        items.append("singleton")
    return text_fields.dependency_text(("?" if parts["satisfy"] == "any" else ",").join(items))


def change_fields(change: JobChange) -> dict[str, Any]:
    """Return the keyword arguments of `pyslurm.JobSubmitDescription` that make a change."""
    time_limit = None if change.time_limit_s is None else text_fields.time_limit_text(change.time_limit_s)
    fields: dict[str, Any] = {
        "gres_per_node": text_fields.gres_argument(change.gpu_request) if change.gpu_request else None,
        "required_nodes": _text(change.required_nodes),
        "dependencies": _text(change.dependency),
        "admin_comment": _text(change.admin_comment),
        "name": change.name,
        "min_cpus_per_node": change.cpu_count,
        "cpus_per_task": change.cpus_per_task,
        "memory_per_node": None if change.mem_per_node_mib is None else f"{change.mem_per_node_mib}M",
        "memory_per_cpu": None if change.mem_per_cpu_mib is None else f"{change.mem_per_cpu_mib}M",
        "time_limit": time_limit and (int(time_limit) if time_limit.isdigit() else time_limit.lower()),
        "begin_time": text_fields.SOON if change.start_now else None,
        "licenses": _text(change.licenses),
        "nice": None if change.nice is None else str(change.nice),  # the number 0 is left out
        "resource_sharing": "yes" if change.oversubscribe else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _text(value: str | None) -> str | None:
    return Cleared() if value == "" else value
