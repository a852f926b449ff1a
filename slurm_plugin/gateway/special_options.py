"""Which of sbatch's options in a job's request Muri does not carry over to jobs of its own.

Both gateways bring a job's record into one form first, so that they agree; its names are those of `squeue --json`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.records.gpu_removal import WAYS

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
