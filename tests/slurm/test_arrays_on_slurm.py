"""Job arrays on a real Slurm: tasks are members like other jobs, and each stays a task of its array."""

import json
from collections.abc import Sequence

import pytest
from muri_cluster import DRY_RUNS, MuriCluster
from sandboxes import on_both_releases

#: Each task has another slow stage; the task that is named fails.
TASK_PY = """\
import os, sys, time
import muri

task = int(os.environ["SLURM_ARRAY_TASK_ID"])
print("task", os.environ["SLURM_ARRAY_JOB_ID"], task, flush=True)
print("started", os.environ["SLURM_JOB_ID"], flush=True)
stages = ("load", "preprocess", "propagate", "synchronize")
step = 0
while step < 5 or os.path.exists(os.path.expanduser("~/keep-training")):
    step += 1
    for stage in stages:
        with muri.stage(stage):
            time.sleep(0.07 if stage == stages[task % 4] else 0.01)
print("finished", task, flush=True)
sys.exit(3 if sys.argv[1:] == [str(task)] else 0)
"""


@pytest.fixture
def muri(muri: MuriCluster) -> MuriCluster:
    muri.script("task", TASK_PY)
    # All tasks have one profile: planned as its equal, none would keep half of its speed.
    muri.configure(grouping={"min_speed": 0})
    return muri


def submit(muri: MuriCluster, tasks: str, *words: str, options: Sequence[str] = ("-p", "train")) -> int:
    """Submit an array whose tasks leave room for each other."""
    muri.know_profiles()
    mark = "--muri=model=load,batch-size=8,duration=3s"
    return muri.driver.submit(*options, "--gres=gpu:1", f"--array={tasks}", mark, "/home/alice/task.sh", *words)


def records(muri: MuriCluster, array: int) -> dict[int, dict[str, str]]:
    """What Slurm shows of each task."""
    shown = muri.driver.run("squeue", "-h", "-a", "-r", "-t", "all", "-j", str(array), "-o", "%K %A %T").stdout
    lines = (line.split() for line in shown.splitlines())
    return dict(sorted((int(task), {"id": own, "state": state}) for task, own, state in lines))


def wait_running(muri: MuriCluster, array: int, *tasks: int) -> None:
    """Wait until these tasks train."""
    muri.driver.wait_until(
        lambda: all("started" in output(muri, array, task) for task in tasks), f"the start of tasks {tasks} of {array}"
    )


def output(muri: MuriCluster, array: int, task: int) -> str:
    return muri.driver.read(f"/home/alice/slurm-{array}_{task}.out")


def wait_ended(muri: MuriCluster, array: int, *tasks: int) -> dict[int, dict[str, str]]:
    return {task: muri.driver.wait_state(f"{array}_{task}") for task in tasks}


def start(muri: MuriCluster, tasks: str, *words: str) -> tuple[int, int]:
    """Start an array whose first tasks share the GPU, and which the test keeps at work; its id and the pilot's."""
    array = submit(muri, tasks, *words)
    muri.cycle()
    wait_running(muri, array, *range(min(4, int(tasks[-1]) + 1)))
    (pilot,) = muri.pilots()
    return array, pilot


@on_both_releases
def test_four_tasks_share_one_gpu_and_stay_tasks_of_their_array(muri: MuriCluster) -> None:
    with muri.training():
        array, pilot = start(muri, "0-3", "2")
        after = muri.driver.submit("-p", "train", f"--dependency=afterany:{array}", "--wrap=true")
        shown = {job["task"]: job for job in muri.queue().values()}
        table = muri.driver.run("muri", "queue").stdout
        told = json.loads(muri.explain(f"{array}_2", "--json"))
        whole = muri.explain(array)
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
        assert (lines[0], lines[2:]) == (f"task {array} {task}", [f"finished {task}", ""])
    muri.driver.wait_state(after, "COMPLETED")


@pytest.mark.thorough
def test_a_throttle_is_honored_and_the_rest_follows(muri: MuriCluster) -> None:
    with muri.training():
        array = submit(muri, "0-3%2")
        muri.cycle()
        wait_running(muri, array, 0, 1)
        muri.cycle()
        states = [each["state"] for each in records(muri, array).values()]
        why = muri.explain(f"{array}_3")
    assert states == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    assert "come after those that have job ids of their own" in why or "at most 2 tasks at once (%2)" in why

    def all_ended() -> bool:
        now = [each["state"] for each in records(muri, array).values()]
        assert now.count("RUNNING") <= 2
        return set(now) == {"COMPLETED"}

    with muri.controller():
        muri.driver.wait_until(all_ended, f"the end of array {array}")


def test_scancel_of_one_task_and_of_the_array(muri: MuriCluster) -> None:
    with muri.training():
        array, pilot = start(muri, "0-3")
        muri.driver.run("scancel", f"{array}_3")
        wait_ended(muri, array, 3)
        assert [each["state"] for each in records(muri, array).values()] == ["RUNNING"] * 3 + ["CANCELLED"]
        muri.driver.run("scancel", str(array))
        ended = wait_ended(muri, array, 0, 1, 2)
    assert {job["JobState"] for job in ended.values()} == {"CANCELLED"}
    muri.driver.wait_state(pilot)


@on_both_releases
def test_tasks_whose_group_dies_run_alone_before_those_that_wait(muri: MuriCluster) -> None:
    """Slurm passes over tasks that stand behind one that it cannot start, and Muri keeps some back."""
    with muri.training():
        array, pilot = start(muri, "0-5")
        muri.kill_pilot(pilot, *(f"{array}_{task}" for task in range(4)))
    with muri.controller():
        fields = wait_ended(muri, array, *range(6))
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert [fields[task]["Restarts"] for task in range(4)] == ["1"] * 4
    assert all("gres/gpu:1" in fields[task]["TresPerNode"] for task in range(4))


@pytest.mark.thorough
def test_the_last_task_whose_job_id_is_the_arrays_goes_back_alone(muri: MuriCluster) -> None:
    """To most commands that id means every task: the first one has ended when the group dies, and stays so."""
    with muri.training():
        array, pilot = start(muri, "0-2")
        muri.driver.run("scancel", f"{array}_0")
        wait_ended(muri, array, 0)
        assert records(muri, array)[2]["id"] == str(array)
        muri.kill_pilot(pilot, f"{array}_1", f"{array}_2")
    with muri.controller():
        fields = wait_ended(muri, array, 0, 1, 2)
    assert [job["JobState"] for job in fields.values()] == ["CANCELLED", "COMPLETED", "COMPLETED"]
    assert [job["Restarts"] for job in fields.values()] == ["0", "1", "1"]


def test_a_drain_leaves_tasks_that_run_in_their_group(muri: MuriCluster) -> None:
    """The array's own id means all its tasks, those in a group included."""
    with muri.training():
        array, _ = start(muri, "0-5")
        muri.driver.run("muri", "drain", user="root")
        comments = [muri.driver.job(f"{array}_{task}")["AdminComment"] for task in range(6)]
    assert ["muri-state" in comment for comment in comments] == [True] * 4 + [False] * 2
    fields = wait_ended(muri, array, *range(6))
    assert {(job["JobState"], job["Restarts"]) for job in fields.values()} == {("COMPLETED", "0")}


@DRY_RUNS
@pytest.mark.thorough
def test_one_task_is_measured_for_all(muri: MuriCluster) -> None:
    """A dry run of the script that does not know its task would fail, and all tasks would run alone."""
    mark = "--muri=model=unknown,batch-size=8"
    array = muri.driver.submit("-p", "train", "--gres=gpu:1", "--array=4-5", mark, "/home/alice/task.sh")
    with muri.training(), muri.controller():
        muri.driver.wait_until(lambda: muri.models().keys() == {"unknown"}, "the measurement")
        wait_running(muri, array, 4, 5)
    fields = wait_ended(muri, array, 4, 5)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert [output(muri, array, task).count("started") for task in (4, 5)] == [1, 1]


def places(muri: MuriCluster, *options: str) -> dict[str, tuple[int, int]]:
    """Priority and nice value of alice's records that wait or run, by Slurm's name."""
    shown = muri.driver.run(
        "squeue", "-h", "-r", "-u", "alice", "-O", "JobArrayID:60,PriorityLong:20,Nice:20", *options
    ).stdout
    return {name: (int(priority), int(nice)) for name, priority, nice in map(str.split, shown.splitlines())}


@pytest.mark.thorough
@on_both_releases
def test_an_array_that_its_user_requeues_never_stands_before_an_older_job(muri: MuriCluster) -> None:
    older = muri.driver.submit("-p", "train", "--gres=gpu:1", "--hold", "--wrap=exec sleep 600", user="bob")
    seen: set[tuple[int, int]] = set()

    def requeued() -> bool:
        """Put what runs back into the queue; whether there was any."""
        # A pilot job is held until it has its mark; a task never is.
        seen.update(place for name, place in places(muri).items() if "_" in name or place != (0, 0))
        running = [f"{array}_{task}" for task, each in records(muri, array).items() if each["state"] == "RUNNING"]
        return bool(running) and muri.driver.run("scontrol", "requeue", ",".join(running)).returncode == 0

    with muri.training(), muri.controller():
        array = submit(muri, "0-9", options=("-p", "train", "--requeue"))
        for _ in range(3):
            muri.driver.wait_until(requeued, "tasks at work")
        muri.driver.run("scontrol", "release", str(older), user="bob")
        muri.driver.wait_until(
            lambda: not requeued() and muri.driver.job(older)["JobState"] == "RUNNING", "the start of the older job"
        )
    assert seen == {(1, 0)}  # as Slurm has it without Muri
    muri.driver.run("scancel", str(older), user="bob")
    with muri.controller():
        fields = wait_ended(muri, array, *range(10))
    assert {(job["JobState"], job["Nice"]) for job in fields.values()} == {("COMPLETED", "0")}


@pytest.mark.thorough
@pytest.mark.parametrize("one_gpu", ["accounting_sandbox"], indirect=True)
def test_those_that_wait_for_muri_stand_back_and_get_their_users_nice_value_again(muri: MuriCluster) -> None:
    """Priorities follow age and fair share: the requeued task has less of the former than its siblings."""
    muri.configure(partitions=["on1"], grouping={"max_group_size": 1})
    with muri.controller():
        with muri.training():
            array = submit(muri, "0-5", options=("-p", "on1", "--nice=7"))
            wait_running(muri, array, 0, 1)
            muri.driver.run("scontrol", "requeue", f"{array}_0")

            def stand_back() -> bool:
                kept = places(muri, "-t", "PD")
                priority, nice = kept.pop(f"{array}_0", (0, 0))
                return bool(kept) and nice == 7 and all(each[0] < priority and each[1] > 7 for each in kept.values())

            muri.driver.wait_until(stand_back, "tasks that stand back")
        fields = wait_ended(muri, array, *range(6))
    assert {(job["JobState"], job["Nice"]) for job in fields.values()} == {("COMPLETED", "7")}
    assert not any("muri-place" in job["AdminComment"] for job in fields.values())
