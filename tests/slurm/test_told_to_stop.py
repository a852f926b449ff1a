"""SIGTERM in the middle of a cycle on a real Slurm: nothing is lost, and the next cycle goes on."""

from muri_cluster import MuriCluster

#: Runs a cycle by Slurm's commands, and ends it once it lets the third job go. Not the controller alone gets the
#: signal but its whole process group, as with Ctrl-C.
STOPPED_PY = """\
import os, signal, subprocess, sys

command = ["muri-controller", "--once"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
    released = 0
    for line in process.stderr:
        sys.stderr.write(line)
        released += "released alone" in line
        if released == 3:
            os.killpg(process.pid, signal.SIGTERM)
            break
    sys.stderr.write(process.stderr.read())
sys.exit(process.returncode)
"""

JOBS = 25


def waiting(muri: MuriCluster, jobs: list[int]) -> int:
    """How many of these jobs wait for the licence."""
    lines = muri.driver.run("scontrol", "--oneliner", "show", "jobs", user="root").stdout.splitlines()
    own = tuple(f"JobId={job} " for job in jobs)
    return sum(line.startswith(own) and "Licenses=muri_gate" in line for line in lines)


def test_a_controller_that_is_told_to_stop_ends_soon_and_the_next_lets_each_job_go_once(one_gpu):
    muri = MuriCluster(one_gpu)
    muri.configure(gateway="command", partitions=["measure"])  # so Slurm alone decides about the jobs of `train`
    script = one_gpu.write("ran.sh", '#!/bin/sh\necho "$SLURM_JOB_ID" >> ~/ran\n')
    one_gpu.run("sh", "-c", "rm -f ~/ran")
    jobs = [
        one_gpu.submit(
            "--muri=model=load,batch-size=8", "--partition=train", "--gres=gpu:1", "--output=/dev/null", script
        )
        for _ in range(JOBS)
    ]
    assert waiting(muri, jobs) == JOBS
    stopped = muri.python(STOPPED_PY)
    assert "left for the next cycle: the controller was told to stop" in stopped.stderr
    assert "failed" not in stopped.stderr  # no command of its own was hit
    assert JOBS - 2 >= waiting(muri, jobs) > 0
    muri.cycle()
    for job in jobs:
        assert one_gpu.wait_state(job)["JobState"] == "COMPLETED"
    assert sorted(map(int, one_gpu.read("ran", user="alice").split())) == jobs
