"""Reads the queue through squeue; where its text cannot be parsed as a whole, job by job in halves."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from muri.slurm_plugin.gateway import json_records
from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.cluster import Job, Unreadable

log = logging.getLogger(__name__)

Queue = tuple[list[Job], list[Unreadable]]


@dataclass(frozen=True, slots=True)
class QueueReader:
    """Reads all jobs.

    Attributes:
        commands: How commands are run.
        arguments: The command that prints one JSON record per job.
    """

    commands: SlurmCommands
    arguments: Sequence[str]

    def read(self, taken_s: float) -> Queue:
        """Return the jobs, and those that cannot be read.

        One RPC; more of them only where squeue's output is broken as a whole.

        Args:
            taken_s: The time, in seconds since the epoch.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
            GatewayError: squeue fails for every job.
        """
        try:
            return self._read(taken_s)
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("the queue cannot be read as a whole, so jobs are read in halves: %s", error)
            jobs, unreadable = self._halves(self._ids(), taken_s)
            if not jobs:  # no job's text is to blame, or this squeue ignores --jobs, as that of 22.05 does
                raise
            return jobs, unreadable

    def _read(self, taken_s: float, job_ids: Sequence[int] = ()) -> Queue:
        chosen = [f"--jobs={','.join(map(str, job_ids))}"] if job_ids else []
        arguments = [*self.arguments, *chosen]
        text = self.commands.run("read the jobs", arguments)
        return json_records.jobs(json_records.parse_document(text, self.arguments[0]), taken_s)

    def _ids(self) -> list[int]:
        arguments = ["squeue", "--all", "--states=all", "--noheader", "--Format=JobID:12"]
        words = self.commands.run("read the jobs' ids", arguments).split()
        return sorted({int(word) for word in words if word.isdecimal()})

    def _halves(self, job_ids: Sequence[int], taken_s: float) -> Queue:
        """Read some jobs; where that fails, each half of them by itself."""
        if not job_ids:
            return [], []
        try:
            return self._read(taken_s, job_ids)
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            if len(job_ids) == 1:
                return [], [Unreadable(job_ids[0], str(error))]
        middle = len(job_ids) // 2
        (jobs, broken), (more_jobs, more_broken) = (
            self._halves(part, taken_s) for part in (job_ids[:middle], job_ids[middle:])
        )
        return jobs + more_jobs, broken + more_broken
