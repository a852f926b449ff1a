"""Members that run out of GPU memory beside others come back asking for more, a few times. Pure.

The job's own comment says in which run it happened and how often; the journal, what the job asks for since.
"""

from collections.abc import Mapping
from typing import Any, Final

from muri.policies.horus.cost import MAX_RAISES, raised_gib
from muri.slurm_plugin.actions import AskForMore, Restore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.joins import begun_joins
from muri.slurm_plugin.journal import Intent
from muri.slurm_plugin.memory_retries import times_told
from muri.slurm_plugin.model import Job, JobState
from muri.slurm_plugin.view import View

FACT: Final = "gpu-mem"
"""Name of the journal's facts: the GiB per GPU that a job asks for since an out-of-memory error, by job id."""


def requested_gib(facts: Mapping[str, Any]) -> dict[int, float]:
    """What jobs ask for since an out-of-memory error, by job id."""
    return {int(job_id): float(gib) for job_id, gib in facts.items()}


def after_out_of_memory(
    view: View, job: Job, intents: tuple[Intent, ...], config: Config
) -> AskForMore | Restore | None:
    """What to do with a held member if its last run ended for want of GPU memory; None if it did not.

    The last try is one without company, whether the memory of the GPUs is known or not.

    Args:
        view: The snapshot by roles.
        job: The member.
        intents: The journal's, which say what memory it was given room for.
        config: Memory of the GPUs.
    """
    run, times = times_told(job.comment)
    if job.state is not JobState.PENDING or not job.held or times < 1 or run != job.restart_count - 1:
        return None
    nodes = (node for node in view.snapshot.nodes if node.usable and job.partition in node.partitions)
    capacity_gib = max((config.gpu_mem_gib.get(node.gpu_type, 0.0) for node in nodes), default=0.0)
    asked_gib = _planned_gib(job.job_id, intents)
    gib = raised_gib(asked_gib, times - 1, capacity_gib)
    if gib is None or (times >= MAX_RAISES and not capacity_gib):
        return Restore(job.job_id, f"it ran out of GPU memory beside others {times} times")
    return AskForMore(job.job_id, gib, f"it ran out of GPU memory beside others; it asks for {gib:.1f} GiB now")


def _planned_gib(job_id: int, intents: tuple[Intent, ...]) -> float:
    """The memory that the newest start or join of a job counted on."""
    members = [
        (intent.begun_s, member)
        for intent in intents
        if intent.kind == "group"
        for member in intent.payload["members"]
        if int(member["job_id"]) == job_id
    ]
    join = begun_joins(intents).get(job_id)
    if join is not None:
        members.append((join.begun_s, join.payload["member"]))
    newest = max(members, key=lambda item: item[0], default=None)
    return float(newest[1].get("gpu_mem_gib", 0.0)) if newest else 0.0
