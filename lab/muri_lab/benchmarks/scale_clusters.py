"""Large clusters as a cycle reads them: made up from a seed, with Slurm's records and stored profiles."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Snapshot
from muri.slurm_plugin.records.limits import EVERY_FORM, TYPED, WAYS, GpuRemoval, TriedForm
from muri.slurm_plugin.records.roles import view_of

NOW_S: Final = 1_800_000_000.0
MODELS: Final = 64
GPUS_PER_NODE: Final = 8
PARTITIONS: Final = ("main", "short")
GPU_TYPE: Final = "a100"

_NODE_CPUS, _NODE_MEM_MIB = 128, 1024 * 1024
# Most jobs ask for one GPU, as in the traces of docs/policies.md.
GPU_COUNTS: Final = (1,) * 14 + (2,) * 3 + (4,) * 2 + (8,)
_FIRST_PILOT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """How large a cluster and its queue are."""

    pending: int  # Jobs that wait behind the gate
    nodes: int = 2000  # Nodes of 8 GPUs
    users: int = 100  # Users whose jobs wait
    groups: int = 0  # Groups of one member at work on one GPU each, which newcomers may join
    full: bool = False  # Whether others have the remaining GPUs, so that nothing can start
    seed: int = 1  # Seeds everything drawn


def cycle_of(size: Size, **config: Any) -> CycleInput:
    """Return the input of a decision on such a cluster; `config` has keys of muri.yaml."""
    known = {profile.key: profile for profile in profiles(size)}
    return CycleInput(view_of(snapshot_of(size)), Knowledge(known), Config(**config))


def snapshot_of(size: Size) -> Snapshot:
    """Return the queue and the nodes."""
    rng = random.Random(size.seed)
    jobs = [_waiting(1 + index, size, rng) for index in range(size.pending)]
    jobs += [job for index in range(size.groups) for job in _group(index, size, rng)]
    forms = tuple(TriedForm(form, WAYS[-1]) for form in (*EVERY_FORM, TYPED))
    return Snapshot(
        taken_s=NOW_S,
        cluster="scale",
        slurm_version="26.05.5",
        jobs=tuple(jobs),
        nodes=tuple(_node(index, size) for index in range(size.nodes)),
        gpu_removal=GpuRemoval("scale", NOW_S, forms, ""),
    )


def profiles(size: Size) -> Iterator[StageProfile]:
    """Draw the published profiles of all models on all numbers of GPUs."""
    rng = random.Random(size.seed)
    for model in range(MODELS):
        parts = [rng.random() ** 2 for _ in range(4)]
        iteration_s = rng.uniform(0.1, 2.0)
        load_s, preprocess_s, propagate_s, synchronize_s = (iteration_s * part / sum(parts) for part in parts)
        for gpus in sorted(set(GPU_COUNTS)):
            network_s = synchronize_s if gpus > 1 else 0.0
            total_s = load_s + preprocess_s + propagate_s + network_s
            key = ProfileKey(f"model{model}", 8, gpus, GPU_TYPE)
            yield StageProfile(key, load_s, preprocess_s, propagate_s, network_s, total_s, 4.0, 50)


def _node(index: int, size: Size) -> Node:
    taken = _gpus_of_groups(index, size)
    gpus = GPUS_PER_NODE if size.full else taken
    share = 0.75 * gpus / GPUS_PER_NODE  # batch scripts of members have CPUs of their own
    return Node(
        name=f"c{index:05d}", usable=True, state="MIXED" if gpus else "IDLE", partitions=PARTITIONS,
        cpu_count=_NODE_CPUS, cpus_allocated=int(share * _NODE_CPUS), gpu_count=GPUS_PER_NODE, gpus_allocated=gpus,
        gpu_type=GPU_TYPE, mem_mib=_NODE_MEM_MIB, mem_allocated_mib=int(share * _NODE_MEM_MIB), threads_per_core=2,
    )  # fmt: skip


def _gpus_of_groups(node: int, size: Size) -> int:
    return sum(1 for slot in range(GPUS_PER_NODE) if slot * size.nodes + node < size.groups)


def _waiting(job_id: int, size: Size, rng: random.Random) -> Job:
    gpus, user, model = rng.choice(GPU_COUNTS), rng.randrange(size.users), rng.randrange(MODELS)
    partition = PARTITIONS[rng.randrange(10) == 0]
    duration_s = int(rng.lognormvariate(7.5, 1.5)) + 60
    facts = "muri-gate:licence"
    request = f"muri:model=model{model},batch-size=8,duration={duration_s} {facts}"
    return Job(
        job_id=job_id, user=f"user{user}", uid=10_000 + user, gid=10_000 + user, account="physics",
        partition=partition, qos="normal", name=f"train{job_id}", state=JobState.PENDING, reason="Licenses", held=False,
        submit_s=NOW_S - 7200 + 7200 * job_id / size.pending, begin_s=0.0, start_s=0.0, end_s=0.0, time_limit_s=86_400,
        gpu_count=gpus, gpu_request=f"gres/gpu:{gpus}", node_count=1, cpu_count=8 * gpus, cpus_per_task=8,
        mem_per_node_mib=32_768 * gpus, nodes="", required_nodes="", dependency="", can_requeue=True, restart_count=0,
        exit_code=0, batch=True, array=False, het=False, command=f"/home/user{user}/train.sh",
        work_dir=f"/home/user{user}", submit_line=f"sbatch --muri=model=model{model} train.sh {job_id}",
        admin_comment=request, comment="", priority=1000 + job_id % 97, licenses="muri_gate:1",
    )  # fmt: skip


def _group(index: int, size: Size, rng: random.Random) -> tuple[Job, Job]:
    """A pilot job and its one member; others find room beside it."""
    node, pilot_id = f"c{index % size.nodes:05d}", _FIRST_PILOT + 2 * index
    asked = replace(_waiting(pilot_id + 1, replace(size, pending=_FIRST_PILOT), rng), submit_s=NOW_S - 9000)
    asked = replace(asked, gpu_count=1, gpu_request="gres/gpu:1", cpu_count=8, mem_per_node_mib=32_768)
    original = {
        "gpu_request": asked.gpu_request, "required_nodes": "", "cpu_count": 8, "cpus_per_task": 8,
        "mem_per_node_mib": 32_768, "time_limit_s": 86_400, "mem_per_cpu_mib": 0,
    }  # fmt: skip
    state = json.dumps({"pilot": pilot_id, "original": original}, separators=(",", ":"), sort_keys=True)
    at_work = replace(
        asked, state=JobState.RUNNING, reason="", nodes=node, required_nodes=node, start_s=NOW_S - 600,
    )  # fmt: skip
    member = replace(
        at_work, gpu_count=0, gpu_request="gres/gpu:0", cpu_count=1, cpus_per_task=1, mem_per_node_mib=512,
        admin_comment=f"{asked.admin_comment} muri-state:{state}",
    )  # fmt: skip
    pilot = replace(
        at_work, job_id=pilot_id, name=f"muri:{member.job_id}", cpu_count=15, cpus_per_task=15,
        mem_per_node_mib=129_000, licenses="", can_requeue=False, command="", submit_line="", time_limit_s=90_000,
        admin_comment=f"muri-pilot:t{index}:{member.job_id}",
    )  # fmt: skip
    return pilot, member
