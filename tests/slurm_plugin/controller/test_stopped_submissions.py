"""A user who stops the processes that submit for him: his jobs run alone for a while, and nobody is barred for ever."""

import pytest
from fake_slurm import FakeSlurm, behind_licence, four_jobs, one_gpu, pilots

from muri.slurm_plugin.gateway.base import SlurmUnreachableError, SubmissionTimeoutError
from muri.slurm_plugin.records.journal import EXCLUSION


def refusing(error: Exception) -> FakeSlurm:
    """Four jobs for one GPU; no job can be submitted."""
    slurm = FakeSlurm([behind_licence(job) for job in four_jobs()], one_gpu(), gate_license=True)

    def refuse(_job):
        raise error

    slurm.submit = refuse
    return slurm


def test_a_submission_that_took_too_long_excludes_no_job_for_ever(make_controller):
    slurm = refusing(SubmissionTimeoutError("cannot submit job 'muri-host': sbatch did not end within 20 s"))
    with make_controller(slurm) as controller:
        assert controller.decision().plan.groups
        controller.cycle()
        assert controller._journal.facts(EXCLUSION) == {}
        assert not controller.decision().plan.groups  # others can have the GPU
        slurm.now_s += 24 * 3600
        del slurm.submit
        for job in [job for job in slurm.jobs.values() if "muri_gate" not in job.licenses]:
            slurm.end(job.job_id)
        assert controller.decision().plan.groups
        controller.cycle()
        assert len(pilots(slurm)) == 1


def test_no_process_left_excludes_no_job(make_controller):
    slurm = refusing(SlurmUnreachableError("cannot submit job 'muri-host': `setpriv` cannot be started"))
    with make_controller(slurm) as controller:
        with pytest.raises(SlurmUnreachableError):
            controller.cycle()
        assert controller._journal.facts(EXCLUSION) == {}
