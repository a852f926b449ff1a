"""Jobs that root opens another job's GPUs for: which devices open in batch scripts and steps, and for which users."""

import pytest
from devices import grant, opener
from sandboxes import on_constrained_sites

from sandbox.cluster import SUITES
from sandbox.driver import Driver

VARIABLES = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "MURI_PILOT")
NODE = "--nodelist=n1"
MARKED = "--export=ALL,MURI_JOB=on"


def shows(driver: Driver) -> str:
    """A command that prints the GPUs that it can open and the variables that tell of them, in a line."""
    shown = " ".join(f"${{{name}:--}}" for name in VARIABLES)
    return driver.write("shows.sh", f'#!/bin/sh\necho $({opener(driver)}) "|" "{shown}"\n')


def start_pilot(driver: Driver, *options: str, user: str = "alice") -> tuple[int, list[str]]:
    """Start a job that holds GPUs; returns its number and the devices that it can open."""
    script = f"--wrap=sh {shows(driver)} > /tmp/pilot-$SLURM_JOB_ID; sleep 600"
    job = driver.submit(NODE, *options, script, user=user, on="login")
    driver.wait_state(job, "RUNNING")
    return job, devices_in(wait_line(driver, f"/tmp/pilot-{job}", "the pilot"))


def devices_in(line: str) -> list[str]:
    return line.partition("|")[0].split()


def wait_line(driver: Driver, path: str, what: str) -> str:
    def read() -> str:
        return driver.run("cat", path, user="root", on="n1", check=False).stdout

    driver.wait_until(lambda: read().endswith("\n"), what)
    return read().strip()


def submit(driver: Driver, script: str, comment: str, *options: str, user: str = "alice", after: int = 0) -> int:
    """Submit a job without GPUs, whose AdminComment root writes before it can start."""
    where = [] if "--nodes=2" in options else [NODE]
    marks = (MARKED, *where, "--hold", "--output=%j.out")
    job = driver.submit(*marks, *options, f"--wrap={script}", user=user, on="login")
    grant(driver, job, comment, *([f"dependency=after:{after}"] if after else []))
    return job


def lines_of(driver: Driver, job: int) -> list[str]:
    """A job's output without that of srun, which tells when a step had to wait for the one before."""
    return [line for line in driver.read(f"/home/alice/{job}.out").splitlines() if not line.startswith("srun: ")]


@on_constrained_sites(*SUITES)
def test_a_granted_job_opens_its_pilots_gpus_and_no_others(site: Driver) -> None:
    show = f"sh {shows(site)}"
    pilot, gpus = start_pilot(site, "--gres=gpu:1")
    assert len(gpus) == 1
    number = gpus[0].removeprefix("/dev/muri-gpu")
    script = f"{show}; srun {show}; srun --ntasks=1 {show}; {show}"
    member = submit(site, script, f"tool=x muri-grant:{pilot}", after=pilot)
    other = submit(site, script, "muri-grants:1")
    for job in (member, other):
        assert site.wait_state(job)["JobState"] == "COMPLETED", site.read(f"/home/alice/{job}.out")
    batch, step = f"{gpus[0]} | 0 {number} - 1 {pilot}", f"{gpus[0]} | 0 {number} {number} 1 {pilot}"
    assert lines_of(site, member) == [batch, step, step, batch]
    assert lines_of(site, other) == ["| - - - - -"] * 4


@on_constrained_sites(*SUITES)
def test_a_granted_job_on_two_nodes_opens_its_pilots_gpus_on_each(site: Driver) -> None:
    both = ("--nodes=2", "--nodelist=n[1-2]")
    show = f"sh {shows(site)}"
    # As in a pilot job, a step is on each node: root asks the kernel for the devices of what runs there.
    steps = f"--wrap=srun --label sh -c '{show}; sleep 600'"
    pilot = site.submit(*both, "--gpus-per-node=1", "--output=%j.out", steps, on="login")
    site.wait_until(lambda: len(lines_of(site, pilot)) == 2, "the pilot")
    taken = site.submit(NODE, "--gres=gpu:1", "--wrap=sleep 600", on="login")
    site.wait_state(taken, "RUNNING")
    member = submit(site, f"srun --label {show}", f"muri-grant:{pilot}", *both, after=pilot)
    assert site.wait_state(member)["JobState"] == "COMPLETED", site.read(f"/home/alice/{member}.out")
    of_pilot, of_member = (sorted(devices_in(line) for line in lines_of(site, job)) for job in (pilot, member))
    assert [rank[0] for rank in of_pilot] == ["0:", "1:"]
    assert of_member == of_pilot
    assert [len(rank) for rank in of_member] == [2, 2]


def wait_back(driver: Driver, job: int, why: str) -> dict[str, str]:
    """Wait until a job is back in the queue after its first run said why; returns its fields."""
    out = f"/home/alice/{job}.out" if driver.job(job)["UserId"].startswith("alice") else f"/home/bob/{job}.out"
    driver.wait_until(lambda: driver.job(job).get("Restarts") == "1", f"the return of job {job}")
    assert f"muri: {why}" in driver.read(out)
    assert "it runs" not in driver.read(out)
    return driver.wait_state(job, "PENDING")


@on_constrained_sites("forky", "trixie")
def test_a_grant_that_fails_puts_the_job_back_and_runs_nothing(site: Driver) -> None:
    pilot, _ = start_pilot(site, "--gres=gpu:1")
    foreign = submit(site, "echo it runs", f"muri-grant:{pilot}", user="bob")
    fields = wait_back(site, foreign, f"the pilot job {pilot} is another user's; the job goes back to the queue")
    assert (fields["JobState"], fields["Priority"]) == ("PENDING", "0")
    licensed = submit(site, "echo it runs", "muri-grant:1x muri-gate:licence")
    fields = wait_back(site, licensed, "the job's AdminComment has an unclear grant")
    assert fields["Priority"] != "0"  # its license keeps it, not a hold


@on_constrained_sites("forky", "trixie")
def test_each_task_has_its_part_and_a_step_takes_nothing_from_others(site: Driver) -> None:
    show = f"sh {shows(site)}"
    pilot, gpus = start_pilot(site, "--gres=gpu:2")
    assert len(gpus) == 2
    member = submit(
        site, f"srun --ntasks=2 --gpus-per-task=1 {show} | sort; {show}", f"muri-grant:{pilot}", "--ntasks=2"
    )
    assert site.wait_state(member)["JobState"] == "COMPLETED"
    assert lines_of(site, member) == [
        *(f"{gpus[number]} | 0 0,1 {number} 2 {pilot}" for number in range(2)),
        f"{gpus[0]} {gpus[1]} | 0,1 0,1 - 2 {pilot}",
    ]


@on_constrained_sites("forky", "trixie")
def test_steps_at_the_same_time_have_different_gpus(site: Driver) -> None:
    pilot, gpus = start_pilot(site, "--gres=gpu:2")
    meet = "touch $0; until [ -e a -a -e b ]; do sleep 0.1; done"
    # Both have started: with cgroups v1 Slurm closes the first one's GPU while the second one starts.
    step = f"srun --exact --ntasks=1 --gres=gpu:1 sh -c '{meet}; sh {shows(site)}'"
    member = submit(site, f"rm -f a b; {step} a & {step} b & wait; {step} a", f"muri-grant:{pilot}", "--ntasks=2")
    assert site.wait_state(member)["JobState"] == "COMPLETED"
    *both, after = lines_of(site, member)
    number = [gpu.removeprefix("/dev/muri-gpu") for gpu in gpus]
    assert sorted(both) == [f"{gpus[place]} | 0 0,1 {number[place]} 2 {pilot}" for place in range(2)]
    assert after == f"{gpus[0]} | 0 0,1 {number[0]} 2 {pilot}"


@on_constrained_sites("forky", "trixie")
def test_what_a_user_writes_opens_nothing(site: Driver) -> None:
    show = f"sh {shows(site)}"
    pilot, gpus = start_pilot(site, "--gres=gpu:1")
    forged = f"MURI_PILOT={pilot} SLURM_JOB_GPUS=1 MURI_STEP_GPUS=per-task:1 SLURMD_NODENAME=n2 srun"
    member = submit(site, f"{forged} {show}", f"muri-grant:{pilot}")
    other = submit(site, f"{forged} {show}; {show}", "x", "--comment=muri-grant:1", "--job-name=muri-grant:1")
    for job in (member, other):
        assert site.wait_state(job)["JobState"] == "COMPLETED"
    number = gpus[0].removeprefix("/dev/muri-gpu")
    assert lines_of(site, member) == [f"{gpus[0]} | 0 {number} {number} 1 {pilot}"]
    assert [devices_in(line) for line in lines_of(site, other)] == [[], []]


def questions(driver: Driver) -> int:
    """How often slurmctld has been asked about one job."""
    lines = driver.run("sdiag", user="root").stdout.splitlines()
    counts = [line.partition("count:")[2].split()[0] for line in lines if "REQUEST_JOB_INFO_SINGLE" in line]
    return int(counts[0]) if counts else 0


@on_constrained_sites("forky", "trixie")
def test_a_run_asks_slurmctld_once_however_many_steps_it_has(site: Driver) -> None:
    pilot, _ = start_pilot(site, "--gres=gpu:1")
    asked = []
    for comment in (f"muri-grant:{pilot}", ""):
        began = "while [ ! -e begin ]; do sleep 0.1; done; rm begin; "
        options = ["--output=%j.out", NODE, "--hold", *([MARKED] if comment else [])]
        wrap = f"--wrap={began}srun true; srun true; echo done"
        job = site.submit(*options, wrap, on="login")
        site.run("scontrol", "update", f"jobid={job}", f"admincomment={comment}", user="root")
        before = questions(site)
        site.run("scontrol", "release", str(job), user="root")
        site.run("touch", "begin")
        site.wait_until(lambda job=job: "done" in site.read(f"/home/alice/{job}.out"), "the job's steps")
        asked.append(questions(site) - before)
    granted, plain = asked
    assert granted == plain + 1


@pytest.mark.parametrize("cluster", ["sandbox", "trixie_sandbox"], indirect=True)
def test_without_limits_a_granted_job_counts_gpus_as_the_node_does(cluster: Driver) -> None:
    first, pilot = (cluster.submit(NODE, "--gres=gpu:1", "--wrap=sleep 600") for _ in range(2))
    for job in (first, pilot):
        cluster.wait_state(job, "RUNNING")

    def notes(job: int) -> str:
        return cluster.run("sh", "-c", f"grep gpus /run/muri/node/n1/job-{job} || true").stdout.strip()

    cluster.wait_until(lambda: {notes(first), notes(pilot)} == {"gpus=0", "gpus=1"}, "the notes of both jobs")
    number = notes(pilot).removeprefix("gpus=")
    show = 'echo "$CUDA_VISIBLE_DEVICES $SLURM_JOB_GPUS $SLURM_GPUS_ON_NODE $MURI_PILOT"'
    for holder, its in ((pilot, number), (first, str(1 - int(number)))):
        script = f"{show}; srun sh -c '{show}'"
        job = cluster.submit(NODE, MARKED, "--hold", "--output=%j.out", f"--wrap={script}")
        grant(cluster, job, f"muri-grant:{holder}")
        assert cluster.wait_state(job)["JobState"] == "COMPLETED"
        assert lines_of(cluster, job) == [f"{its} {its} 1 {holder}"] * 2
