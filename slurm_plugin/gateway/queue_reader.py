"""Reads the queue through squeue; where its text cannot be parsed as a whole or is too long, job by job in halves."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muri.slurm_plugin.gateway import json_records
from muri.slurm_plugin.gateway.base import CommandTimeoutError, GatewayError, SlurmUnreachableError
from muri.slurm_plugin.gateway.json_records import Queue
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.cluster import Unreadable

log = logging.getLogger(__name__)

_PARTS_WITHIN_S: Final = 240.0
"""How long reading in parts may take."""


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

        One RPC; more of them only where squeue's output is broken as a whole, or too long.

        Args:
            taken_s: The time, in seconds since the epoch.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
            GatewayError: squeue fails for every job.
        """
        try:
            return self._read(taken_s)
        except GatewayError as error:
            if not _fewer_jobs_may_help(error):
                raise
            log.warning("the queue cannot be read as a whole, so jobs are read in halves: %s", error)
            queue = self._halves(self._ids(), taken_s, time.monotonic() + _PARTS_WITHIN_S)
            if not queue.jobs:  # no job's text is to blame, or this squeue ignores --jobs, as that of 22.05 does
                raise
            return queue

    def _read(self, taken_s: float, job_ids: Sequence[int] = ()) -> Queue:
        chosen = [f"--jobs={','.join(map(str, job_ids))}"] if job_ids else []
        output = self.commands.output("read the jobs", [*self.arguments, *chosen])
        return json_records.read_queue(output, self.arguments[0], taken_s)

    def _ids(self) -> list[int]:
        arguments = ["squeue", "--all", "--states=all", "--noheader", "--Format=JobID:12"]
        words = self.commands.run("read the jobs' ids", arguments).split()
        return sorted({int(word) for word in words if word.isdecimal()})

    def _halves(self, job_ids: Sequence[int], taken_s: float, end_s: float) -> Queue:
        """Read some jobs; where that fails, each half of them by itself."""
        if not job_ids:
            return Queue([], [])
        if time.monotonic() > end_s:
            raise SlurmUnreachableError(f"cannot read the jobs: reading them in parts took over {_PARTS_WITHIN_S:g} s")
        try:
            return self._read(taken_s, job_ids)
        except GatewayError as error:
            if not _fewer_jobs_may_help(error):
                raise
            if len(job_ids) == 1:
                return Queue([], [Unreadable(job_ids[0], str(error))])
        middle = len(job_ids) // 2
        first, second = (self._halves(part, taken_s, end_s) for part in (job_ids[:middle], job_ids[middle:]))
        return Queue(first.jobs + second.jobs, first.unreadable + second.unreadable)


def _fewer_jobs_may_help(error: GatewayError) -> bool:
    """Whether the jobs' texts may be to blame; one that took too long may have had too much to tell."""
    return isinstance(error, CommandTimeoutError) or not isinstance(error, SlurmUnreachableError)
