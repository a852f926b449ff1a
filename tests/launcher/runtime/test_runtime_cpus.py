"""How many cores a runtime counts on."""

import os

from muri.launcher.runtime.main import cpus_of


def test_cores_are_those_that_slurm_gave_and_the_kernel_allows() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert cpus_of({}) == allowed
    assert cpus_of({"SLURM_CPUS_ON_NODE": "1"}) == 1
    assert cpus_of({"SLURM_CPUS_ON_NODE": str(allowed + 8)}) == allowed
    assert cpus_of({"SLURM_CPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "1"}) == 1
    assert cpus_of({"SLURM_CPUS_ON_NODE": "4(x2)"}) == allowed
