"""What users must not be able to do through a gateway, tried on a real Slurm: hostile jobs beside ordinary ones."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from gateway_inside import BOB, GatewayInside, RefusedError, by_commands, new_job

from muri.slurm_plugin.records.cluster import JobChange, JobState
from muri.slurm_plugin.records.roles import GATE_LICENSE, lease_end_s
from sandbox.driver import Driver

HOSTILE = r"""
submit() { sbatch --parsable --hold --output=/dev/null "$@" --wrap=true; }
every=$(LC_ALL=C awk 'BEGIN { for (i = 1; i < 256; i++) if (i != 10) printf "%c", i }')
submit --job-name="$(printf 'caf\351')"
submit --job-name="$(printf 'a\n#SLURM --bbf=/etc/shadow\n\033[31m"\\')"
submit --comment="$every"
mkdir -p "$(printf 'd\n#SLURM --bbf=x\351')"
cd "$(printf 'd\n#SLURM --bbf=x\351')" && submit && cd ..
printf '#!/bin/sh\n# \351\ntrue\n' > script.sh
sbatch --parsable --hold --output=/dev/null script.sh "$(printf 'x\n#SLURM --bbf=/etc/shadow\355\240\200')"
submit --array=0-1000
submit --nodes=2000000000
submit --gres=gpu:99999999 || true
submit --time=4294967290 || true
"""

SPECIAL = {
    "--gres=gpu:1 --cpus-per-task=4 --mem=4G": (),
    "--gres=gpu:2 --ntasks=2 --cpus-per-task=2": (),
    "--nodes=2 --gpus-per-node=2 --ntasks-per-node=2": (),
    "--nodes=2 --gres=gpu:1 --mem-per-cpu=1G --time=10 --nice=5": (),
    "--gres=gpu:1 --exclude=n4 --licenses=matlab:1": (),
    "--gpus=1": ("--gpus",),
    "--gpus-per-task=1 --ntasks=2": ("--gpus-per-task",),
    "--gpus-per-socket=1 --sockets-per-node=1": ("--gpus-per-socket", "--sockets-per-node"),
    "--gres=gpu:1 --exclusive": ("--exclusive",),
    "--gres=gpu:1 --exclusive=user": ("--exclusive=user",),
    "--gres=gpu:1 --oversubscribe": (),
    "--gres=gpu:1 --cpus-per-gpu=2": ("--cpus-per-gpu",),
    "--gres=gpu:1 --mem-per-gpu=1G": ("--mem-per-gpu",),
    "--gres=gpu:1 --mem=0": ("--mem",),
    "--gres=gpu:1 --gpu-bind=closest --gpu-freq=low": ("--gpu-bind", "--gpu-freq"),
    "--gres=gpu:1 --gres-flags=enforce-binding": ("--gres-flags",),
    "--gres=gpu:1 --contiguous --tmp=100 --time-min=1 --time=5": ("--contiguous", "--time-min", "--tmp"),
    "--gres=gpu:1 --ntasks-per-core=1 --threads-per-core=1": ("--ntasks-per-core", "--threads-per-core"),
    "--gres=gpu:1 --deadline=now+2days --wckey=x --cpu-freq=high": ("--cpu-freq", "--deadline", "--wckey"),
    "--gres=gpu:1 --nodes=1-2": ("--nodes",),
    "--gres=gpu:1 --mincpus=8": ("--mincpus",),
    "--gres=gpu:1 --ntasks=2 --overcommit": ("--overcommit",),
    "--gres=gpu:1 --partition=main,small": ("--partition",),
}


def test_hostile_jobs_cost_nobody_a_snapshot(inside: GatewayInside) -> None:
    driver = inside.driver
    ordinary = driver.submit("--hold", "--gres=gpu:1", "--wrap=true")
    printed = driver.run("sh", "-c", HOSTILE, user="bob").stdout.split()
    snapshot = inside.snapshot()
    jobs = {job.job_id: job for job in snapshot.jobs}
    assert set(map(int, printed)) | {ordinary} <= set(jobs)
    assert snapshot.unreadable == ()
    assert jobs[ordinary].gpu_count == 1
    first = int(printed[0])
    assert jobs[first].name == "caf\udce9"
    assert jobs[first + 1].name == 'a\n#SLURM --bbf=/etc/shadow\n\x1b[31m"\\'
    assert len(jobs[first + 2].comment.encode("utf-8", "surrogateescape")) == 254
    assert jobs[first + 3].work_dir.endswith("d\n#SLURM --bbf=x\udce9")
    assert jobs[first + 6].node_count == 1_000_000


def test_special_requests_are_told_from_ordinary_ones(inside: GatewayInside) -> None:
    ids = {options: inside.driver.submit("--hold", *options.split(), "--wrap=true") for options in SPECIAL}
    for job_id in ids.values():
        inside.driver.run("scontrol", "update", f"JobId={job_id}", "AdminComment=muri:on", user="root")
    jobs = {job.job_id: job for job in inside.snapshot().jobs}
    assert {options: jobs[job_id].special for options, job_id in ids.items()} == SPECIAL


def test_what_a_request_names_is_read(inside: GatewayInside) -> None:
    driver = inside.driver
    driver.run("scontrol", "create", "reservation", "reservationname=r1", "users=alice", "nodes=n4", "starttime=now",
               "duration=60", "flags=maint,ignore_jobs", user="root")  # fmt: skip
    try:
        job_id = driver.submit("--hold", "--licenses=matlab:2", "--reservation=r1", "--exclude=n1", "--wrap=true")
        driver.run("scontrol", "update", f"JobId={job_id}", "AdminComment=muri:on", user="root")
        snapshot = inside.snapshot()
        driver.run("scancel", str(job_id), user="root")
    finally:
        driver.run("scontrol", "delete", "reservationname=r1", user="root", check=False)
    job = next(each for each in snapshot.jobs if each.job_id == job_id)
    assert (job.licenses, job.reservation, job.excluded_nodes, job.priority) == ("matlab:2", "r1", "n1", 0)
    reservation = next(each for each in snapshot.reservations if each.name == "r1")
    assert (reservation.nodes, reservation.end_s - reservation.start_s) == ("n4", 3600)
    assert {"MAINT", "IGNORE_JOBS"} <= set(reservation.flags)
    assert abs(reservation.start_s - snapshot.taken_s) < 600
    assert next(node for node in snapshot.nodes if node.name == "n4").usable


WATCHING = """#!/bin/sh
{ id -u; id -G; pwd; grep -E '^(Cap|NoNewPrivs)' /proc/self/status; env; } > /tmp/seen 2>&1
chmod 666 /tmp/seen
exec /usr/bin/sbatch "$@"
"""


@contextmanager
def another_sbatch(inside: GatewayInside, script: str) -> Iterator[None]:
    """Within, a gateway finds a script of its user's in place of sbatch."""
    driver = inside.driver
    driver.run("mkdir", "-p", "/tmp/first", user="root")
    driver.write("/tmp/first/sbatch", script, user="root")
    path = driver.run("sh", "-c", "echo $PATH", user="root").stdout.strip()
    inside.environment = {"PATH": f"/tmp/first:{path}", "SLURM_JWT_LEAK": "1", "SBATCH_ACCOUNT": "leak"}
    try:
        yield
    finally:
        inside.environment = {}


@by_commands
def test_sbatch_is_the_users_process_without_a_capability(inside: GatewayInside) -> None:
    inside.driver.run("rm", "-f", "/tmp/seen", user="root")
    with another_sbatch(inside, WATCHING):
        job_id = inside.submit(new_job(uid=BOB, admin_comment="muri-pilot:x"))
    uid, groups, place, *rest = inside.driver.read("/tmp/seen").splitlines()
    assert (uid, groups, place) == ("1002", "1002", "/")
    capabilities = [line.split() for line in rest if line.startswith("Cap")]
    assert len(capabilities) == 5
    assert {value for _, value in capabilities} == {"0" * 16}
    assert "NoNewPrivs:\t1" in rest
    assert not any("leak" in line or line.startswith(("HOME=/root", "SLURM_JWT")) for line in rest)
    job = inside.job(job_id)
    assert (job.uid, job.admin_comment, job.comment, job.held) == (BOB, "muri-pilot:x", "", False)


LYING = """#!/bin/sh
/usr/bin/sbatch "$@" > /dev/null
echo {job_id}
"""


@by_commands
def test_another_users_job_is_never_tagged(inside: GatewayInside) -> None:
    victim = inside.driver.submit("--hold", "--job-name=tried", "--comment=muri-pilot:x", "--wrap=true", user="alice")
    with (
        another_sbatch(inside, LYING.format(job_id=victim)),
        pytest.raises(RefusedError, match="is another one") as caught,
    ):
        inside.submit(new_job(uid=BOB, admin_comment="muri-pilot:x"))
    assert caught.value.error == "GatewayError"
    job = inside.job(victim)
    assert (job.admin_comment, job.held) == ("", True)


REWRITING = """#!/bin/sh
/usr/bin/scontrol update jobid={job_id} jobname=tried comment=muri-pilot:x
echo {job_id}
"""


@by_commands
@pytest.mark.parametrize("held_by", ["root", "bob"])
def test_a_users_older_job_is_neither_tagged_nor_released(inside: GatewayInside, held_by: str) -> None:
    older = inside.driver.submit("--hold", "--wrap=true", user="bob")
    inside.driver.run("scontrol", "hold" if held_by == "root" else "uhold", str(older), user=held_by)
    time.sleep(7 if held_by == "bob" else 0)  # clocks may differ by five seconds
    with (
        another_sbatch(inside, REWRITING.format(job_id=older)),
        pytest.raises(RefusedError, match="it is older" if held_by == "bob" else "JobHeldAdmin"),
    ):
        inside.submit(new_job(uid=BOB, admin_comment="muri-pilot:x"))
    job = inside.job(older)
    assert (job.name, job.comment, job.admin_comment, job.held) == ("tried", "muri-pilot:x", "", True)


@by_commands
def test_directives_behind_the_command_are_not_obeyed(inside: GatewayInside) -> None:
    lines = "".join(
        f"{word} --job-name=wrong\n{word} --bbf=/etc/shadow\n" for word in ("#SBATCH", "#SLURM", "#PBS", "#BSUB")
    )
    script = f"#!/bin/sh\nexec sleep 600 <<'END'\n{lines}END\n"
    job = inside.job(inside.submit(new_job(script, uid=BOB, excluded_nodes="n1", admin_comment="muri:on")))
    assert (job.name, job.excluded_nodes, job.special) == ("tried", "n1", ())


@by_commands
def test_what_slurm_refuses_to_the_user_it_refuses_to_muri(inside: GatewayInside) -> None:
    inside.call(("extend_lease", inside.snapshot().taken_s + 600))  # a reservation that only root may use
    with pytest.raises(RefusedError, match="denied") as caught:
        inside.submit(new_job(uid=BOB, reservation=GATE_LICENSE))
    inside.call(("end_lease",))
    assert caught.value.error == "GatewayError"


@by_commands
def test_lease_keeps_jobs_waiting_and_ends(inside: GatewayInside) -> None:
    driver = inside.driver
    now_s = inside.snapshot().taken_s
    inside.call(("extend_lease", now_s + 300.4))
    job_id = driver.submit(f"--licenses={GATE_LICENSE}:1,matlab:1", "--wrap=sleep 600")
    driver.wait_reason(job_id, "Licenses")
    inside.call(("extend_lease", now_s + 600))
    assert abs(lease_end_s(inside.snapshot()) - now_s - 600) < 120
    inside.modify(job_id, JobChange(licenses="matlab:1", admin_comment="x"))
    driver.wait_state(job_id, "RUNNING")
    assert inside.job(job_id).licenses == "matlab:1"
    inside.modify(job_id, JobChange(licenses=f"matlab:1,{GATE_LICENSE}:2"))
    inside.call(("requeue", job_id), ("requeue", job_id))
    driver.wait_state(job_id, "PENDING")
    inside.modify(job_id, JobChange(licenses=f"matlab:1,{GATE_LICENSE}:1"))
    driver.wait_reason(job_id, "Licenses")
    job = inside.job(job_id)
    assert (job.state, job.held, job.licenses) == (JobState.PENDING, False, f"matlab:1,{GATE_LICENSE}:1")
    inside.call(("end_lease",), ("end_lease",))
    driver.wait_state(job_id, "RUNNING")
    assert lease_end_s(inside.snapshot()) == 0


ALL = "muri_gate:1000000"


def gated_job(driver: Driver, licenses: str, user: str) -> int:
    job = driver.submit("--output=/dev/null", f"--licenses={licenses}", "--wrap=exec sleep 600", user=user)
    driver.wait_reason(job, "Licenses")
    assert driver.job(job)["JobState"] == "PENDING"
    return job


@pytest.mark.parametrize("asked", [ALL, "muri_gate:600000,matlab:1,muri_gate:400000"])
def test_a_user_who_asks_for_the_whole_gate_keeps_nobody_waiting_when_the_lease_ends(gated: Driver, asked: str) -> None:
    greedy, other = gated_job(gated, asked, "bob"), gated_job(gated, "muri_gate:1", "alice")
    assert gated.job(greedy)["Licenses"] == ("muri_gate:1,matlab:1" if "matlab" in asked else "muri_gate:1")
    gated.run("scontrol", "delete", "reservationname=muri_gate", user="root")
    for job in (greedy, other):
        gated.wait_state(job, "RUNNING")


def test_nor_by_changing_the_job_afterwards_and_the_gate_may_be_taken_off(gated: Driver) -> None:
    greedy, other = gated_job(gated, "muri_gate:1", "bob"), gated_job(gated, "matlab:1,muri_gate:1", "alice")
    gated.run("scontrol", "update", f"JobId={greedy}", f"Licenses={ALL}", user="bob")
    assert gated.job(greedy)["Licenses"] == "muri_gate:1"
    gated.run("scontrol", "update", f"JobId={other}", "Licenses=matlab:1", user="alice")
    gated.wait_state(other, "RUNNING")
    gated.run("scontrol", "update", f"JobId={greedy}", "Licenses=", user="bob")
    gated.wait_state(greedy, "RUNNING")


def test_an_administrator_may_ask_for_the_whole_gate(gated: Driver) -> None:
    assert gated.job(gated_job(gated, ALL, "root"))["Licenses"] == ALL
