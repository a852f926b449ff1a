"""Jobs on several GPUs: which of them can be grouped, and what each rank of their host gets. Pure."""

from collections.abc import Sequence

from muri.slurm_plugin.model import Job, Node


def ranks_reason(job: Job) -> str:
    """Return why a job on several GPUs or nodes must run alone, "" when it may be grouped.

    Its group has one runtime per GPU, so the job must tell its GPUs per node, and start one task per GPU: with
    srun (as many tasks as GPUs) or with torchrun (one task per node).
    """
    if job.gpu_count == 1 and job.node_count == 1:
        return ""
    if job.gpu_count % max(1, job.node_count) or not job.gpu_request:
        return (
            f"it asks for {job.gpu_count} GPUs on {job.node_count} node(s) without saying how many on each; "
            "--gres=gpu:N or --gpus-per-node=N would let it be grouped"
        )
    if job.task_count not in (job.gpu_count, job.node_count):
        return (
            f"it has {job.task_count} tasks for {job.gpu_count} GPUs; a job with a task per GPU, or one per node for "
            "torchrun, can be grouped"
        )
    return ""


def cpus_of_a_rank(jobs: Sequence[Job], nodes: Sequence[Node], gpus_per_node: int, planned: int = 0) -> int:
    """Return the CPUs of each task of a host, as far as the nodes have them.

    Each member's own processes need a CPU per task beside the host.

    Args:
        jobs: The members.
        nodes: Where.
        gpus_per_node: GPUs on each node.
        planned: CPUs on each node for the members together; 0: what the greediest of them has for a GPU.
    """
    kept = sum(-(-job.task_count // len(nodes)) if job.gpu_count > 1 else 1 for job in jobs)
    spare = min(node.cpu_count - node.cpus_allocated for node in nodes) - kept
    wanted = max(-(-job.cpu_count // (len(nodes) * gpus_per_node)) for job in jobs)
    if planned:
        wanted = (planned - kept) // gpus_per_node
    return max(1, min(wanted, spare // gpus_per_node))


def cpus_side_by_side(jobs: Sequence[Job], node: Node) -> int:
    """Return the CPUs for members on one GPU that share without turns, those of their batch scripts included.

    All of them compute at once: what they asked for together, as far as the GPU's part of its node goes, and never
    less than the greediest of them alone.
    """
    asked = [job.cpu_count for job in jobs]
    part = node.cpu_count // max(1, node.gpu_count) - len(jobs)
    return len(jobs) + max(*asked, min(sum(asked), part))
