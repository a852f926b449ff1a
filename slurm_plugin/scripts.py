"""The jobs that Muri itself submits, materialised in full before anything is sent. Pure."""

import hashlib
import shlex
from pathlib import PurePosixPath

from muri.profiler.records import ProfileKey
from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import StartGroup
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.model import Job, NewJob
from muri.slurm_plugin.plain_sharing import runtime_options, with_mode

# Variables of the submission that describe the old job, or would mark the new one for Muri.
_STALE_PREFIXES = ("SLURM_", "SPANK_", "_SLURM_", "SBATCH_", "MURI_")
_KEPT = ("SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "MURI_RUN_DIR")


def plain_environment(user: str) -> dict[str, str]:
    """Return the least environment that a batch script needs."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}


def host_job(action: StartGroup, token: str, config: Config) -> NewJob:
    """Return the job that holds a group's GPUs and runs its runtime.

    Args:
        action: The group.
        token: The start's unique name, which the job carries in its AdminComment.
        config: The nodes' Python and the host's time-outs.
    """
    members = [member.job_id for member in action.members]
    ids = ",".join(map(str, members))
    solo = ",".join(f"{member.job_id}={member.solo_iteration_s:.9g}" for member in action.members)
    memory = ",".join(f"{member.job_id}={member.gpu_mem_gib:.6g}" for member in action.members if member.gpu_mem_gib)
    speed = ",".join(f"{member.job_id}={member.speed:.6g}" for member in action.members)
    split = ",".join(
        f"{member.job_id}={member.accumulate_steps}" for member in action.members if member.accumulate_steps > 1
    )
    command = [
        config.node_python, "-m", "muri.slurm_plugin.host",
        "--members", ids,
        *runtime_options(action, config.grouping),
        "--ordering", ids,
        "--solo-iteration-s", solo,
        "--predicted-speed", speed,
        *_rank_options(action),
        *(["--gpu-mem-gib", memory] if memory else []),
        *(["--accumulate-steps", split] if split else []),
        "--attach-timeout-s", f"{config.host.attach_timeout_s:g}",
        "--telemetry-s", f"{config.host.telemetry_s:g}",
        "--poll-s", f"{config.host.poll_s:g}",
        "--hang-timeout-s", f"{config.host.hang_timeout_s:g}",
        *(["--trace"] if config.host.trace else []),
    ]  # fmt: skip
    return NewJob(
        name="muri-host",
        uid=action.uid,
        gid=action.gid,
        script=f"#!/bin/sh\nexec {shlex.join(command)}\n",
        environment=plain_environment(action.user),
        partition=action.partition,
        account=action.account,
        qos=action.qos,
        gpu_request=action.gpu_request,
        node_count=action.node_count,
        tasks_per_node=action.gpus_per_node,
        cpu_count=action.cpu_count,
        mem_per_node_mib=action.mem_per_node_mib,
        time_limit_s=action.time_limit_s,
        required_nodes=action.node,
        admin_comment=with_mode(tags.HOST_PREFIX + tags.format_host(token, tuple(members)), action.mode),
    )


def _rank_options(action: StartGroup) -> list[str]:
    """A group on one GPU has one runtime and needs none."""
    if action.node_count * action.gpus_per_node == 1:
        return []
    return ["--node-count", str(action.node_count), "--gpus-per-node", str(action.gpus_per_node)]


def dry_run_environment(submitted: dict[str, str] | None, user: str) -> dict[str, str]:
    """Return the environment of a dry run: the job's own without what names the old job."""
    if submitted is None:
        return plain_environment(user)
    return {name: value for name, value in submitted.items() if name in _KEPT or not name.startswith(_STALE_PREFIXES)}


def script_arguments(job: Job) -> list[str]:
    """Return what the user passed to the batch script, read from the submit line.

    Slurm keeps that line without quotes, so an argument that holds a space becomes several.
    """
    script = job.command.split()[0] if job.command else ""
    words = job.submit_line.split()
    for index, word in enumerate(words[1:], start=1):
        if script and str(PurePosixPath(job.work_dir, word)) == script:
            return words[index + 1 :]
    return []


def dry_run_job(
    job: Job, key: ProfileKey, token: str, script: str, environment: dict[str, str], config: Config
) -> NewJob:
    """Return the job that measures a model by the first iterations of a waiting job's script.

    Args:
        job: The waiting job.
        key: What is measured.
        token: The dry run's unique name.
        script: The waiting job's batch script.
        environment: The environment to run it in.
        config: Iterations and limits.
    """
    end = "MURI_END_" + hashlib.sha256(script.encode()).hexdigest()[:16]
    command = [
        config.node_python, "-m", "muri.slurm_plugin.dry_run",
        "--target", str(job.job_id),
        "--token", token,
        "--limits", config.profiling.limits.text,
        "--time-limit-s", str(config.profiling.time_limit_s),
        "--", *script_arguments(job),
    ]  # fmt: skip
    text = script if script.endswith("\n") else script + "\n"
    return NewJob(
        name="muri-dryrun",
        uid=job.uid,
        gid=job.gid,
        script=f"#!/bin/sh\n# {key}\nexec {shlex.join(command)} <<'{end}'\n{text}{end}\n".replace("\r", ""),
        environment=environment,
        partition=config.profiling.partition or job.partition,
        account=job.account,
        qos=job.qos,
        work_dir=job.work_dir,
        gpu_request=job.gpu_request,
        node_count=job.node_count,
        tasks_per_node=max(1, job.task_count // max(1, job.node_count)) if job.gpu_count > 1 else 1,
        cpu_count=job.cpus_per_task if job.gpu_count > 1 else job.cpu_count,
        mem_per_node_mib=job.mem_per_node_mib,
        time_limit_s=config.profiling.time_limit_s + 60,
        admin_comment=tags.DRY_RUN_PREFIX + token,
    )
