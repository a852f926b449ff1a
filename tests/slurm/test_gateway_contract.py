"""What every gateway promises, tried on a real Slurm: pyslurm and commands, Slurm 26.05, 24.11 and 22.05."""

import json
import re
from collections.abc import Iterator

import pytest
from gateway_inside import EVERY_GATEWAY, GatewayInside, RefusedError

from muri.slurm_plugin.records.cluster import JobChange, JobState, NewJob
from sandbox.driver import Driver

ALICE = 1001
SLEEP = "#!/bin/sh\nexec sleep 600\n"
#: Remote procedures that slurmctld's daemons or sdiag itself call, and no gateway.
BACKGROUND = re.compile(r"REGISTRATION|EPILOG|COMPLETE|STATS_INFO|PING|LAUNCH|CONFIG")


@pytest.fixture(params=EVERY_GATEWAY)
def inside(request: pytest.FixtureRequest) -> Iterator[GatewayInside]:
    yield from GatewayInside.named(request.param, request)


def new_job(script: str = SLEEP, **fields: object) -> NewJob:
    values = {"environment": {"PATH": "/usr/bin:/bin"}, "partition": "main", "work_dir": "/home/alice", **fields}
    return NewJob(name="contract", uid=ALICE, gid=ALICE, script=script, **values)  # type: ignore[arg-type]


def rpc_counts(driver: Driver) -> dict[str, int]:
    text = driver.run("sdiag", user="root").stdout
    section = text.split("by message type")[1].split("by user")[0]
    return {name: int(count) for name, count in re.findall(r"(\w+)\s*\(\s*\d+\)\s*count:(\d+)", section)}


@pytest.mark.parametrize("queued", [1, 40])
def test_snapshot_costs_the_same_whatever_the_queue(inside: GatewayInside, queued: int) -> None:
    driver = inside.driver
    driver.run("sh", "-c", f"for i in $(seq {queued}); do sbatch -H -o /dev/null --wrap=true; done")
    before = rpc_counts(driver)
    inside.call(*[("snapshot",)] * 5)
    five = rpc_counts(driver)
    inside.call(*[("snapshot",)] * 10)
    ten = rpc_counts(driver)
    # Opening a gateway costs the same both times; the difference is five snapshots.
    cost = {
        name: (ten[name] - five.get(name, 0)) - (five.get(name, 0) - before.get(name, 0))
        for name in ten
        if not BACKGROUND.search(name)
    }
    expected = {"REQUEST_JOB_INFO": 5, "REQUEST_NODE_INFO": 5}
    if inside.kind == "command":
        expected["REQUEST_PARTITION_INFO"] = 10  # `squeue` and `scontrol show nodes` ask for them by themselves
    assert {name: count for name, count in cost.items() if count} == expected


@pytest.mark.parametrize(
    ("options", "gpu_count", "gpu_request"),
    [
        (["--gres=gpu:2"], 2, "gres/gpu:2"),
        (["--gres=gpu"], 1, "gres/gpu:1"),
        (["--gpus-per-node=1", "--nodes=2"], 2, "gres/gpu:1"),
        (["--gpus=2"], 2, ""),
        (["--gpus-per-task=1", "--ntasks=2"], 2, ""),
        ([], 0, ""),
    ],
)
def test_gpus_are_counted_however_they_were_asked_for(
    inside: GatewayInside, options: list[str], gpu_count: int, gpu_request: str
) -> None:
    job_id = inside.driver.submit("--hold", "--output=/dev/null", *options, "--wrap=true")
    inside.modify(job_id, JobChange(admin_comment="muri:on"))
    job = inside.job(job_id)
    assert (job.gpu_count, job.gpu_request) == (gpu_count, gpu_request)
    assert job.held
    assert job.state is JobState.PENDING
    assert job.reason == "JobHeldUser"


def test_snapshot_shows_a_job_as_it_was_submitted(inside: GatewayInside) -> None:
    driver = inside.driver
    first = driver.submit("--hold", "--wrap=true")
    options = ("--job-name=a b", "--time=90", "--mem=500M", "--cpus-per-task=3", "--nodelist=n2", "--no-requeue")
    path = driver.write("plain.sh", "#!/bin/sh\ntrue\n")
    job_id = driver.submit("--hold", "--gres=gpu:1", f"--dependency=afterany:{first},after:{first}", *options, path)
    job = inside.job(job_id)
    assert (job.user, job.uid, job.gid, job.name, job.partition) == ("alice", ALICE, ALICE, "a b", "main")
    assert (job.time_limit_s, job.mem_per_node_mib, job.cpu_count, job.cpus_per_task) == (5400, 500, 3, 3)
    assert (job.required_nodes, job.dependency) == ("n2", f"after:{first},afterany:{first}")
    assert (job.command, job.work_dir) == ("/home/alice/plain.sh", "/home/alice")
    assert (job.node_count, job.batch, job.array, job.het, job.can_requeue) == (1, True, False, False, False)
    assert (job.start_s, job.end_s, job.nodes, job.exit_code) == (0, 0, "", 0)


def test_snapshot_shows_nodes_partitions_and_what_is_in_use(inside: GatewayInside) -> None:
    driver = inside.driver
    job_id = driver.submit("--gres=gpu:1", "--nodelist=n1", "--cpus-per-task=2", "--wrap=sleep 600")
    driver.wait_state(job_id, "RUNNING")
    driver.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=State=IDLE Gres=gpu:9", user="root")
    try:
        snapshot = inside.snapshot()
    finally:
        driver.run("scontrol", "update", "NodeName=n4", "State=RESUME", user="root")
    nodes = {node.name: node for node in snapshot.nodes}
    assert list(nodes) == ["n1", "n2", "n3", "n4"]
    assert nodes["n1"].partitions == ("main", "small", "two")
    assert nodes["n2"].partitions == ("main", "two")
    assert (nodes["n1"].gpu_count, nodes["n1"].gpus_allocated, nodes["n1"].cpus_allocated) == (2, 1, 2)
    assert (nodes["n1"].mem_mib, nodes["n1"].mem_allocated_mib) == (64000, 2 * 2000)
    assert (nodes["n2"].gpus_allocated, nodes["n2"].cpu_count, nodes["n2"].gpu_type) == (0, 16, "gpu")
    assert [node.usable for node in nodes.values()] == [True, True, True, False]
    assert snapshot.slurm_version == version(driver)
    running = inside.job(job_id)
    assert (running.state, running.nodes, running.held) == (JobState.RUNNING, "n1", False)
    assert running.start_s > 0
    assert (running.mem_per_node_mib, running.mem_per_cpu_mib) == (4000, 2000)


def version(driver: Driver) -> str:
    return driver.run("sinfo", "--version").stdout.split()[1]


def test_submitted_job_runs_as_its_user_with_its_environment_only(inside: GatewayInside) -> None:
    driver = inside.driver
    driver.write("printed", "")
    inside.environment = {"SLURM_LEAK": "1", "SBATCH_JOB_NAME": "leak", "OTHER_LEAK": "1"}
    printing = "id -un; pwd; echo gpus=$SLURM_GPUS_ON_NODE; env\nexit 3\n"
    script = f"#!/bin/sh\nexec sh <<'END'\n#SBATCH --job-name=wrong\n{printing}END\n"
    awkward = "a b\n'\"$(id)`,é"
    comment = 'x muri-host:{"k":["a b","\'"]}'
    environment = {"PATH": "/usr/bin:/bin", "AWKWARD": awkward}
    job_id = inside.submit(
        new_job(script, environment=environment, output="/home/alice/printed", gpu_request="gres/gpu:1",
                cpu_count=2, time_limit_s=61, mem_per_node_mib=100, admin_comment=comment, required_nodes="n3")
    )  # fmt: skip
    assert driver.wait_state(job_id)["ExitCode"] == "3:0"
    job = inside.job(job_id)
    assert (job.name, job.state, job.exit_code, job.nodes) == ("contract", JobState.FAILED, 3, "n3")
    assert (job.cpu_count, job.time_limit_s, job.mem_per_node_mib) == (2, 120, 100)
    assert (job.admin_comment, job.comment, job.can_requeue) == (comment, "", False)
    printed = driver.read("/home/alice/printed")
    assert printed.startswith("alice\n/home/alice\ngpus=1\n")
    assert f"AWKWARD={awkward}\n" in printed
    assert "LEAK" not in printed


def test_environment_of_a_pending_job(inside: GatewayInside) -> None:
    job_id = inside.driver.submit("--hold", "--export=ALL,ODD=x y", "--wrap=echo é")
    environment, missing = inside.call(("job_environment", job_id), ("job_environment", 999_999))
    assert environment["ODD"] == "x y"
    assert environment["HOME"] == "/home/alice"
    assert missing is None


def test_old_slurm_that_keeps_the_gpus_is_found_out(old_sandbox: Driver) -> None:
    """Slurm 22.05 shows the change and hands out the GPU all the same: what it shows must not be believed."""
    job_id = old_sandbox.submit("--hold", "--gres=gpu:1", "--wrap=sleep 600")
    GatewayInside(old_sandbox, "command").modify(job_id, JobChange(gpu_request="gres/gpu:0"))
    old_sandbox.run("scontrol", "release", str(job_id), user="root")
    old_sandbox.wait_state(job_id, "RUNNING")
    detail = old_sandbox.run("scontrol", "--details", "show", "job", str(job_id), user="root").stdout
    assert "TresPerNode=gres:gpu:0" in detail
    assert "GRES=gpu:1" in detail
    old_sandbox.cancel_all()


@pytest.mark.parametrize("inside", ["pyslurm-26.05", "command-26.05"], indirect=True)
def test_member_trick_and_its_undoing(inside: GatewayInside) -> None:
    """A member runs without GPUs on its host's node; put back, it gets its own GPU."""
    driver = inside.driver
    host = inside.submit(new_job(gpu_request="gres/gpu:2", required_nodes="n1"))
    driver.wait_state(host, "RUNNING")
    printing = "echo $SLURMD_NODENAME gpus=$SLURM_GPUS_ON_NODE cpus=$SLURM_CPUS_ON_NODE"
    script = driver.write("member.sh", f"#!/bin/sh\n{printing}\nsleep 600\n")
    options = ("--hold", "--gres=gpu:1", "--cpus-per-task=4", "--time=10", "--output=member.out")
    member, restored = driver.submit(*options, script), driver.submit(*options, script)
    comment = "theirs muri:on muri-state:" + json.dumps({"original": ["x'\"" * 8] * 30}, separators=(",", ":"))
    assert len(comment) > 800
    change = JobChange(
        gpu_request="gres/gpu:0", required_nodes="n1", cpu_count=1, cpus_per_task=1, dependency=f"after:{host}",
        mem_per_node_mib=64, time_limit_s=3600, admin_comment=comment,
    )  # fmt: skip
    for job_id in (member, restored):
        inside.modify(job_id, change)
    job = inside.job(restored)
    assert (job.gpu_count, job.gpu_request, job.required_nodes, job.cpu_count) == (0, "gres/gpu:0", "n1", 1)
    assert (job.time_limit_s, job.mem_per_node_mib, job.admin_comment) == (3600, 64, comment)
    assert job.held

    inside.call(("release", member))
    driver.wait_state(member, "RUNNING")
    driver.wait_until(lambda: driver.read("/home/alice/member.out") != "", "output")
    assert driver.read("/home/alice/member.out") == "n1 gpus= cpus=1\n"

    undo = JobChange(
        gpu_request="gres/gpu:1", required_nodes="", cpu_count=4, cpus_per_task=4, dependency="",
        time_limit_s=600, admin_comment="theirs muri:on",
    )  # fmt: skip
    inside.modify(restored, undo)
    job = inside.job(restored)
    assert (job.gpu_request, job.required_nodes, job.cpu_count, job.dependency) == ("gres/gpu:1", "", 4, "")
    inside.call(("release", restored))
    assert driver.wait_state(restored, "RUNNING")["NodeList"] != "n1"  # n1's GPUs are the host's
    driver.wait_until(lambda: "gpus=1 cpus=4" in driver.read("/home/alice/member.out"), "output with a GPU")


def test_hold_release_and_cancel_may_be_repeated(inside: GatewayInside) -> None:
    job_id = inside.driver.submit("--hold", "--wrap=sleep 600")
    inside.call(("hold", job_id), ("hold", job_id))
    assert inside.job(job_id).held
    assert inside.job(job_id).reason == "JobHeldUser"
    inside.call(("release", job_id), ("release", job_id))
    inside.driver.wait_state(job_id, "RUNNING")
    inside.call(("release", job_id), ("cancel", job_id), ("cancel", job_id))
    inside.driver.wait_state(job_id, "CANCELLED")
    inside.call(("cancel", job_id), ("release", job_id), ("cancel", 999_999))


def test_user_may_lift_a_hold(inside: GatewayInside) -> None:
    job_id = inside.driver.submit("--begin=now+1hour", "--wrap=true")
    inside.call(("hold", job_id))
    inside.driver.run("scontrol", "release", str(job_id), user="alice")
    job = inside.job(job_id)
    assert not job.held
    assert job.begin_s > inside.snapshot().taken_s


def test_requeue_hold_puts_a_running_job_back_and_spares_an_ended_one(inside: GatewayInside) -> None:
    driver = inside.driver
    job_id, ended = driver.submit("--requeue", "--wrap=sleep 600"), driver.submit("--requeue", "--wrap=true")
    driver.wait_state(job_id, "RUNNING")
    driver.wait_state(ended, "COMPLETED")
    inside.call(("requeue_hold", job_id), ("requeue_hold", ended))
    driver.wait_state(job_id, "PENDING")
    inside.call(("requeue_hold", job_id))
    job = inside.job(job_id)
    assert (job.state, job.held, job.restart_count) == (JobState.PENDING, True, 1)
    assert inside.job(ended).state is JobState.COMPLETED


@pytest.mark.parametrize("method", ["hold", "release", "requeue", "requeue_hold", "modify"])
def test_unknown_job_is_named(inside: GatewayInside, method: str) -> None:
    extra = ({"cpu_count": 1},) if method == "modify" else ()
    with pytest.raises(RefusedError) as caught:
        inside.call((method, 999_999, *extra))
    assert caught.value.error == "NoSuchJobError"
    assert "999999" in caught.value.text


def test_refusals_carry_slurms_words(inside: GatewayInside) -> None:
    with pytest.raises(RefusedError, match="partition") as caught:
        inside.submit(new_job(partition="nowhere"))
    assert caught.value.error == "GatewayError"
    job_id = inside.driver.submit("--hold", "--wrap=true")
    with pytest.raises(RefusedError, match="nvalid node name"):
        inside.modify(job_id, JobChange(required_nodes="nowhere"))
    with pytest.raises(RefusedError, match="must begin with #!"):
        inside.submit(new_job("true\n"))
    with pytest.raises(RefusedError, match="second line"):
        inside.submit(new_job("#!/bin/sh\n#SBATCH --comment=x\nexec true\n"))


def test_unreachable_slurmctld_is_said_to_be_so(inside: GatewayInside) -> None:
    inside.environment = {"SLURM_CONF": "/tmp/elsewhere.conf"}
    # How long Slurm's own library tries again depends on the two timeouts.
    elsewhere = "s/^SlurmctldPort=.*/SlurmctldPort=1/;s/^(SlurmctldTimeout|MessageTimeout)=.*/\\1=4/"
    inside.driver.run("sh", "-c", f"sed -E '{elsewhere}' /etc/slurm/slurm.conf > /tmp/elsewhere.conf"
                      "; cp /etc/slurm/slurm.key /tmp/ 2>/dev/null || true", user="root")  # fmt: skip
    with pytest.raises(RefusedError) as caught:
        inside.call(("snapshot",))
    assert caught.value.error == "SlurmUnreachableError"
    assert "slurmctld" in caught.value.text


def test_both_gateways_see_the_same(sandbox: Driver) -> None:
    sandbox.cancel_all()
    running = sandbox.submit("--gres=gpu:1", "--wrap=sleep 600")
    sandbox.submit("--gres=gpu:1", "--time=UNLIMITED", f"--dependency=afterok:{running}", "--wrap=true")
    sandbox.submit("--hold", "--array=1-3", "--wrap=true")
    sandbox.wait_state(running, "RUNNING")
    for job_id in range(running, running + 3):  # of others' jobs not all is asked for
        sandbox.run("scontrol", "update", f"JobId={job_id}", "AdminComment=muri:on", user="root")
    # Slurm's scheduler tells reasons anew after a change, in its own time: not between two snapshots.
    sandbox.wait_until(lambda: sandbox.job(running + 1)["Reason"] == "Dependency", "the reason")
    pyslurm, command = (GatewayInside(sandbox, kind).snapshot() for kind in ("pyslurm", "command"))
    active = [[job for job in snapshot.jobs if job.state.is_active] for snapshot in (pyslurm, command)]
    assert len(active[0]) == 3
    assert active[0] == active[1]
    assert pyslurm.nodes == command.nodes
    assert (pyslurm.cluster, pyslurm.slurm_version) == (command.cluster, command.slurm_version)
    sandbox.cancel_all()


def test_auto_falls_back_to_commands_where_pyslurm_is_missing(old_sandbox: Driver) -> None:
    code = "from muri.slurm_plugin.controller.assemble import open_gateway; print(open_gateway('auto', print).name)"
    done = old_sandbox.run("python", "-c", code, user="root")
    why, name = done.stdout.splitlines()
    assert (name, done.stderr) == ("command", "")
    assert why.startswith("pyslurm is not installed")
    with pytest.raises(RefusedError) as caught:
        GatewayInside(old_sandbox, "pyslurm").snapshot()
    assert caught.value.error == "NoPyslurmError"
    assert "gateway: command" in caught.value.text
