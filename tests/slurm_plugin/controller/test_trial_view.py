"""A trial's controller sees the trial's own jobs and no others, however it looks at the queue."""

import pytest
from fake_slurm import FakeSlurm, four_jobs, one_gpu

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller import trial


def test_a_trial_sees_no_job_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "open_gateway", lambda _kind: FakeSlurm(four_jobs(), one_gpu()))
    shown = trial._OnlyThese(Config(), "n1")
    shown.jobs |= {2, 3}
    assert [job.job_id for job in shown.snapshot().jobs] == [2, 3]
    assert [job.job_id for job in shown.queue().jobs] == [2, 3]
