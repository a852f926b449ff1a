"""Reads ids, owners, states and tags of jobs, and nothing else: what `muri drain` needs when everything else is broken.

Nothing that a user may write is read: no name, comment, directory or command line. A line that is not in the expected
form is skipped.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final

from muri.slurm_plugin.gateway import text_fields
from muri.slurm_plugin.gateway.base import NoSuchJobError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands, decoded, encoded
from muri.slurm_plugin.records.cluster import Job, Snapshot

log = logging.getLogger(__name__)

_WIDTHS: Final = {
    "JobID": 12, "ArrayJobID": 12, "State": 16, "PriorityLong": 22, "Reason": 48, "ArrayTaskID": 64, "Licenses": 512,
    "Nice": 12, "Dependency": 2048, "UserID": 12, "GroupID": 12, "admin_comment": 16384,
}  # fmt: skip
"""Bytes of each field, in the order of a line. squeue pads what is shorter and cuts off what is longer."""

_WIDER: Final = _WIDTHS | {"ArrayTaskID": 65536, "Licenses": 65536, "admin_comment": 131072}
"""For the few jobs with a field that may have been cut off: licences are written back, and the record of an array's
tasks is named by them, so all must be known."""

_AT_ONCE: Final = 500
"""Jobs in one such command."""

_TAG: Final = b"muri"

_NOTHING: Final = ("(null)", "N/A")

_JOB: Final = re.compile(r"[1-9][0-9]{0,10}\Z")
_OWNER: Final = re.compile(r"[0-9]{1,10}\Z")
_NUMBERS: Final = {"JobID": _JOB, "ArrayJobID": _JOB, "UserID": _OWNER, "GroupID": _OWNER}


def read_tagged_jobs(commands: SlurmCommands) -> Snapshot:
    """Return the jobs whose AdminComment names Muri. Only owners, states, gates and tags are filled in.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
        GatewayError: Slurm refused.
    """
    jobs, cut_off = _read(commands, _WIDTHS)
    for start in range(0, len(cut_off), _AT_ONCE):
        more, unknown = _read(commands, _WIDER, cut_off[start : start + _AT_ONCE])
        jobs += more
        if unknown:
            log.warning("jobs %s are left out: their licences or tags are too long", unknown)
    return Snapshot(time.time(), "", "", tuple(jobs), ())


def _read(
    commands: SlurmCommands, widths: Mapping[str, int], job_ids: Sequence[int] = ()
) -> tuple[list[Job], list[int]]:
    """Return the tagged jobs of which every field is whole, and the ids of the other tagged jobs."""
    form = ",".join(f"{name}:{width}" for name, width in widths.items())
    chosen = [f"--jobs={','.join(map(str, job_ids))}"] if job_ids else []
    arguments = ["squeue", "--all", "--states=all", "--noheader", f"--Format={form}", *chosen]
    try:
        # Line by line: each is as long as its widths together, and most jobs are not Muri's.
        lines = commands.lines("read the jobs' tags", arguments, _TAG, sum(widths.values()) + 1)
    except NoSuchJobError:
        return [], []
    jobs, cut_off = [], []
    for fields in (_fields(line, widths) for line in lines):
        readable = all(number.match(fields[name]) for name, number in _NUMBERS.items())
        if not readable or _TAG.decode() not in fields["admin_comment"]:
            continue
        if any(len(encoded(fields[name])) >= widths[name] for name in ("ArrayTaskID", "Licenses", "admin_comment")):
            cut_off.append(int(fields["JobID"]))
        else:
            jobs.append(_job(fields))
    return jobs, cut_off


def _fields(line: bytes, widths: Mapping[str, int]) -> dict[str, str]:
    values, place = {}, 0
    for name, width in widths.items():
        values[name] = decoded(line[place : place + width]).strip()
        place += width
    return values


def _job(fields: Mapping[str, str]) -> Job:
    held = fields["PriorityLong"] == "0"
    licenses, tasks = fields["Licenses"], text_fields.waiting_tasks(fields["ArrayTaskID"])
    return Job(
        job_id=int(fields["JobID"]), user="", uid=int(fields["UserID"]), gid=int(fields["GroupID"]),
        account="", partition="", qos="", name="",
        state=text_fields.job_state([fields["State"]]), reason=text_fields.reason_text(fields["Reason"]), held=held,
        submit_s=0.0, begin_s=0.0, start_s=0.0, end_s=0.0, time_limit_s=0, gpu_count=1, gpu_request="", node_count=1,
        cpu_count=1, cpus_per_task=1, mem_per_node_mib=0, nodes="", required_nodes="", can_requeue=True,
        restart_count=0, exit_code=0, batch=True, array=bool(tasks), het=False, command="", work_dir="", submit_line="",
        admin_comment=fields["admin_comment"], comment="", priority=0 if held else 1,
        licenses="" if licenses in _NOTHING else licenses,
        nice=text_fields.nice_value(fields["Nice"]),
        dependency="" if fields["Dependency"] in _NOTHING else text_fields.dependency_text(fields["Dependency"]),
        array_job_id=int(fields["ArrayJobID"]) if tasks else 0, array_tasks=tasks,
    )  # fmt: skip
