"""Which record of a job array a job id means."""

import pytest
from fake_slurm import make_job

from muri.slurm_plugin.gateway.queue_reader import ArrayRecords


@pytest.mark.parametrize(
    ("job_id", "name", "files"), [(7, "7", 7), (12, "12_[4-9]", 12), (13, "13", 12), (20, "20_3", 20), (99, "99", 99)]
)
def test_only_a_record_with_its_arrays_id_needs_a_name(job_id: int, name: str, files: int) -> None:
    arrays = ArrayRecords()
    arrays.learn(
        [
            make_job(7),
            make_job(12, array=True, array_job_id=12, array_tasks="4-9"),
            make_job(13, array=True, array_job_id=12, array_tasks="3"),
            make_job(20, array=True, array_job_id=20, array_tasks="3"),
        ]
    )
    assert (arrays.name(job_id), arrays.files_of(job_id)) == (name, files)
