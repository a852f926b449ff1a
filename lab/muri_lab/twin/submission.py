"""What users submit to the virtual Slurm, and what job_submit makes of it, as muri.lua does."""

from dataclasses import dataclass, replace
from typing import Final

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import with_gate
from muri_lab.twin.programs import NodeSide, TrainingScript, Work
from muri_lab.twin.records import Holder

FIRST_UID: Final = 60_001


@dataclass(frozen=True, slots=True)
class Submission:
    """One sbatch."""

    submit_s: float  # When it is typed, in seconds since the epoch
    user: str
    uid: int  # Their numeric id
    work: Work  # What the script does
    mark: str = ""  # What follows `--muri=`; "" for a job that is not Muri's
    name: str = "train"  # Job name
    account: str = ""  # Account
    qos: str = ""  # QOS
    partition: str = "main"  # Partition
    node_count: int = 1  # Nodes
    gpus_per_node: int = 1  # GPUs on each
    cpus_per_task: int = 1  # CPUs of each task; a task for each GPU where there are several
    mem_per_node_mib: int = 0  # Memory on each node, 0 for none asked
    time_limit_s: int = 0  # Time limit
    held: bool = False  # Whether it is submitted with --hold
    task_count: int = 0  # of a job array, else 0
    most_tasks: int = 0  # How many of them may run at once (`--array=…%N`), 0 for any number
    can_requeue: bool = True  # Whether Slurm may requeue it
    dependency: str = ""  # Dependency
    begin_s: float = 0.0  # Earliest start, seconds since the epoch; 0 for none
    features: str = ""  # Node features, as --constraint takes them
    required_nodes: str = ""  # Nodes asked for by name
    oversubscribe: bool = False  # Whether it is submitted with --oversubscribe

    @property
    def gpu_count(self) -> int:
        """GPUs of the whole job."""
        return self.node_count * self.gpus_per_node


def sbatch(nodes: NodeSide, asked: Submission) -> int:
    """Submit a job now, through job_submit; return its id."""
    slurm = nodes.slurm
    slurm.answering()
    job = _record_of(asked)
    holder: Holder = "user" if asked.held else ""
    if asked.mark and nodes.muri_installed:
        job, holder = _marked(job, asked, nodes)
    tasks = [TrainingScript(nodes, asked.work) for _ in range(max(1, asked.task_count))]
    if asked.task_count:
        return slurm.submit_array(job, tasks, asked.most_tasks, _environment(asked), holder=holder)
    return slurm.submit(job, tasks[0], _environment(asked), holder=holder)


def _marked(job: Job, asked: Submission, nodes: NodeSide) -> tuple[Job, Holder]:
    """The job with its tags, behind its gate; and who holds it."""
    conf = nodes.slurm.site.conf
    gate = "hold" if conf.gate == "hold" else tags.LICENSE_GATE if nodes.slurm.lease_runs else "open"
    comment = tags.with_token(tags.REQUEST_PREFIX + asked.mark, tags.GATE_PREFIX, gate)
    if gate == tags.LICENSE_GATE:
        return replace(job, admin_comment=comment, licenses=with_gate(job.licenses)), "user" if asked.held else ""
    if gate == "hold" and asked.held:
        comment += f" {tags.USER_HOLD}"
    holder: Holder = "user" if asked.held else "muri" if gate == "hold" else ""
    return replace(job, admin_comment=comment), holder


def _environment(asked: Submission) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": f"/home/{asked.user}", "USER": asked.user}


def _record_of(asked: Submission) -> Job:
    tasks = asked.gpu_count if asked.gpu_count > 1 else 1
    return Job(
        job_id=0, user=asked.user, uid=asked.uid, gid=asked.uid, account=asked.account, partition=asked.partition,
        qos=asked.qos, name=asked.name, state=JobState.PENDING, reason="", held=False, submit_s=0.0,
        begin_s=asked.begin_s, start_s=0.0, end_s=0.0, time_limit_s=asked.time_limit_s, gpu_count=asked.gpu_count,
        gpu_request=f"gres/gpu:{asked.gpus_per_node}" if asked.gpus_per_node else "", node_count=asked.node_count,
        cpu_count=asked.cpus_per_task * tasks, cpus_per_task=asked.cpus_per_task,
        mem_per_node_mib=asked.mem_per_node_mib, nodes="", required_nodes=asked.required_nodes,
        dependency=asked.dependency, can_requeue=asked.can_requeue, restart_count=0, exit_code=0, batch=True,
        array=bool(asked.task_count), het=False, command=f"/home/{asked.user}/train.sh", work_dir=f"/home/{asked.user}",
        submit_line="sbatch train.sh", admin_comment="", comment="", features=asked.features,
        oversubscribe=asked.oversubscribe,
    )  # fmt: skip
