"""What every gateway promises, tried on a real Slurm: pyslurm and commands, Slurm 26.05, 24.11 and 22.05."""

import json
import re
from dataclasses import replace

import pytest
from gateway_inside import ALICE, GatewayInside, RefusedError, by_commands, new_job
from muri_cluster import MuriCluster
from sandboxes import needs_pyslurm
from slurm_cases import REMOVED

from muri.slurm_plugin.records.cluster import JobChange, JobState
from sandbox.driver import Driver


def test_gpus_are_counted_however_they_were_asked_for(inside: GatewayInside) -> None:
    told = {
        "--gres=gpu:2": (2, "gres/gpu:2"),
        "--gres=gpu": (1, "gres/gpu:1"),
        "--gpus-per-node=1 --nodes=2": (2, "gres/gpu:1"),
        "--gpus=2": (2, ""),
        "--gpus-per-task=1 --ntasks=2": (2, ""),
        "--ntasks=1": (0, ""),
    }
    submit = ("--hold", "--output=/dev/null", "--wrap=true")
    ids = {options: inside.driver.submit(*options.split(), *submit) for options in told}
    for job_id in ids.values():
        inside.modify(job_id, JobChange(admin_comment="muri:on"))
    jobs = {job.job_id: job for job in inside.snapshot().jobs}
    assert {options: (jobs[each].gpu_count, jobs[each].gpu_request) for options, each in ids.items()} == told
    assert all((jobs[each].state, jobs[each].reason) == (JobState.PENDING, "JobHeldUser") for each in ids.values())


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
    assert snapshot.slurm_version == driver.run("sinfo", "--version").stdout.split()[1]
    running = inside.job(job_id)
    assert (running.state, running.nodes, running.held) == (JobState.RUNNING, "n1", False)
    assert running.start_s > 0
    assert (running.mem_per_node_mib, running.mem_per_cpu_mib) == (4000, 2000)


@by_commands
def test_submitted_job_runs_as_its_user_with_its_environment_only(inside: GatewayInside) -> None:
    driver = inside.driver
    driver.write("printed", "")
    inside.environment = {"SLURM_LEAK": "1", "SBATCH_JOB_NAME": "leak", "OTHER_LEAK": "1"}
    printing = "id -un; pwd; echo gpus=$SLURM_GPUS_ON_NODE; env\nexit 3\n"
    script = f"#!/bin/sh\nexec sh <<'END'\n#SBATCH --job-name=wrong\n{printing}END\n"
    awkward = "a b\n'\"$(id)`,é"
    comment = 'x muri-pilot:{"k":["a b","\'"]}'
    environment = {"PATH": "/usr/bin:/bin", "AWKWARD": awkward}
    job_id = inside.submit(
        new_job(script, environment=environment, output="/home/alice/printed", gpu_request="gres/gpu:1",
                work_dir="/home/alice", cpu_count=2, time_limit_s=61, mem_per_node_mib=100, admin_comment=comment,
                required_nodes="n3", licenses="matlab:1")
    )  # fmt: skip
    inside.environment = {}
    assert driver.wait_state(job_id)["ExitCode"] == "3:0"
    job = inside.job(job_id)
    assert (job.name, job.state, job.exit_code, job.nodes) == ("tried", JobState.FAILED, 3, "n3")
    assert (job.cpu_count, job.time_limit_s, job.mem_per_node_mib) == (2, 120, 100)
    assert (job.admin_comment, job.comment, job.can_requeue, job.special) == (comment, "", False, ())
    assert job.licenses == "matlab:1"
    printed = driver.read("/home/alice/printed")
    assert printed.startswith("alice\n/home/alice\ngpus=1\n")
    assert f"AWKWARD={awkward}\n" in printed
    assert "LEAK" not in printed


def jobs_on_cpu(driver: Driver) -> int:
    shown = driver.run("scontrol", "show", "partition", "main").stdout
    return int(re.findall(r"OverSubscribe=YES:(\d+)", shown)[0])


def test_a_job_that_shares_cpus_is_seen_and_submitted(inside: GatewayInside) -> None:
    driver = inside.driver
    asked = driver.submit("--hold", "--oversubscribe", "--gres=gpu:1", "--wrap=true")
    plain = driver.submit("--hold", "--gres=gpu:1", "--wrap=true")
    own = inside.submit(new_job(oversubscribe=True, required_nodes="n1", mem_per_node_mib=100, cpu_count=16))
    driver.wait_state(own, "RUNNING")
    snapshot = inside.snapshot()
    jobs = {job.job_id: job for job in snapshot.jobs}
    assert [jobs[each].oversubscribe for each in (asked, plain, own)] == [True, False, True]
    assert [jobs[each].special for each in (asked, plain, own)] == [(), (), ()]
    assert {each.oversubscribe for each in snapshot.limits.partitions} == {jobs_on_cpu(driver)}


def test_a_node_that_shares_cpus_counts_each_cpu_once(inside: GatewayInside) -> None:
    submit = ("--oversubscribe", "--nodelist=n1", "--cpus-per-task=16", "--mem=1000", "--wrap=sleep 600")
    most = jobs_on_cpu(inside.driver)
    jobs = [inside.driver.submit(*submit) for _ in range(most + 1)]
    for job_id in jobs[:most]:
        inside.driver.wait_state(job_id, "RUNNING")
    node = next(node for node in inside.snapshot().nodes if node.name == "n1")
    assert (node.cpus_allocated, node.cpu_count, node.mem_allocated_mib) == (16, 16, most * 1000)
    inside.driver.wait_reason(jobs[most], "Resources")
    assert inside.job(jobs[most]).state is JobState.PENDING


def test_a_change_that_lets_cpus_be_shared_keeps_all_else(inside: GatewayInside) -> None:
    options = ("--gres=gpu:1", "--cpus-per-task=4", "--mem=3000", "--time=10", "--no-requeue")
    job_id = inside.driver.submit("--hold", *options, "--wrap=true")
    before = inside.job(job_id)
    # Slurm 22.05 keeps the GPUs of a waiting job, whatever it is asked for.
    gpus = {} if inside.driver.instance.slurm_version.startswith("22.05") else {"gpu_request": REMOVED}
    change = JobChange(required_nodes="n2", admin_comment="muri-grant:7", oversubscribe=True, **gpus)
    inside.modify(job_id, change)
    member = replace(before, required_nodes="n2", admin_comment="muri-grant:7", oversubscribe=True)
    member = replace(member, gpu_count=0, gpu_request=REMOVED) if gpus else member
    assert inside.job(job_id) == member
    back = {"gpu_request": before.gpu_request} if gpus else {}
    inside.modify(job_id, JobChange(required_nodes="", admin_comment="", oversubscribe=False, **back))
    # The opposite that Slurm knows is a node of its own: it stays as it is.
    assert inside.job(job_id) == replace(before, oversubscribe=True)


def test_root_lets_cpus_be_shared_where_the_user_changes_the_rest(inside: GatewayInside) -> None:
    job_id = inside.driver.submit("--hold", "--cpus-per-task=4", "--time=10", "--wrap=true")
    inside.modify(job_id, JobChange(time_limit_s=300, oversubscribe=True, owner=(ALICE, ALICE)))
    job = inside.job(job_id)
    assert (job.time_limit_s, job.oversubscribe, job.cpu_count) == (300, True, 4)


def test_environment_of_a_pending_job(inside: GatewayInside) -> None:
    job_id = inside.driver.submit("--hold", "--export=ALL,ODD=x y", "--wrap=echo é")
    environment, missing = inside.call(("job_environment", job_id), ("job_environment", 999_999))
    assert environment["ODD"] == "x y"
    assert environment["HOME"] == "/home/alice"
    assert missing is None


@by_commands
def test_a_refused_submission_carries_slurms_words(inside: GatewayInside) -> None:
    with pytest.raises(RefusedError, match="partition") as caught:
        inside.submit(new_job(partition="nowhere"))
    assert caught.value.error == "GatewayError"


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


@needs_pyslurm
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


#: Remote procedures that slurmctld's daemons or sdiag itself call, and no gateway.
BACKGROUND = re.compile(r"REGISTRATION|EPILOG|COMPLETE|STATS_INFO|PING|LAUNCH|CONFIG")

_CYCLES = """
import json, sys
from muri.slurm_plugin.controller.assemble import open_controller, read_config

config = read_config(None).model_copy(update={"gateway": sys.argv[1], "gate": "license", "partitions": ()})
with open_controller(config) as controller:
    print(json.dumps([dict(controller.cycle().slurm_calls) for _ in range(int(sys.argv[2]))]))
"""


def rpc_counts(driver: Driver) -> dict[str, int]:
    text = driver.run("sdiag", user="root").stdout
    section = text.split("by message type")[1].split("by user")[0]
    found = re.findall(r"(\w+)\s*\(\s*\d+\)\s*count:(\d+)", section)
    return {name: int(count) for name, count in found if not BACKGROUND.search(name)}


def test_a_cycle_that_finds_nothing_to_do_calls_slurm_two_or_three_times(inside: GatewayInside) -> None:
    kind, driver = inside.kind, inside.driver
    site = MuriCluster(driver)
    driver.run("sh", "-c", "for i in $(seq 30); do sbatch -H -o /dev/null --wrap=true; done")

    def cycles(count: int) -> tuple[list[dict[str, int]], dict[str, int]]:
        before = rpc_counts(driver)
        told = json.loads(site.python(_CYCLES, kind, str(count)).stdout.splitlines()[-1])
        after = rpc_counts(driver)
        return told, {name: count - before.get(name, 0) for name, count in after.items()}

    few, many = cycles(2), cycles(7)
    # Opening a controller and its first cycle cost the same both times.
    expected = {"REQUEST_JOB_INFO": 5, "REQUEST_NODE_INFO": 5, "REQUEST_UPDATE_RESERVATION": 5}
    if kind == "command":
        expected["REQUEST_PARTITION_INFO"] = 10  # `squeue` and `scontrol show nodes` ask for them by themselves
    cost = {name: count - few[1].get(name, 0) for name, count in many[1].items()}
    assert {name: count for name, count in cost.items() if count} == expected
    assert many[0][1:] == [{"jobs": 1, "lease": 1, "nodes": 1}] * 6
