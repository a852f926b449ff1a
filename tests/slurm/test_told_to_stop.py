"""SIGTERM in the middle of a cycle on a real Slurm: nothing is lost, and the next cycle goes on."""

from muri_cluster import MuriCluster

#: With the third job that is let go the controller is told to stop. Not it alone gets the signal but its whole process
#: group, as with Ctrl-C; the command itself goes on.
SCONTROL = """\
#!/bin/sh
{scontrol} "$@" || exit
case "$*" in *Licenses=*) echo released >> /root/stopping/released ;; *) exit 0 ;; esac
test $(wc -l < /root/stopping/released) != 3 || kill -s TERM -- -$(ps -o pgid= -p $PPID | tr -d ' ')
"""

JOBS = 6


def waiting(muri: MuriCluster, jobs: list[int]) -> int:
    """How many of these jobs wait for the license."""
    lines = muri.driver.run("scontrol", "--oneliner", "show", "jobs", user="root").stdout.splitlines()
    own = tuple(f"JobId={job} " for job in jobs)
    return sum(line.startswith(own) and "Licenses=muri_gate" in line for line in lines)


def test_a_controller_that_is_told_to_stop_ends_soon_and_the_next_lets_each_job_go_once(muri, one_gpu):
    muri.configure(gateway="command", partitions=["measure"])  # so Slurm alone decides about the jobs of `train`
    script = one_gpu.write("ran.sh", '#!/bin/sh\necho "$SLURM_JOB_ID" >> ~/ran\n')
    one_gpu.run("rm", "-rf", "/home/alice/ran", "/root/stopping", user="root")
    scontrol = one_gpu.run("sh", "-c", "command -v scontrol", user="root").stdout.strip()
    one_gpu.write("stopping/scontrol", SCONTROL.format(scontrol=scontrol), user="root")
    options = ("--muri=model=load,batch-size=8", "--partition=train", "--gres=gpu:1", "--output=/dev/null")
    jobs = [one_gpu.submit(*options, script) for _ in range(JOBS)]
    assert waiting(muri, jobs) == JOBS
    stopped = one_gpu.run(
        "setsid", "--wait", "sh", "-c", "PATH=/root/stopping:$PATH exec muri-controller --once", user="root"
    )
    assert "left for the next cycle: the controller was told to stop" in stopped.stderr
    assert "failed" not in stopped.stderr  # no command of its own was hit
    assert waiting(muri, jobs) == JOBS - 3
    muri.cycle()
    for job in jobs:
        assert one_gpu.wait_state(job)["JobState"] == "COMPLETED"
    assert sorted(map(int, one_gpu.read("ran", user="alice").split())) == jobs
