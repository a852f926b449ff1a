"""Put Muri's own Slurm plugins of this checkout into a sandbox, where the checkout has them."""

import shutil
from pathlib import Path

from sandbox import instance as instances
from sandbox.instance import Instance
from sandbox.paths import CHECKOUT, JOB_SUBMIT_TARGET, SPANK_TARGET
from sandbox.progress import Progress

SPANK_SOURCE = CHECKOUT / "slurm_plugin/spank"
JOB_SUBMIT_SOURCE = CHECKOUT / "slurm_plugin/job_submit"


def install_spank(instance: Instance, progress: Progress) -> bool:
    """Compile the SPANK plugin against the sandbox's Slurm; without it jobs are ordinary jobs."""
    if not (SPANK_SOURCE / "Makefile").exists():
        progress.step("this checkout has no SPANK plugin: sbatch has no --muri here")
        return False
    scratch = "/tmp/muri-spank"  # the sandbox's own /tmp
    instances.run(instance, "cp", "-r", str(SPANK_SOURCE), scratch)
    instances.run(instance, "mkdir", "-p", str(SPANK_TARGET.parent))
    done = instances.run(
        instance, "make", "--directory", scratch, "--always-make",
        "SLURM_INCLUDE=/usr/include", f"OUT={SPANK_TARGET}",
    )  # fmt: skip
    instances.run(instance, "rm", "-rf", scratch)
    if done.returncode != 0 or instances.run(instance, "test", "-f", str(SPANK_TARGET)).returncode != 0:
        progress.step(f"the SPANK plugin did not compile, so sbatch has no --muri here:\n{done.stderr.strip()}")
        return False
    return True


def install_job_submit(instance: Instance, progress: Progress) -> bool:
    """Copy the job_submit files; the sandbox's own job_submit.lua loads them."""
    if not (JOB_SUBMIT_SOURCE / "job_submit.lua").exists():
        progress.step("this checkout has no job_submit.lua: jobs are not tagged or held at submit here")
        return False
    target = Path(f"/proc/{instance.pid}/root{JOB_SUBMIT_TARGET}")
    target.mkdir(parents=True, exist_ok=True)
    for source in JOB_SUBMIT_SOURCE.glob("*.lua"):
        shutil.copy(source, target / source.name)
    return True
