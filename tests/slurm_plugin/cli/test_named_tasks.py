"""`muri explain` of a job, of one task of a job array, and of all its tasks."""

import pytest

from muri.slurm_plugin.cli.look import named
from muri.slurm_plugin.controller.status import JobStatus


def status(job_id: int, task: str = "") -> JobStatus:
    return JobStatus(job_id, "alice", "train", "", "waiting", "PENDING", task=task)


JOBS = [status(7), status(12, "12_[4-8:2,11]"), status(13, "12_3"), status(14, "12_31"), status(121, "121_3")]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("7", [7]), ("12_3", [13]), ("12_6", [12]), ("12_11", [12]), ("12_5", []), ("12", [12, 13, 14]), ("13", [13]),
        ("12_[4-8:2,11]", [12]), ("121", [121]), ("8", []), ("x", []), ("12_x", []),
    ],
)  # fmt: skip
def test_a_user_names_jobs_as_slurm_does(name: str, found: list[int]) -> None:
    assert [job.job_id for job in named(JOBS, name)] == found
