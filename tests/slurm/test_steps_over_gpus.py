"""What Slurm lets a step have of other jobs' GPUs: why a job joins one pilot job, and which part of its GPUs it can."""

from collections.abc import Iterator
from contextlib import contextmanager

from sandbox.driver import Driver

SHOW_SH = '#!/bin/sh\necho "$SLURM_JOB_ID has $CUDA_VISIBLE_DEVICES"\n'


@contextmanager
def held(cluster: Driver, gpus: int) -> Iterator[int]:
    """A job of alice's on a node of two GPUs that holds some and waits."""
    cluster.write("show.sh", SHOW_SH)
    job = cluster.submit("-p", "small", f"--gres=gpu:{gpus}", "--wrap=exec sleep 600", user="alice")
    cluster.wait_state(job, "RUNNING")
    try:
        yield job
    finally:
        cluster.run("scancel", str(job), user="root")


def step(cluster: Driver, *options: str) -> tuple[int, str]:
    """Return the exit code of a step, and its GPUs or error."""
    command = ("srun", "--overlap", *options, "/home/alice/show.sh")
    done = cluster.run(*command, user="alice", check=False)
    return done.returncode, (done.stdout or done.stderr).strip()


def test_a_step_has_the_first_gpus_of_one_job_or_those_that_it_is_bound_to(cluster: Driver) -> None:
    with held(cluster, 2) as job:
        mine = f"--jobid={job}"
        assert step(cluster, mine, "--gres=gpu:2") == (0, f"{job} has 0,1")
        assert step(cluster, mine, "--gres=gpu:1") == (0, f"{job} has 0")
        assert step(cluster, mine, "--gres=gpu:2", "--gpu-bind=map_gpu:1") == (0, f"{job} has 1")


def test_no_step_has_gpus_of_two_jobs(cluster: Driver) -> None:
    with held(cluster, 1) as first, held(cluster, 1) as second:
        code, why = step(cluster, f"--jobid={first},{second}", "--gres=gpu:1")
        assert code and "Bad job/step specified" in why
        code, why = step(cluster, f"--jobid={first}", "--gres=gpu:2")
        assert code and "Invalid generic resource" in why
        assert step(cluster, f"--jobid={first}", f"--jobid={second}") == (0, f"{second} has 1")  # the last one counts
