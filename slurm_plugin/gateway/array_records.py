"""What Slurm calls the records of job arrays, and where it keeps their files."""

from collections.abc import Iterable, Mapping

from muri.slurm_plugin.records.cluster import Job


class ArrayRecords:
    """The records of job arrays in a gateway's last look at the queue.

    Slurm gives an array's id to the record of its waiting tasks, and in the end to its last task. In a command that id
    means every task of the array, so such a record has to be named by its tasks.
    """

    def __init__(self) -> None:
        self._jobs: Mapping[int, Job] = {}

    def learn(self, jobs: Iterable[Job]) -> None:
        """Take note of a queue."""
        self._jobs = {job.job_id: job for job in jobs if job.array_job_id}

    def name(self, job_id: int) -> str:
        """Return what commands call a record."""
        job = self._jobs.get(job_id)
        return job.name_in_slurm if job is not None and job.array_job_id == job_id else str(job_id)

    def files_of(self, job_id: int) -> int:
        """Return the job under whose id slurmctld keeps a record's script and environment: tasks have their array's."""
        job = self._jobs.get(job_id)
        return job_id if job is None else job.array_job_id
