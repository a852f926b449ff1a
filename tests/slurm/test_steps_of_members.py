"""Members as steps of their pilot job: what scripts see, how they end, what Slurm records, which GPUs they can have."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from devices import constrained, opened_by_step, opener
from muri_cluster import MuriCluster
from sandboxes import on_sites

from sandbox.driver import Driver

TRAIN_PY = """\
import os, resource, signal, subprocess, sys, time
import muri

slow, iterations, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3]
opened = subprocess.check_output({opens!r}, shell=True, text=True).split()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
inner = ["srun", "--overlap", "--ntasks=1", "printenv", "SLURM_JOB_ID"]
in_step = subprocess.check_output(inner, text=True).strip()
print(os.environ["SLURM_JOB_ID"], in_step, os.environ["MINE"], os.getcwd(), os.umask(0),
      resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.environ["CUDA_VISIBLE_DEVICES"], *opened, flush=True)
step = 0
while step < iterations or os.path.exists("/home/alice/keep-training"):
    step += 1
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.07 if stage == slow else 0.01)
if ending == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(int(ending))
"""
TRAIN_SH = """\
#!/bin/sh
echo "batch: $({opens})"
echo "step: $(srun {opens} 2>/dev/null)"
umask 027
ulimit -n 777
cd /tmp
export MINE=own
exec muri run /home/alice/train.py "$@"
"""


def cluster_with_one_free_gpu(site: Driver) -> MuriCluster:
    muri = MuriCluster(site)
    opens = opener(site)
    site.write("train.py", TRAIN_PY.format(opens=opens))
    site.write("train.sh", TRAIN_SH.format(opens=opens))
    muri.know_profiles(gpu_type="tesla")
    muri.occupy(on="login")
    return muri


def start(muri: MuriCluster, **endings: str) -> tuple[list[int], int]:
    """Start a group of jobs by the stage that is slow, which the test keeps at work; their ids and the pilot's."""
    jobs = []
    for slow, ending in endings.items():
        mark = f"--muri=model={slow},batch-size=8,duration=1s"
        jobs.append(muri.driver.submit("-p", "train", "--gres=gpu:1", mark, "/home/alice/train.sh", slow, "5", ending))
    muri.cycle()
    muri.driver.wait_until(lambda: all(f"{job} " in muri.output(job) for job in jobs), "the scripts' work")
    (pilot,) = muri.pilots()
    return jobs, pilot


def steps(muri: MuriCluster, pilot: int) -> dict[str, str]:
    """The steps that run in a pilot job, by the member that they are named after."""
    lines = muri.driver.run("squeue", "--steps", "--noheader", "--format=%i %j", user="root").stdout.splitlines()
    return {name: step for step, name in map(str.split, lines) if step.startswith(f"{pilot}.")}


def records(muri: MuriCluster, pilot: int) -> dict[str, list[str]]:
    """Exit code, CPU time and most memory of a pilot's steps in the accounting, by name."""
    words = ("sacct", "--jobs", str(pilot), "--parsable2", "--noheader", "--format=JobName,ExitCode,TotalCPU,MaxRSS")
    lines = [line.split("|") for line in muri.driver.run(*words, user="root").stdout.splitlines()]
    return {name: rest for name, *rest in lines}


@constrained
@on_sites("forky", "trixie")
def test_steps_see_and_end_as_alone_and_slurm_records_each(site: Driver) -> None:
    muri = cluster_with_one_free_gpu(site)
    with muri.training():
        jobs, pilot = start(muri, load="7", propagate="0", synchronize="crash")
        assert {str(job) for job in jobs} <= steps(muri, pilot).keys()
        site.run("scancel", "--batch", "--signal=USR1", str(jobs[1]))
        site.wait_state(jobs[1])
    ended = [site.wait_state(job) for job in jobs]
    assert [job["ExitCode"] for job in ended] == ["7:0", "5:0", "139:0"]
    assert [job["Restarts"] for job in ended] == ["0", "0", "0"]
    lines = [muri.output(job).splitlines() for job in jobs]
    assert [printed[:2] for printed in lines] == [["batch: ", "step: "]] * 3  # no GPU is theirs to open
    seen = [printed[2].split() for printed in lines]
    # A step that the script starts is one of its own job.
    assert [words[:6] for words in seen] == [[str(job), str(job), "own", "/tmp", "23", "777"] for job in jobs]
    ((visible, device),) = {tuple(words[6:8]) for words in seen}
    assert visible == "0"  # Slurm counts the GPUs that a step may open
    assert device in {"/dev/muri-gpu0", "/dev/muri-gpu1"}
    site.wait_until(lambda: muri.pilots() == [], "the end of the group")
    assert opened_by_step(site, "--partition=train") == []
    site.wait_until(lambda: {str(job) for job in jobs} <= records(muri, pilot).keys(), "the records of the steps")
    told = records(muri, pilot)
    assert [told[str(job)][0] for job in jobs] == ["7:0", "5:0", "0:11"]
    assert all(told[str(job)][1] != "00:00:00" for job in jobs)  # CPU time of its own
    assert all(told[str(job)][2].strip("0") not in {"", "K"} for job in jobs)  # and memory


@constrained
@on_sites("forky", "trixie")
def test_members_of_a_killed_step_and_a_killed_pilot_run_again_alone(site: Driver) -> None:
    muri = cluster_with_one_free_gpu(site)
    with muri.training():
        jobs, pilot = start(muri, load="0", propagate="0")
        step = steps(muri, pilot)[str(jobs[0])]
        with muri.going_back(*jobs):
            site.run("scancel", "--signal=KILL", step)
            site.wait_until(lambda: step not in steps(muri, pilot).values(), "the end of the step")
            site.run("scancel", "--signal=KILL", str(pilot))
    ended = muri.cycles_until_ended(*jobs).values()
    assert [(job["JobState"], job["Restarts"]) for job in ended] == [("COMPLETED", "1")] * 2


BLOCKS_SIGCHLD = """\
#include <signal.h>
#include <stddef.h>
#include <slurm/spank.h>
SPANK_PLUGIN(blocks, 1)
int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    return sigprocmask(SIG_BLOCK, &set, NULL);
}
"""
COMPILE = (
    "cc -shared -fPIC -o /usr/lib/blocks.so -x c - && echo required /usr/lib/blocks.so >> /etc/slurm/plugstack.conf"
)


@pytest.mark.thorough
def test_members_end_as_their_scripts_where_slurm_starts_tasks_with_sigchld_blocked(one_gpu: Driver) -> None:
    """As Slurm 25.05 does."""
    muri = MuriCluster(one_gpu)
    try:
        one_gpu.run("sh", "-c", COMPILE, user="root", stdin=BLOCKS_SIGCHLD)
        told = one_gpu.submit("-p", "train", "--wrap=srun grep SigBlk /proc/self/status")
        one_gpu.wait_state(told)
        assert muri.output(told).split() == ["SigBlk:", f"{1 << 16:016x}"]  # it is signal 17
        with muri.training():
            jobs, _ = muri.start_group("load", "propagate", code=7)
        assert [one_gpu.wait_state(job)["ExitCode"] for job in jobs] == ["7:0"] * 2
        one_gpu.wait_until(lambda: muri.pilots() == [], "the end of the group")
    finally:
        one_gpu.run("sed", "-i", "/blocks.so/d", "/etc/slurm/plugstack.conf", user="root")


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
