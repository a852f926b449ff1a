"""Settings that sites have beside Muri, many at once: a group shares, slurmctld's backup takes over, a group goes back.

Prologs contain jobs, nodes are configless, CPUs alone are counted, GPUs have shards, slurmctld has a backup. Power
saving has a cluster of its own.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from devices import opener
from muri_cluster import MuriCluster
from sandboxes import ONE_GPU, SITE, start
from test_members_at_home import cluster_with_one_free_gpu
from test_members_at_home import start as start_group

from sandbox import cgroups, daemons
from sandbox.driver import Driver

pytestmark = pytest.mark.thorough

NODES = ("n1", "n2", "n3")
CHANGES = {
    r"^SlurmctldHost=.*": "SlurmctldHost=ctl(127.0.0.1)\nSlurmctldHost=login(10.255.0.1)\nPrologFlags=Contain\n"
    "CommunicationParameters=NoCtldInAddrAny\nSlurmctldParameters=enable_configless",
    r"^StateSaveLocation=.*": "StateSaveLocation=/home/slurmctld",
    r"^SlurmctldTimeout=.*": "SlurmctldTimeout=10",
    r"^SelectTypeParameters=.*": "SelectTypeParameters=CR_Core",
    r"^DefMemPerCPU=.*": "",
    r"^GresTypes=.*": "GresTypes=gpu,muri,shard",
    r",muri:64 ": ",muri:64,shard:8 ",
}


def root(driver: Driver, command: str, on: str = "ctl") -> str:
    return driver.run("sh", "-c", command, user="root", on=on).stdout


def change(driver: Driver) -> None:
    """Start Slurm's daemons anew with the changed files; a second slurmctld is on the login host."""
    daemons.stop_controller(driver.instance)
    root(driver, "pkill -KILL -x slurmd; cp -r /etc/slurm/job_submit.lua /opt/muri/job_submit /home")
    conf = driver.read("/etc/slurm/slurm.conf")
    for old, new in CHANGES.items():
        conf = re.sub(old, new, conf, flags=re.MULTILINE)
    gres = driver.read("/etc/slurm/gres.conf").rstrip("\n") + "\nNodeName=n[1-3] Name=shard Count=8\n"
    for host in ("ctl", "login", *NODES):
        driver.write("/etc/hosts", f"127.0.0.1 localhost ctl {' '.join(NODES)}\n10.255.0.1 login\n", "root", on=host)
        files = {"slurm.conf": conf, "gres.conf": gres, "plugstack.conf": "optional /opt/muri/spank/muri_spank.so\n"}
        for name, text in files.items():
            driver.write(f"/etc/slurm/{name}", text, user="root", mode="0644", on=host)
    root(driver, "mv /home/job_submit.lua /etc/slurm; mv /home/job_submit /opt/muri", on="login")
    root(driver, "cp -a /var/spool/slurmctld /home; slurmctld")
    for node in NODES:
        root(driver, f"rm -r /etc/slurm; slurmd -N {node} --conf-server ctl:16817", on=node)
    log = "/var/log/backup.log"
    root(driver, f"touch {log}; chown slurm:slurm {log}; slurmctld -L {log}", on="login")
    driver.wait_until(lambda: "at login is UP" in root(driver, "scontrol ping"), "the backup")
    driver.wait_until(lambda: set(root(driver, "sinfo -h -p gpu -o %t").split()) <= {"idle", "resv"}, "the nodes")


ADOPTS_SH = """\
leaf=$(sed -n s/^cgroup=//p /run/muri/node/n1/grant-$1)/step_extern/user/task_special
mkdir -p $leaf
echo $$ >$leaf/cgroup.procs
exec setpriv --reuid alice --regid alice --clear-groups {opens}
"""


def opened_by_session(driver: Driver, job: int) -> str:
    """Return the GPUs that a process opens in the place where pam_slurm_adopt puts sessions."""
    script = driver.write("/root/adopts.sh", ADOPTS_SH.format(opens=opener(driver)), user="root", on="n1")
    return root(driver, f"sh {script} {job}", on="n1").strip()


@pytest.fixture(scope="module")
def beside() -> Iterator[Driver]:
    shape = replace(SITE, constrained="" if cgroups.refusal("v2") else "v2")
    for driver in start("forky", shape, "beside-settings"):
        change(driver)
        yield driver


def test_a_group_shares_and_goes_on_with_the_backup_of_slurmctld(beside: Driver) -> None:
    muri = cluster_with_one_free_gpu(beside, taken="shard:1")
    with muri.training():
        jobs, pilot = start_group(muri, load="0", propagate="0")
        opened = {muri.output(job).splitlines()[1].removeprefix("step: ") for job in jobs}
        if not cgroups.refusal("v2"):
            assert {opened_by_session(beside, job) for job in jobs} == opened
        now = root(beside, "date +%s")
        saved = "stat -c %Y /home/slurmctld/job_state"
        beside.wait_until(lambda: int(root(beside, saved)) > int(now), "the jobs' states on disk")
        root(beside, "kill -KILL $(cat /run/slurmctld.pid)")
        beside.wait_until(lambda: muri.pilots() == [pilot], "the backup's answer")
        muri.cycle()
        assert [beside.job(job)["JobState"] for job in (pilot, *jobs)] == ["RUNNING"] * 3
        with muri.going_back(*jobs):
            beside.run("scancel", str(pilot))
    ended = muri.cycles_until_ended(*jobs).values()
    assert [(job["JobState"], job["Restarts"]) for job in ended] == [("COMPLETED", "1")] * 2
    opened = {tuple(muri.output(job).splitlines()[:2]) for job in jobs}
    assert len(opened) == 1, opened
    assert "muri:" in beside.job(muri.submit("load"))["AdminComment"]


RESUME_SH = """\
#!/bin/sh
own="(.*/)?slurmd -N $1( -b)?"
pkill -xf "$own"
while pgrep -xf "$own"; do sleep 0.1; done
exec slurmd -N "$1" -b
"""
POWER_SAVING = """\
SuspendProgram=/bin/true
ResumeProgram=/root/resume
SuspendTime=1
SuspendTimeout=1
ResumeTimeout=240
SuspendExcNodes=n2
"""


def test_a_group_wakes_a_node_that_is_powered_down() -> None:
    # Slurm counts GPUs there: else the first try to take a job's GPUs away would wait for the node, too.
    for driver in start("forky", replace(ONE_GPU, accounting=True), "power"):
        muri = MuriCluster(driver)
        driver.write("/root/resume", RESUME_SH, user="root")
        conf = "/etc/slurm/slurm.conf"
        driver.write(conf, driver.read(conf) + POWER_SAVING, user="root", mode="0644")
        driver.reconfigure()
        driver.wait_until(lambda driver=driver: "~" in root(driver, "sinfo -h -n n1 -o %t"), "the node powered down")
        with muri.training():
            jobs, _ = muri.start_group("load", "propagate")
        ended = [driver.wait_state(job) for job in jobs]
        assert [(job["JobState"], job["Restarts"]) for job in ended] == [("COMPLETED", "0")] * 2
