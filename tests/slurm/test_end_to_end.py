"""Muri's promises on a real Slurm: the user's job stays an ordinary job, and nothing is lost."""

import json
from collections.abc import Iterator

import pytest
from conftest import emptied
from muri_cluster import STAGES, MuriCluster

#: For what depends on Slurm's release: on each one where groups form.
on_every_release = pytest.mark.parametrize("muri", ["one_gpu_sandbox", "trixie_one_gpu_sandbox"], indirect=True)


@pytest.fixture
def muri(request: pytest.FixtureRequest) -> Iterator[MuriCluster]:
    """One GPU to share, on the current Slurm or where a test says so."""
    for driver in emptied(request.getfixturevalue(getattr(request, "param", "one_gpu_sandbox"))):
        yield MuriCluster(driver)


def start_group(muri: MuriCluster, *kinds: str, **options) -> list[int]:
    """Submit one job of each kind and let the controller group them."""
    muri.know_profiles()
    jobs = [muri.submit(kind, **options) for kind in kinds]
    muri.cycle()
    muri.wait_grouped(*jobs)
    return jobs


@on_every_release
def test_four_jobs_share_one_gpu_and_stay_ordinary_jobs(muri):
    with muri.training():
        jobs = start_group(muri, *STAGES)
        (host,) = muri.hosts()
        shown = muri.queue()
    assert {shown[job]["state"] for job in jobs} == {"interleaved"}
    assert {shown[job]["group"] for job in jobs} == {host}
    fields = [muri.driver.wait_state(job) for job in jobs]
    assert {job["JobState"] for job in fields} == {"COMPLETED"}
    assert {job["ExitCode"] for job in fields} == {"0:0"}
    for job in jobs:
        assert muri.output(job).split("\n")[2:] == [f"finished {job}", "script ends with 0", ""]
    muri.driver.wait_state(host, "COMPLETED")


def test_exit_code_of_a_member_arrives_in_slurm_and_partners_run_on(muri):
    muri.know_profiles()
    bad = muri.submit("load", iterations=5, code=3)
    good = muri.submit("propagate", iterations=60)
    muri.cycle()
    fields = muri.driver.wait_state(bad)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "3:0")
    assert muri.driver.wait_state(good)["JobState"] == "COMPLETED"
    assert f"finished {good}" in muri.output(good)


def test_scancel_of_a_member_leaves_its_partners_running(muri):
    with muri.training():
        first, second = start_group(muri, "load", "propagate")
        muri.driver.run("scancel", str(first), user="alice")
        assert muri.driver.wait_state(first)["JobState"] == "CANCELLED"
        assert muri.driver.job(second)["JobState"] == "RUNNING"
    assert muri.driver.wait_state(second)["JobState"] == "COMPLETED"
    assert f"finished {first}" not in muri.output(first)


@on_every_release
def test_scancel_of_a_whole_group_at_once_ends_it_for_good(muri):
    """As `scancel -u alice` does it: the host goes with its members, which must not come back for its sake."""
    jobs = start_group(muri, "load", "propagate", iterations=200)
    muri.driver.run("scancel", "--user", "alice", user="root")
    states = [muri.driver.wait_state(job)["JobState"] for job in jobs]
    assert states == ["CANCELLED", "CANCELLED"]
    assert [muri.driver.job(job)["Restarts"] for job in jobs] == ["0", "0"]


@on_every_release
def test_dependency_on_a_member_fires(muri):
    with muri.training():
        first, second = start_group(muri, "load", "propagate")
        after = muri.submit("preprocess", f"--dependency=afterok:{first}", iterations=5)
        ordinary = muri.driver.submit("-p", "train", f"--dependency=afterok:{second}", "--wrap=true")
        muri.cycle()
        assert muri.driver.job(after)["JobState"] == "PENDING"
    fields = muri.cycles_until_ended(first, second, after, ordinary)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}


def test_jobs_of_two_users_are_never_grouped(muri):
    muri.know_profiles()
    jobs = [muri.submit("load", user="alice", iterations=5), muri.submit("propagate", user="bob", iterations=5)]
    muri.cycle()
    (host,) = muri.hosts()
    assert muri.driver.job(host)["AdminComment"].endswith(f":{jobs[0]}")
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert muri.driver.job(host)["AdminComment"].endswith(f":{jobs[0]}")


def test_a_job_alone_behind_a_pilot_job_looks_as_it_would_alone(muri):
    muri.know_profiles()
    failing = muri.submit("load", iterations=50, code=3)  # (it runs when the cycle has ended)
    muri.cycle()
    assert len(muri.hosts()) == 1
    assert muri.driver.wait_state(failing)["ExitCode"] == "3:0"
    assert f"finished {failing}" in muri.output(failing)
    muri.driver.wait_until(lambda: not muri.hosts(), "the end of the pilot job")
    stopped = muri.submit("load", iterations=2000)
    muri.cycle()
    muri.wait_grouped(stopped)
    (host,) = muri.hosts()
    shown = muri.queue()[stopped]
    assert (shown["state"], shown["group"], shown["partners"]) == ("alone", host, [])
    told = muri.driver.run("muri", "explain", str(stopped), user="alice").stdout
    assert f"It has the GPUs of pilot job {host} to itself." in told
    assert "others may join it while it runs" in told
    muri.driver.run("scancel", str(stopped), user="alice")
    muri.driver.wait_state(stopped, "CANCELLED")
    muri.driver.wait_until(lambda: not muri.hosts(), "the end of the pilot job")
    alone = muri.submit("load", "--muri=model=load,batch-size=8,alone", iterations=3)
    muri.cycle()
    assert muri.hosts() == []
    assert muri.driver.wait_state(alone)["JobState"] == "COMPLETED"


def test_a_lone_job_whose_pilot_job_dies_runs_plain(muri):
    muri.know_profiles()
    job = muri.submit("load", iterations=20)
    with muri.training():
        muri.cycle()
        muri.wait_grouped(job)
        (host,) = muri.hosts()
        muri.driver.run("scancel", str(host), user="root")
        muri.driver.wait_state(job, "PENDING")
    fields = muri.cycles_until_ended(job)
    assert (fields[job]["JobState"], fields[job]["Restarts"]) == ("COMPLETED", "1")
    assert "gres/gpu:1" in fields[job]["TresPerNode"]


def test_dry_runs_measure_new_models_and_the_jobs_are_grouped_then(muri):
    jobs = [muri.submit("load", iterations=30), muri.submit("propagate", iterations=30)]
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    store = ("--store", f"{muri.state_dir}/profiles.db")
    listed = json.loads(muri.driver.run("muri", "profile", "list", "--json", *store, user="root").stdout)
    assert {profile["model"] for profile in listed["profiles"]} == {"load", "propagate"}
    # Grouped, not alone: the job's own tag still names its host.
    assert all("muri-state" in job["AdminComment"] for job in fields.values())
    assert all(muri.output(job).count("started") == 1 for job in jobs)


def test_a_failing_dry_run_does_not_block_the_job(muri):
    muri.driver.write("broken.sh", "#!/bin/sh\necho no stages here\nexit 0\n")
    job = muri.driver.submit("-p", "train", "--gres=gpu:1", "--muri=model=broken", "/home/alice/broken.sh")
    fields = muri.cycles_until_ended(job)
    assert fields[job]["JobState"] == "COMPLETED"


@on_every_release
def test_a_dead_host_sends_its_members_back_and_they_run_alone(muri):
    """One of them keeps the time limit that an administrator has given it; its host had to last as long."""
    muri.know_profiles()
    jobs = [muri.submit(kind, iterations=150) for kind in ("load", "propagate")]
    own_limit = muri.driver.job(jobs[1])["TimeLimit"]
    muri.cycle()
    muri.wait_grouped(*jobs)
    (host,) = muri.hosts()
    muri.driver.run("scontrol", "update", f"JobId={jobs[0]}", "TimeLimit=1-06:00:00", user="root")
    muri.cycle()
    assert muri.driver.job(host)["TimeLimit"].startswith("1-06:1")
    muri.driver.run("scancel", "--signal=KILL", str(host), user="root")
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert all(job["Restarts"] == "1" for job in fields.values())
    assert all("gres/gpu:1" in job["TresPerNode"] for job in fields.values())
    assert fields[jobs[0]]["TimeLimit"] == "1-06:00:00"
    assert fields[jobs[1]]["TimeLimit"] == own_limit
    assert all(muri.output(job).split("\n")[1].startswith("gpus 0") for job in jobs)


KILL = """
import os, signal, sys
from muri.slurm_plugin.controller.assemble import open_controller, open_gateway, read_config

class Dying:
    def __init__(self, gateway, nth):
        self._gateway, self._left = gateway, nth
    name = "dying"
    def __getattr__(self, name):
        method = getattr(self._gateway, name)
        if name not in ("submit", "modify", "release"):
            return method
        def call(*arguments):
            if sys.argv[2] == "after-closing":
                os.system("scontrol update PartitionName=train State=DOWN")
            self._left -= 1
            if self._left == 0 and "before" == sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL)
            result = method(*arguments)
            if self._left == 0 and sys.argv[2] in ("after", "after-closing"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._left == 0 and "no-slurm" == sys.argv[2]:
                os.system("pkill -TERM slurmctld; while pgrep slurmctld >/dev/null; do sleep 0.1; done")
            return result
        return call

config = read_config(None)
with open_controller(config, Dying(open_gateway(config.gateway), int(sys.argv[1]))) as controller:
    controller.cycle()
"""


@pytest.mark.parametrize(("nth", "side"), [(1, "before"), (1, "after"), (2, "after"), (3, "after")])
def test_a_controller_killed_at_any_point_loses_and_doubles_no_job(muri, nth, side):
    muri.know_profiles()
    jobs = [muri.submit("load", iterations=10), muri.submit("propagate", iterations=10)]
    assert muri.python(KILL, str(nth), side, check=False).returncode == -9
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    for job in jobs:
        assert muri.output(job).count(f"started {job}") == 1
        assert fields[job]["Restarts"] == "0"
    muri.driver.wait_until(lambda: not muri.hosts(), "the end of the host")


def test_slurmctld_restarted_in_mid_cycle(muri):
    muri.know_profiles()
    jobs = [muri.submit("load", iterations=10), muri.submit("propagate", iterations=10)]
    done = muri.python(KILL, "2", "no-slurm", check=False)
    assert done.returncode != 0
    muri.driver.restart_controller()
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert all(muri.output(job).count(f"started {job}") == 1 for job in jobs)


@pytest.fixture
def reopened(muri) -> Iterator[None]:
    """The partition is up again when the test has ended."""
    yield
    muri.driver.run("scontrol", "update", "PartitionName=train", "State=UP", user="root")


@on_every_release
@pytest.mark.usefixtures("reopened")
def test_drain_gives_every_held_job_back(muri):
    muri.know_profiles()
    jobs = [muri.submit(kind, "-c", "2", iterations=5) for kind in STAGES]
    # Two are left half-way into a group by a controller that never comes back. The partition goes down as soon as the
    # plan is made: a member that runs when the drain comes would rightly be left in its group.
    assert muri.python(KILL, "3", "after-closing", check=False).returncode == -9
    muri.driver.run("muri", "drain", user="root")
    for job in jobs:
        fields = muri.driver.job(job)
        assert fields["Priority"] != "0"
        assert "gres/gpu:1" in fields["TresPerNode"]
        assert fields["NumCPUs"] == "2"
        assert fields["ReqNodeList"] == "(null)"
        assert "muri-state" not in fields["AdminComment"]
    muri.driver.run("scontrol", "update", "PartitionName=train", "State=UP", user="root")
    ended = [muri.driver.wait_state(job) for job in jobs]
    assert {job["JobState"] for job in ended} == {"COMPLETED"}
    muri.driver.wait_until(lambda: not muri.hosts(), "the end of what was left")


def test_a_second_controller_leaves_at_once(muri):
    first = muri.driver.popen("muri-controller", "--interval", "60", user="root")
    lock = f"{muri.state_dir}/controller.lock"
    muri.driver.wait_until(
        lambda: muri.driver.run("test", "-s", lock, user="root", check=False).returncode == 0, "the first's lock"
    )
    second = muri.cycle(check=False)
    first.terminate()
    first.wait()
    assert second.returncode == 0
    assert "another controller" in second.stderr


def test_snapshot_and_plan_are_the_same_twice(muri):
    muri.know_profiles()
    for kind in STAGES:
        muri.submit(kind)
    muri.driver.run("sh", "-c", "muri snapshot > /root/s.json", user="root")
    plans = [muri.driver.run("muri", "plan", "--snapshot", "/root/s.json", user="root").stdout for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].startswith("group on n1: jobs ")


def test_explain_says_why(muri):
    muri.know_profiles()
    blocker = muri.driver.submit("-p", "train", "--gres=gpu:1", "--wrap=sleep 30")
    muri.driver.wait_state(blocker, "RUNNING")
    job = muri.submit("load")
    muri.cycle()
    said = muri.driver.run("muri", "explain", str(job), user="alice").stdout
    assert "waiting" in said
    assert "GPU" in said
    unknown = muri.driver.run("muri", "explain", str(blocker), user="alice", check=False)
    assert unknown.returncode == 2
    assert str(job) in unknown.stderr


def test_the_command_gateway_does_the_same(muri):
    muri.configure(gateway="command")
    jobs = start_group(muri, "load", "propagate", iterations=10)
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert json.loads(muri.driver.read(f"{muri.state_dir}/status.json"))["gateway"] == "command"


def test_a_job_array_runs_alone_and_whole(muri):
    muri.know_profiles()
    array = muri.submit("load", "--array=0-1", iterations=3)
    listed = ["squeue", "-h", "-j", str(array), "-o", "%i"]
    with muri.controller():
        muri.driver.wait_until(
            lambda: not muri.driver.run(*listed, user="root", check=False).stdout.strip(), "the end of the array"
        )
    outputs = [muri.driver.read(f"/home/alice/slurm-{array}_{task}.out") for task in (0, 1)]
    assert all(output.count("finished") == 1 for output in outputs)


def test_on_an_old_slurm_every_job_runs_alone_and_the_log_says_why(old_sandbox):
    old_sandbox.cancel_all()
    muri = MuriCluster(old_sandbox)
    muri.configure(partitions=["main"], profiling={"at_once": 0})
    jobs = [
        old_sandbox.submit("--gres=gpu:1", "--muri=model=load", "/home/alice/train.sh", "3", "0", "load")
        for _ in range(2)
    ]
    assert "Slurm accepts it and hands out the GPU" in muri.cycle().stderr
    for job in jobs:
        assert old_sandbox.wait_state(job)["JobState"] == "COMPLETED"
        assert "gpus 0" in muri.output(job) or "gpus 1" in muri.output(job)
