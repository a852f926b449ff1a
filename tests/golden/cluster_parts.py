"""Plain records of jobs, nodes, tags, profiles and journal entries, as the product's files hold them.

Nothing here imports the product: a record is what stands in a file of a site that runs Muri.
"""

import json
from typing import Any

NOW_S = 1_000_000.0
Record = dict[str, Any]


def job(job_id: int, model: str = "", **changes: Any) -> Record:
    """A held job of alice's on one GPU, as submitted with `--muri=model=…,batch-size=8,duration=1000`."""
    request = f"muri:model={model},batch-size=8,duration=1000" if model else "muri:"
    record = {
        "job_id": job_id, "user": "alice", "uid": 1001, "gid": 1001, "account": "physics", "partition": "main",
        "qos": "normal", "name": f"train{job_id}", "state": "PENDING", "reason": "JobHeldUser", "held": True,
        "submit_s": NOW_S - 1000 + job_id, "begin_s": 0.0, "start_s": 0.0, "end_s": 0.0, "time_limit_s": 3600,
        "gpu_count": 1, "gpu_request": "gres/gpu:1", "node_count": 1, "cpu_count": 4, "cpus_per_task": 4,
        "mem_per_node_mib": 8192, "nodes": "", "required_nodes": "", "dependency": "", "can_requeue": True,
        "restart_count": 0, "exit_code": 0, "batch": True, "array": False, "het": False,
        "command": "/home/alice/train.sh", "work_dir": "/home/alice", "submit_line": "sbatch --muri train.sh 5",
        "admin_comment": request, "comment": "", "mem_per_cpu_mib": 0,
    }  # fmt: skip
    return record | changes


def running(record: Record, node: str = "n1", ran_s: float = 900.0) -> Record:
    """The same job, released and at work; the gate's word says so of one that runs alone."""
    words = record["admin_comment"].split()
    if any(word.startswith("muri:") for word in words) and not any(word.startswith("muri-state:") for word in words):
        words.append("muri-gate:open")
    at_work = {"state": "RUNNING", "held": False, "reason": "", "nodes": node, "start_s": NOW_S - ran_s}
    return record | at_work | {"admin_comment": " ".join(words)}


def original(record: Record) -> Record:
    """What the tags of a changed job keep of its own request."""
    names = (
        "gpu_request", "required_nodes", "cpu_count", "cpus_per_task", "mem_per_node_mib", "time_limit_s",
        "mem_per_cpu_mib",
    )  # fmt: skip
    return {name: record[name] for name in names}


def tag(prefix: str, value: object) -> str:
    """A token with JSON in it."""
    return prefix + json.dumps(value, separators=(",", ":"), sort_keys=True).replace(" ", "\\u0020")


def member(record: Record, host: int, node: str = "n1", steps: int = 1, **changes: Any) -> Record:
    """The same job as a member of a group: released, without GPUs, behind its host."""
    state = {"host": host, "original": original(record)} | ({"accumulate_steps": steps} if steps > 1 else {})
    return record | {
        "held": False, "reason": "Dependency", "gpu_count": 0, "gpu_request": "gres/gpu:0", "required_nodes": node,
        "cpu_count": 1, "cpus_per_task": 1, "dependency": f"after:{host}", "mem_per_node_mib": 512,
        "time_limit_s": 7200, "admin_comment": f"{record['admin_comment']} {tag('muri-state:', state)}",
        **changes,
    }  # fmt: skip


def at_work(record: Record, host: int, node: str = "n1", ran_s: float = 900.0, steps: int = 1) -> Record:
    """The same job as a member that runs."""
    return running(member(record, host, node, steps, dependency=""), node, ran_s)


def host(job_id: int, token: str, members: list[int], node: str = "n1", **changes: Any) -> Record:
    """A placeholder job that runs."""
    ids = ",".join(map(str, members))
    base = job(
        job_id, name="muri-host", admin_comment=f"muri-host:{token}:{ids}", required_nodes=node, work_dir="/",
        cpu_count=8, cpus_per_task=8, mem_per_node_mib=24576, time_limit_s=7800, can_requeue=False,
        submit_line="", command="", submit_s=NOW_S - 950,
    )  # fmt: skip
    return running(base, node, 920.0) | changes


def pending_host(job_id: int, token: str, members: list[int], waited_s: float, **changes: Any) -> Record:
    """A placeholder job that waits in Slurm's queue."""
    pending = {"state": "PENDING", "nodes": "", "start_s": 0.0, "reason": "Resources", "submit_s": NOW_S - waited_s}
    return host(job_id, token, members, **pending) | changes


def node(name: str, gpus: int = 1, used: int = 0, **changes: Any) -> Record:
    """A node with 16 CPUs and 64 GiB for each of its GPUs."""
    record = {
        "name": name, "usable": True, "state": "IDLE" if not used else "MIXED", "partitions": ["main"],
        "cpu_count": 16 * gpus, "cpus_allocated": 8 * used, "gpu_count": gpus, "gpus_allocated": used,
        "gpu_type": "gpu", "mem_mib": 65536 * gpus, "mem_allocated_mib": 24576 * used, "threads_per_core": 2,
    }  # fmt: skip
    return record | changes


def snapshot(jobs: list[Record], nodes: list[Record], version: str = "26.05.1", no_gpus: str = "gres/gpu:0") -> Record:
    """What `muri snapshot` writes; `no_gpus` takes a waiting job's GPUs away, "" where nothing does."""
    why = "" if no_gpus else "gres/gpu:0: Slurm accepts it and keeps the GPU"
    forms = [{"form": form, "request": no_gpus, "why": why} for form in ("--gres=gpu:N", "--gres=gpu:TYPE:N")]
    return {
        "schema": "muri-snapshot", "schema_version": 1, "taken_s": NOW_S, "cluster": "golden",
        "slurm_version": version, "jobs": sorted(jobs, key=lambda each: each["job_id"]),
        "nodes": sorted(nodes, key=lambda each: each["name"]),
        "gpu_removal": {"site": "golden", "tried_s": NOW_S, "forms": forms, "why": ""},
    }  # fmt: skip


def profile(model: str, stages: tuple[float, float, float, float], **changes: Any) -> Record:
    """A profile as `muri profile export` writes it: seconds of load, preprocess, propagate, synchronize."""
    names = ("load_s", "preprocess_s", "propagate_s", "synchronize_s")
    record = {
        "model": model, "batch_size": 8, "gpu_count": 1, "gpu_type": "gpu", **dict(zip(names, stages, strict=True)),
        "iteration_s": round(sum(stages), 6), "gpu_mem_gib": 3.0, "iterations": 40,
        "measured_at": "2026-01-01T00:00:00+00:00", "source": "dry-run",
    }  # fmt: skip
    return record | changes


STORAGE = profile("storage", (0.7, 0.1, 0.1, 0.0))
CPU = profile("cpu", (0.1, 0.7, 0.15, 0.0))
GPU = profile("gpu", (0.05, 0.1, 0.8, 0.0), gpu_mem_gib=6.0)
MIXED = profile("mixed", (0.3, 0.2, 0.4, 0.05))
ALL_KINDS = [STORAGE, CPU, GPU, MIXED]


def plan_of(record: Record, speed: float = 0.8, **changes: Any) -> Record:
    """A member as the journal keeps it."""
    return {
        "job_id": record["job_id"], "original": original(record), "solo_iteration_s": 0.9, "speed": speed,
        "time_limit_s": 7200, "cpu_count": 1, "gpu_mem_gib": 3.0, "estimated": False, "accumulate_steps": 1,
    } | changes  # fmt: skip


def group_intent(token: str, members: list[Record], state: str, host_job: int | None, begun_s: float = 950) -> Record:
    """A group's start as the journal keeps it.

    Args:
        token: Its name.
        members: From `plan_of`.
        state: begun, done or abandoned.
        host_job: The placeholder job, None while it is not known.
        begun_s: Seconds ago.
    """
    payload = {
        "members": members, "node": "n1", "uid": 1001, "gid": 1001, "user": "alice", "partition": "main",
        "account": "physics", "qos": "normal", "gpu_request": "gres/gpu:1", "cpu_count": 8,
        "mem_per_node_mib": 24576, "time_limit_s": 7800, "efficiency": 0.8, "period_s": 1.1,
        "reasons": ["their stages interleave"], "node_count": 1, "gpus_per_node": 1, "mode": "interleave",
    }  # fmt: skip
    return {"token": token, "kind": "group", "payload": payload, "state": state, "host_job": host_job,
            "begun_s": NOW_S - begun_s}  # fmt: skip


def intent(token: str, kind: str, payload: Record, state: str, host_job: int | None, begun_s: float) -> Record:
    """Another entry of the journal, begun so many seconds ago."""
    return {"token": token, "kind": kind, "payload": payload, "state": state, "host_job": host_job,
            "begun_s": NOW_S - begun_s}  # fmt: skip


def document(kind: str, name: str, body: Record) -> Record:
    """A document of the profile store."""
    return {"kind": kind, "name": name, "measured_at": "2026-01-01T00:00:00+00:00", "body": body}


def sensitivity(name: str, points: list[tuple[int, float]], saturating_cpus: int) -> Record:
    """What `muri profile sensitivity` stores."""
    curve = [{"cpus": cpus, "throughput": rate, "spread": 0.0, "measurements": 1} for cpus, rate in points]
    body = {
        "points": curve, "saturating_cpus": saturating_cpus, "undecided_cpus": 0, "measurements": len(curve),
        "pinned": True, "dataset": None, "process_gib": 4.0,
    }  # fmt: skip
    return document("sensitivity", name, body)


def pair(a: str, b: str, ratio_a: float, ratio_b: float) -> Record:
    """What `muri profile pair` stores."""
    sides = {
        name: {
            "key": {"model": model, "batch_size": 8, "gpu_count": 1, "gpu_type": "gpu"}, "solo_s": 1.0,
            "shared_s": ratio, "ratio": ratio, "spread": None, "confidence": 0.9, "iterations": 10,
        }
        for name, model, ratio in (("a", a, ratio_a), ("b", b, ratio_b))
    }  # fmt: skip
    at = "2026-01-01T00:00:00+00:00"
    text = " + ".join(f"{model} (batch 8, 1 × gpu)" for model in (a, b))
    return document("interference", text, {**sides, "rounds": 3, "measured_s": 1.0, "measured_at": at})
