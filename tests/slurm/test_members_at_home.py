"""Members in their own jobs: what scripts see, how they end, what Slurm records, and how they go back."""

import json
from typing import Any

import pytest
from devices import opened_by_step, opener
from muri_cluster import MuriCluster
from sandboxes import on_constrained_sites

from sandbox.driver import Driver

TRAIN_PY = """\
import os, resource, signal, subprocess, sys, time
import muri

slow, iterations, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3]
opened = subprocess.check_output({opens!r}, shell=True, text=True).split()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
print(os.environ["SLURM_JOB_ID"], os.environ["MINE"], os.getcwd(), os.umask(0),
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
echo "step: $(srun {opens})"
umask 027
ulimit -n 777
cd /tmp
export MINE=own
exec muri run /home/alice/train.py "$@"
"""

PREPARES_SH = """\
#!/bin/sh
echo started
python3 -c "
import os
while os.path.exists('/home/alice/keep-preparing'):
    sum(range(10**6))
"
echo prepared
"""


def cluster_with_one_free_gpu(site: Driver, taken: str = "gpu:1") -> MuriCluster:
    muri = MuriCluster(site)
    opens = opener(site)
    site.write("train.py", TRAIN_PY.format(opens=opens))
    site.write("train.sh", TRAIN_SH.format(opens=opens))
    muri.know_profiles(gpu_type="tesla")
    muri.occupy(on="login", gres=taken)
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


def records(driver: Driver, job: int) -> dict[str, list[str]]:
    """Exit code, CPU time and most memory of a job and its steps in the accounting, by name."""
    words = ("sacct", "--jobs", str(job), "--parsable2", "--noheader", "--format=JobName,ExitCode,TotalCPU,MaxRSS")
    lines = [line.split("|") for line in driver.run(*words, user="root").stdout.splitlines()]
    return {name: rest for name, *rest in lines}


@on_constrained_sites("forky", "trixie")
def test_members_see_and_end_as_alone_and_slurm_records_each(site: Driver) -> None:
    muri = cluster_with_one_free_gpu(site)
    with muri.training():
        jobs, _ = start(muri, load="7", propagate="0", synchronize="crash")
        site.run("scancel", "--batch", "--signal=USR1", str(jobs[1]))
        site.wait_state(jobs[1])
    ended = [site.wait_state(job) for job in jobs]
    assert [job["ExitCode"] for job in ended] == ["7:0", "5:0", "0:11"]
    assert [job["Restarts"] for job in ended] == ["0", "0", "0"]
    lines = [muri.output(job).splitlines() for job in jobs]
    (device,) = {word for printed in lines for word in " ".join(printed[:2]).split() if word.startswith("/dev")}
    assert device in {"/dev/muri-gpu0", "/dev/muri-gpu1"}
    assert [printed[:2] for printed in lines] == [[f"batch: {device}", f"step: {device}"]] * 3
    assert [printed[2].split() for printed in lines] == [
        [str(job), "own", "/tmp", "23", "777", "0", device] for job in jobs
    ]
    site.wait_until(lambda: muri.pilots() == [], "the end of the group")
    assert opened_by_step(site, "--partition=train") == []
    for job, code in zip(jobs, ("7:0", "5:0", "0:11"), strict=True):
        site.wait_until(lambda job=job: records(site, job).get("batch", ["", "", ""])[2], f"the record of {job}")
        told_code, cpu, memory = records(site, job)["batch"]
        assert told_code == code
        assert cpu != "00:00:00"
        assert memory.strip("0") not in {"", "K"}


@pytest.mark.parametrize("end", ["canceled", "killed", "without its runtime"])
def test_members_of_a_pilot_that_ends_go_back_read_why_and_run_again(muri: MuriCluster, end: str) -> None:
    driver = muri.driver
    with muri.training():
        jobs, pilot = muri.start_group("load", "propagate", request=("--open-mode=append",))
        with muri.going_back(*jobs):
            if end == "canceled":
                driver.run("scancel", str(pilot), user="alice")
            elif end == "killed":
                driver.run("scancel", "--signal=KILL", str(pilot), user="root")
            else:
                driver.run("kill", "-9", str(status(muri, pilot)["pid"]), user="root")
            cancelled = f"pilot job {pilot}, which held the GPUs of its group, was cancelled"
            said = {"canceled": cancelled, "killed": ""}.get(end, "muri: the group's runtime is gone")
            # It is written after the requeue, and the next run empties the output.
            driver.wait_until(lambda: all(said in muri.output(job) for job in jobs), "the reason")
            assert end != "canceled" or all(f"scancel {job}" in muri.output(job) for job in jobs)
    ended = muri.cycles_until_ended(*jobs).values()
    assert [(job["JobState"], job["Restarts"]) for job in ended] == [("COMPLETED", "1")] * 2


@pytest.mark.thorough
def test_a_group_on_a_node_whose_slurmd_lacks_the_plugin_goes_back_and_its_members_run_alone(muri: MuriCluster) -> None:
    driver = muri.driver
    muri.know_profiles()
    jobs = [muri.submit(kind, iterations=5) for kind in ("load", "propagate")]
    plugins = "/etc/slurm/plugstack.conf"
    driver.run("sh", "-c", f"cp {plugins} /tmp/plugstack.conf; : >{plugins}", user="root")
    driver.reconfigure()
    before = muri.pilots("all")
    try:
        with muri.training():
            muri.cycle()
            (pilot,) = set(muri.pilots("all")) - {*before}  # which may have failed meanwhile
            assert driver.wait_state(pilot)["JobState"] == "FAILED"
            assert "plugin\\u0020is\\u0020not\\u0020loaded" in driver.job(pilot)["Comment"]
            muri.cycle()
            assert all("plugin is not loaded by slurmd on node" in muri.explain(job) for job in jobs)
        ended = muri.cycles_until_ended(*jobs).values()
    finally:
        driver.run("cp", "/tmp/plugstack.conf", plugins, user="root")
        driver.reconfigure()
    assert {job["JobState"] for job in ended} == {"COMPLETED"}
    assert [muri.output(job).count("finished") for job in jobs] == [1, 1]


def status(muri: MuriCluster, pilot: int) -> dict[str, Any]:
    """What `muri top` shows of a group."""
    said = muri.driver.run("muri", "top", "--json", user="alice").stdout
    (group,) = [group for group in json.loads(said) if group["pilot_job"] == str(pilot)]
    return dict(group)


def shares_plainly(muri: MuriCluster, pilot: int, job: int) -> bool:
    return bool(status(muri, pilot)["members"].get(str(job), {}).get("state") == "plain")


def cores_in_use(muri: MuriCluster, pilot: int, job: int) -> float:
    return float(status(muri, pilot)["use"]["jobs"][str(job)]["cpu_cores"] or 0.0)


def test_a_member_that_never_attaches_keeps_its_gpu_and_is_seen_until_its_job_ends(muri: MuriCluster) -> None:
    driver = muri.driver
    muri.know_profiles()
    driver.write("prepares.sh", PREPARES_SH)
    with muri.training("preparing", "training"):
        mark = "--muri=model=propagate,batch-size=8,duration=3s"
        preparing = driver.submit("-p", "train", "--gres=gpu:1", mark, "/home/alice/prepares.sh")
        training = muri.submit("load")
        muri.cycle()
        muri.wait_grouped(preparing, training)
        (pilot,) = muri.pilots()
        driver.wait_until(lambda: shares_plainly(muri, pilot, preparing), "the member that shares plainly")
        driver.wait_until(lambda: cores_in_use(muri, pilot, preparing) > 0.01, "its use of the node")
        driver.wait_until(lambda: f'"p":[{preparing}]' in driver.job(pilot).get("Comment", ""), "the report")
        assert (muri.queue()[preparing]["use"] or {}).get("mem_gib") is not None
        driver.run("rm", "-f", "/home/alice/keep-training", user="root")
        assert driver.wait_state(training)["JobState"] == "COMPLETED"
        assert driver.job(pilot)["JobState"] == "RUNNING"
    assert driver.wait_state(preparing)["JobState"] == "COMPLETED"
    assert driver.wait_state(pilot)["JobState"] == "COMPLETED"
    assert muri.output(preparing) == "started\nprepared\n"
