"""Muri's promises on a real Slurm: the user's job stays an ordinary job, and nothing is lost."""

import json
import sys

import pytest
from muri_cluster import DRY_RUNS, STAGES, TRAIN_PY, MuriCluster
from sandboxes import on_both_releases


@on_both_releases
def test_four_jobs_share_one_gpu_and_stay_ordinary_jobs(muri):
    muri.know_profiles()
    jobs = [muri.submit(kind, iterations=5, code=3 if kind == "load" else 0) for kind in STAGES]
    with muri.training(*STAGES[1:]):
        with muri.training("load"):
            after = muri.submit("load", f"--dependency=afternotok:{jobs[0]}", iterations=5)
            ordinary = muri.driver.submit("-p", "train", f"--dependency=afterok:{jobs[1]}", "--wrap=true")
            muri.cycle()
            muri.wait_grouped(*jobs)
            (pilot,) = muri.pilots()
            shown = muri.queue()
            muri.cycle()
            assert [muri.driver.job(job)["JobState"] for job in (after, ordinary)] == ["PENDING"] * 2
        failed = muri.driver.wait_state(jobs[0])
        assert (failed["JobState"], failed["ExitCode"]) == ("FAILED", "3:0")
        assert [muri.driver.job(job)["JobState"] for job in jobs[1:]] == ["RUNNING"] * 3
    assert {(shown[job]["state"], shown[job]["group"]) for job in jobs} == {("interleaved", pilot)}
    fields = muri.cycles_until_ended(*jobs[1:], after, ordinary)
    assert {(job["JobState"], job["ExitCode"]) for job in fields.values()} == {("COMPLETED", "0:0")}
    for job, code in zip(jobs, (3, 0, 0, 0), strict=True):
        assert muri.output(job).split("\n")[2:] == [f"finished {job}", f"script ends with {code}", ""]
    muri.driver.wait_state(pilot, "COMPLETED")


@on_both_releases
def test_scancel_of_a_member_leaves_its_partners_and_that_of_a_whole_group_ends_it_for_good(muri):
    """The latter as `scancel -u alice` does it: the pilot goes, too, and its members must not come back for it."""
    muri.configure(gateway="command")
    with muri.training("load", "propagate", "synchronize"):
        with muri.training("preprocess"):
            jobs, _ = muri.start_group(*STAGES)
            muri.driver.run("scancel", str(jobs[0]), user="alice")
            assert muri.driver.wait_state(jobs[0])["JobState"] == "CANCELLED"
        assert muri.driver.wait_state(jobs[1])["JobState"] == "COMPLETED"
        assert [muri.driver.job(job)["JobState"] for job in jobs[2:]] == ["RUNNING"] * 2
        muri.driver.run("scancel", "--user", "alice", user="root")
        ended = [muri.driver.wait_state(job) for job in jobs[2:]]
    assert {(job["JobState"], job["Restarts"]) for job in ended} == {("CANCELLED", "0")}
    assert f"finished {jobs[0]}" not in muri.output(jobs[0])
    assert json.loads(muri.driver.read(f"{muri.state_dir}/status.json"))["gateway"] == "command"


def test_jobs_of_two_users_are_never_grouped_and_explain_says_why_one_waits(muri):
    with muri.training():
        (first,), pilot = muri.start_group("load")
        second = muri.submit("propagate", user="bob", iterations=5)
        muri.cycle()
        assert muri.pilots() == [pilot]
        assert muri.driver.job(second)["JobState"] == "PENDING"
        said = muri.explain(second, user="bob")
    assert "waiting" in said
    assert "GPU" in said
    fields = muri.cycles_until_ended(first, second)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert muri.driver.job(pilot)["AdminComment"].endswith(f":{first}")


def test_a_job_alone_behind_a_pilot_job_looks_as_it_would_alone(muri):
    with muri.training():
        (job,), pilot = muri.start_group("load", code=3)
        shown = muri.queue()[job]
        assert (shown["state"], shown["group"], shown["partners"]) == ("alone", pilot, [])
        told = muri.explain(job)
        assert f"It has the GPUs of pilot job {pilot} to itself." in told
        assert "others may join it while it runs" in told
    assert muri.driver.wait_state(job)["ExitCode"] == "3:0"
    assert f"finished {job}" in muri.output(job)
    muri.driver.wait_until(lambda: not muri.pilots(), "the end of the pilot job")
    alone = muri.submit("load", "--muri=model=load,batch-size=8,alone", iterations=3)
    muri.cycle()
    assert muri.pilots() == []
    assert muri.driver.wait_state(alone)["JobState"] == "COMPLETED"


@DRY_RUNS
def test_dry_runs_measure_new_models_and_the_jobs_are_grouped_then(muri):
    jobs = [muri.submit("load", iterations=30), muri.submit("propagate", iterations=30)]
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert muri.models().keys() == {"load", "propagate"}
    # Grouped, not alone: the job's own tag still names its host.
    assert all("muri-state" in job["AdminComment"] for job in fields.values())
    assert all(muri.output(job).count("started") == 1 for job in jobs)


@DRY_RUNS
def test_a_failing_dry_run_does_not_block_the_job(muri):
    muri.driver.write("broken.sh", "#!/bin/sh\necho no stages here\nexit 0\n")
    job = muri.driver.submit("-p", "train", "--gres=gpu:1", "--muri=model=broken", "/home/alice/broken.sh")
    fields = muri.cycles_until_ended(job)
    assert fields[job]["JobState"] == "COMPLETED"


@on_both_releases
@pytest.mark.parametrize("kinds", [("load", "propagate"), pytest.param(("load",), marks=pytest.mark.thorough)])
def test_members_of_a_dead_host_run_alone(muri, kinds):
    """One of them keeps the time limit that an administrator has given it; its pilot had to last as long."""
    with muri.training():
        jobs, pilot = muri.start_group(*kinds)
        limits = ["1-06:00:00", "01:00:00"][: len(jobs)]  # the latter is the partition's
        muri.driver.run("scontrol", "update", f"JobId={jobs[0]}", f"TimeLimit={limits[0]}", user="root")
        muri.cycle()
        assert muri.driver.job(pilot)["TimeLimit"].startswith("1-06:1")
        muri.kill_pilot(pilot, *jobs)
    fields = muri.cycles_until_ended(*jobs).values()
    assert {(job["JobState"], job["Restarts"]) for job in fields} == {("COMPLETED", "1")}
    assert [job["TimeLimit"] for job in fields] == limits
    assert all("gres/gpu:1" in job["TresPerNode"] for job in fields)
    assert all(muri.output(job).split("\n")[1].startswith("gpus 0") for job in jobs)


PATIENT_PYTHON = f"""#!/bin/sh
: > /home/alice/begun-$SLURM_JOB_ID
while [ -e /home/alice/keep-waiting ]; do sleep 0.1; done
exec {sys.executable} "$@"
"""


@pytest.mark.thorough  # srun gives up after half a minute
def test_a_group_that_starts_while_slurmctld_is_away_begins_once_it_is_back(muri):
    muri.configure(node_python=muri.driver.write("python", PATIENT_PYTHON))
    muri.know_profiles()
    muri.script("train", TRAIN_PY, ": > /home/alice/begun-$SLURM_JOB_ID")
    jobs = [muri.submit(kind, iterations=10) for kind in ("load", "propagate")]
    with muri.training("waiting"):
        muri.cycle()
        (pilot,) = muri.pilots()
        # Slurm itself requeues a job that it has not launched yet when slurmctld goes.
        begun = [f"begun-{job}" for job in (pilot, *jobs)]
        muri.driver.wait_until(lambda: muri.driver.run("ls", *begun).stdout != "", "the start of the scripts")
        with muri.driver.no_controller():
            muri.driver.run("rm", "keep-waiting")
            log = f"/run/muri/1001/pilot-{pilot}.log"
            muri.driver.wait_until(lambda: "it is started again" in muri.driver.read(log), "the end of srun's patience")
    fields = [muri.driver.wait_state(job) for job in jobs]
    assert {(job["JobState"], job["Restarts"]) for job in fields} == {("COMPLETED", "0")}
    assert [muri.output(job).count(f"started {job}") for job in jobs] == [1, 1]


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


@pytest.mark.parametrize(
    ("nth", "side"),
    [
        (1, "after"),
        (3, "after"),
        *(pytest.param(*point, marks=pytest.mark.thorough) for point in ((1, "before"), (2, "after"), (2, "no-slurm"))),
    ],
)
def test_a_controller_killed_at_any_point_loses_and_doubles_no_job(muri, nth, side):
    """With `no-slurm` it is slurmctld that ends in mid-cycle, and the controller that finds it gone."""
    muri.know_profiles()
    jobs = [muri.submit("load", iterations=10), muri.submit("propagate", iterations=10)]
    code = muri.python(KILL, str(nth), side, check=False).returncode
    if side == "no-slurm":
        muri.driver.restart_controller()
    assert code == (1 if side == "no-slurm" else -9)
    fields = muri.cycles_until_ended(*jobs)
    assert {(job["JobState"], job["Restarts"]) for job in fields.values()} == {("COMPLETED", "0")}
    assert [muri.output(job).count(f"started {job}") for job in jobs] == [1, 1]
    muri.driver.wait_until(lambda: not muri.pilots(), "the end of the pilot")


@on_both_releases
def test_drain_gives_every_held_job_back(muri):
    muri.know_profiles()
    jobs = [muri.submit(kind, "-c", "2", iterations=1) for kind in STAGES[1:]]
    with muri.no_starts(at_once=False):
        # Two are left half-way into a group by a controller that never comes back. The partition goes down as soon as
        # the plan is made: a member that runs when the drain comes would rightly be left in its group.
        assert muri.python(KILL, "3", "after-closing", check=False).returncode == -9
        muri.driver.run("muri", "drain", user="root")
        for job in jobs:
            fields = muri.driver.job(job)
            assert fields["Priority"] != "0"
            assert "gres/gpu:1" in fields["TresPerNode"]
            assert (fields["NumCPUs"], fields["ReqNodeList"]) == ("2", "(null)")
            assert "muri-state" not in fields["AdminComment"]
    assert {muri.driver.wait_state(job)["JobState"] for job in jobs} == {"COMPLETED"}
    muri.driver.wait_until(lambda: not muri.pilots(), "the end of what was left")


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


#: With the third job that is let go the controller is told to stop. Not it alone gets the signal but its whole process
#: group, as with Ctrl-C; the command itself goes on.
SCONTROL = """\
#!/bin/sh
{scontrol} "$@" || exit
case "$*" in *Licenses=*) echo released >> /root/stopping/released ;; *) exit 0 ;; esac
test $(wc -l < /root/stopping/released) != 3 || kill -s TERM -- -$(ps -o pgid= -p $PPID | tr -d ' ')
"""

JOBS = 6


def behind_the_gate(muri: MuriCluster, jobs: list[int]) -> int:
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
    assert behind_the_gate(muri, jobs) == JOBS
    stopped = one_gpu.run(
        "setsid", "--wait", "sh", "-c", "PATH=/root/stopping:$PATH exec muri-controller --once", user="root"
    )
    assert "left for the next cycle: the controller was told to stop" in stopped.stderr
    assert "failed" not in stopped.stderr  # no command of its own was hit
    assert behind_the_gate(muri, jobs) == JOBS - 3
    muri.cycle()
    for job in jobs:
        assert one_gpu.wait_state(job)["JobState"] == "COMPLETED"
    assert sorted(map(int, one_gpu.read("ran", user="alice").split())) == jobs
