"""Reads ids, states and tags of jobs, and nothing else: what `muri drain` needs when everything else is broken.

Nothing that a user may write is read: no name, comment, directory or command line. A line that is not in the expected
form is skipped.
"""

import re
import time
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.cluster import Job, Snapshot

_FIELDS: Final = (("JobID", 12), ("State", 16), ("PriorityLong", 22), ("Reason", 48), ("Licenses", 512))

_LONGEST_COMMENT: Final = 16384

_LINE: Final = re.compile(r"(?P<id>[1-9][0-9]{0,10}) *\Z")


def read_tagged_jobs(commands: SlurmCommands) -> Snapshot:
    """Return the jobs whose AdminComment names Muri; every field but those of a gate and its tags is empty.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
        GatewayError: Slurm refused.
    """
    form = ",".join([*(f"{name}:{width}" for name, width in _FIELDS), f"admin_comment:{_LONGEST_COMMENT}"])
    text = commands.run("read the jobs' tags", ["squeue", "--all", "--states=all", "--noheader", f"--Format={form}"])
    jobs = (_job(line) for line in text.split("\n"))
    return Snapshot(time.time(), "", "", tuple(job for job in jobs if job is not None), ())


def _job(line: str) -> Job | None:
    values, place = [], 0
    for _, width in _FIELDS:
        values.append(line[place : place + width].strip())
        place += width
    job_id, state, priority, reason, licenses = values
    comment = line[place:].strip()
    if not _LINE.match(job_id) or "muri" not in comment:
        return None
    held = priority == "0"
    return Job(
        job_id=int(job_id), user="", uid=0, gid=0, account="", partition="", qos="", name="",
        state=text_fields.job_state([state]), reason=text_fields.reason_text(reason), held=held, submit_s=0.0,
        begin_s=0.0, start_s=0.0, end_s=0.0, time_limit_s=0, gpu_count=1, gpu_request="", node_count=1, cpu_count=1,
        cpus_per_task=1, mem_per_node_mib=0, nodes="", required_nodes="", dependency="", can_requeue=True,
        restart_count=0, exit_code=0, batch=True, array=False, het=False, command="", work_dir="", submit_line="",
        admin_comment=comment, comment="", priority=0 if held else 1,
        licenses="" if licenses in ("(null)", "N/A") else licenses,
    )  # fmt: skip
