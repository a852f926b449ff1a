"""Job arrays on a real Slurm: tasks are members like other jobs, and each stays a task of its array."""

import json
from collections.abc import Iterator

import pytest
from conftest import emptied
from muri_cluster import STAGES, MuriCluster

on_every_release = pytest.mark.parametrize("muri", ["one_gpu_sandbox", "trixie_one_gpu_sandbox"], indirect=True)

TRAIN_SH = """\
#!/bin/sh
echo "task $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID"
muri run /home/alice/task.py
code=$?
echo "script ends with $code"
exit $code
"""

#: Each task has another slow stage; the task named in ~/fails fails.
TASK_PY = """\
import os, sys, time
import muri

task = int(os.environ["SLURM_ARRAY_TASK_ID"])
print("started", os.environ["SLURM_JOB_ID"], flush=True)
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
stages = ("load", "preprocess", "propagate", "synchronize")
step = 0
while step < 30 or os.path.exists(os.path.expanduser("~/keep-training")):
    step += 1
    for stage in stages:
        with muri.stage(stage):
            time.sleep(0.07 if stage == stages[task % 4] else 0.01)
print("finished", task, flush=True)
failing = os.path.expanduser("~/fails")
sys.exit(3 if os.path.exists(failing) and open(failing).read().strip() == str(task) else 0)
"""


@pytest.fixture
def muri(request: pytest.FixtureRequest) -> Iterator[MuriCluster]:
    """One GPU to share."""
    for driver in emptied(request.getfixturevalue(getattr(request, "param", "one_gpu_sandbox"))):
        driver.write("task.py", TASK_PY)
        driver.write("task.sh", TRAIN_SH)
        driver.write("fails", "none")
        muri = MuriCluster(driver)
        # All tasks have one profile: planned as its equal, none would keep half of its speed.
        muri.configure(grouping={"min_speed": 0})
        yield muri


def submit(muri: MuriCluster, tasks: str, *options: str) -> int:
    """Submit an array whose tasks leave room for each other."""
    muri.know_profiles()
    mark = "--muri=model=load,batch-size=8,duration=3s"
    return muri.driver.submit("-p", "train", "--gres=gpu:1", f"--array={tasks}", mark, *options, "/home/alice/task.sh")


def records(muri: MuriCluster, array: int) -> dict[int, dict[str, str]]:
    """What Slurm shows of each task that has a record of its own."""
    shown = muri.driver.run("squeue", "-h", "-a", "-r", "-t", "all", "-j", str(array), "-o", "%K %A %T %r").stdout
    lines = (line.split(maxsplit=3) for line in shown.splitlines())
    return {int(task): {"id": own, "state": state, "reason": why} for task, own, state, why in lines}


def wait_running(muri: MuriCluster, array: int, *tasks: int) -> None:
    """Wait until these tasks train."""
    muri.driver.wait_until(
        lambda: all("started" in output(muri, array, task) for task in tasks), f"the start of tasks {tasks} of {array}"
    )


def output(muri: MuriCluster, array: int, task: int) -> str:
    return muri.driver.read(f"/home/alice/slurm-{array}_{task}.out")


def task_of(muri: MuriCluster, array: int, task: int) -> dict[str, str]:
    return muri.driver.job(f"{array}_{task}")  # type: ignore[arg-type]


def wait_ended(muri: MuriCluster, array: int, *tasks: int) -> dict[int, dict[str, str]]:
    for task in tasks:
        muri.driver.wait_state(f"{array}_{task}")  # type: ignore[arg-type]
    return {task: task_of(muri, array, task) for task in tasks}


@on_every_release
def test_four_tasks_share_one_gpu_and_stay_tasks_of_their_array(muri: MuriCluster) -> None:
    muri.driver.write("fails", "2")
    with muri.training():
        array = submit(muri, "0-3")
        after = muri.driver.submit("-p", "train", f"--dependency=afterany:{array}", "--wrap=true")
        muri.cycle()
        wait_running(muri, array, 0, 1, 2, 3)
        (pilot,) = muri.hosts()
        shown = {job["task"]: job for job in muri.queue().values()}
        table = muri.driver.run("muri", "queue").stdout
        told = json.loads(muri.driver.run("muri", "explain", f"{array}_2", "--json").stdout)
        whole = muri.driver.run("muri", "explain", str(array)).stdout
        assert muri.driver.job(after)["JobState"] == "PENDING"
    assert {name: (job["state"], job["group"]) for name, job in shown.items()} == {
        f"{array}_{task}": ("interleaved", pilot) for task in range(4)
    }
    assert all(f"{array}_{task} " in table for task in range(4))
    assert (told["task"], told["group"]) == (f"{array}_2", pilot)
    assert whole.count(f"Job {array}_") == 4
    fields = wait_ended(muri, array, 0, 1, 2, 3)
    assert {task: job["ExitCode"] for task, job in fields.items()} == {0: "0:0", 1: "0:0", 2: "3:0", 3: "0:0"}
    assert {job["ArrayJobId"] for job in fields.values()} == {str(array)}
    for task in range(4):
        lines = output(muri, array, task).split("\n")
        assert lines[0] == f"task {array} {task}"
        assert lines[3:] == [f"finished {task}", f"script ends with {3 if task == 2 else 0}", ""]
    muri.driver.wait_state(after, "COMPLETED")


def test_a_throttle_is_honoured_and_the_rest_follows(muri: MuriCluster) -> None:
    with muri.training():
        array = submit(muri, "0-4%2")
        muri.cycle()
        wait_running(muri, array, 0, 1)
        muri.cycle()
        states = {task: each["state"] for task, each in records(muri, array).items()}
        why = muri.driver.run("muri", "explain", f"{array}_3").stdout
    assert states == {0: "RUNNING", 1: "RUNNING", 2: "PENDING", 3: "PENDING", 4: "PENDING"}
    assert "come after those that have job ids of their own" in why or "at most 2 tasks at once (%2)" in why
    seen: list[int] = []

    def all_ended() -> bool:
        now = [each["state"] for each in records(muri, array).values()]
        seen.append(now.count("RUNNING"))
        return set(now) == {"COMPLETED"}

    with muri.controller():
        muri.driver.wait_until(all_ended, f"the end of array {array}")
    assert max(seen) == 2


def test_scancel_of_one_task_and_of_the_array(muri: MuriCluster) -> None:
    with muri.training():
        array = submit(muri, "0-3")
        muri.cycle()
        wait_running(muri, array, 0, 1, 2, 3)
        muri.driver.run("scancel", f"{array}_3")
        wait_ended(muri, array, 3)
        assert {task: each["state"] for task, each in records(muri, array).items()} == {
            0: "RUNNING", 1: "RUNNING", 2: "RUNNING", 3: "CANCELLED",
        }  # fmt: skip
        (pilot,) = muri.hosts()
        muri.driver.run("scancel", str(array))
        ended = wait_ended(muri, array, 0, 1, 2)
    assert {job["JobState"] for job in ended.values()} == {"CANCELLED"}
    muri.driver.wait_state(pilot)


@on_every_release
def test_tasks_whose_group_dies_run_alone_before_those_that_wait(muri: MuriCluster) -> None:
    """Slurm passes over tasks that stand behind one that it cannot start, and Muri keeps some back."""
    with muri.training():
        array = submit(muri, "0-5")
        muri.cycle()
        wait_running(muri, array, 0, 1, 2, 3)
        (pilot,) = muri.hosts()
    with muri.no_starts(), muri.controller():
        muri.driver.run("scancel", "--signal=KILL", str(pilot), user="root")
        muri.driver.wait_until(
            lambda: all("gres/gpu:1" in task_of(muri, array, task)["TresPerNode"] for task in range(4)),
            "the way back of all members",
        )
    with muri.controller():
        fields = wait_ended(muri, array, *range(6))
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert [fields[task]["Restarts"] for task in range(4)] == ["1"] * 4
    assert all("gres/gpu:1" in fields[task]["TresPerNode"] for task in range(4))


def test_the_last_task_whose_job_id_is_the_arrays_goes_back_alone(muri: MuriCluster) -> None:
    """To most commands that id means every task: the first one has ended when the group dies, and stays so."""
    with muri.training():
        array = submit(muri, "0-2")
        muri.cycle()
        wait_running(muri, array, 0, 1, 2)
        muri.driver.run("scancel", f"{array}_0")
        wait_ended(muri, array, 0)
        (pilot,) = muri.hosts()
        assert records(muri, array)[2]["id"] == str(array)
        muri.driver.run("scancel", "--signal=KILL", str(pilot), user="root")
        muri.driver.wait_until(
            lambda: all(task_of(muri, array, task)["Restarts"] == "1" for task in (1, 2)), "both tasks' way back"
        )
    with muri.controller():
        fields = wait_ended(muri, array, 1, 2)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert task_of(muri, array, 0)["JobState"] == "CANCELLED"


def test_a_drain_leaves_tasks_that_run_in_their_group(muri: MuriCluster) -> None:
    """The array's own id means all its tasks, those in a group included."""
    with muri.training():
        array = submit(muri, "0-6")
        muri.cycle()
        wait_running(muri, array, 0, 1, 2, 3)
        muri.driver.run("muri", "drain", user="root")
        comments = [task_of(muri, array, task)["AdminComment"] for task in range(7)]
    assert ["muri-state" in comment for comment in comments] == [True] * 4 + [False] * 3
    fields = wait_ended(muri, array, *range(7))
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert all(fields[task]["Restarts"] == "0" for task in range(7))


def test_one_task_is_measured_for_all(muri: MuriCluster) -> None:
    """A dry run of the script that does not know its task would fail, and all tasks would run alone."""
    mark = "--muri=model=unknown,batch-size=8"
    array = muri.driver.submit("-p", "train", "--gres=gpu:1", "--array=4-5", mark, "/home/alice/task.sh")
    with muri.controller():
        fields = wait_ended(muri, array, 4, 5)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    store = ("--store", f"{muri.state_dir}/profiles.db")
    listed = json.loads(muri.driver.run("muri", "profile", "list", "--json", *store, user="root").stdout)
    assert [profile["model"] for profile in listed["profiles"]] == ["unknown"]
    assert [output(muri, array, task).count("started") for task in (4, 5)] == [1, 1]


def test_tasks_share_with_other_jobs(muri: MuriCluster) -> None:
    with muri.training():
        array = submit(muri, "7,9%1")
        others = [muri.submit(kind) for kind in STAGES[1:3]]
        muri.cycle()
        muri.wait_grouped(*others)
        wait_running(muri, array, 7)
        (pilot,) = muri.hosts()
        shown = {job["task"] or str(job["job_id"]): job["group"] for job in muri.queue().values()}
    assert shown[f"{array}_7"] == pilot
    assert {shown[str(job)] for job in others} == {pilot}
    assert shown.get(f"{array}_9") is None
    with muri.controller():
        assert {job["JobState"] for job in wait_ended(muri, array, 7, 9).values()} == {"COMPLETED"}
