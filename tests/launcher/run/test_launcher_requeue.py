"""A member whose runtime fails it is requeued: it neither ends as if done, nor runs twice, nor without its GPUs."""

import json
import sys

import pytest
from launcher_harness import Launcher, ends
from polling import until
from requeue_client import SLEEPER, member
from virtual_clock import VirtualClock

from muri.errors import MuriError
from muri.launcher.job.scheduler import MembershipError, load_membership
from muri.launcher.run import command
from muri.launcher.run.client import RuntimeLostError


def requeued(launcher: Launcher) -> list[list[str]]:
    path = launcher.folder / "requeued.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_runtime_that_dies_requeues_its_members(launcher: Launcher) -> None:
    runtime = launcher.threads("101", "102")
    processes = [member(launcher, job, launcher.script(SLEEPER)) for job in ("101", "102")]
    for job in ("101", "102"):
        launcher.says(job)
    runtime.kill()
    assert [ends(process) for process in processes] == [75, 75]
    assert sorted(job for job, _ in requeued(launcher)) == ["101", "102"]
    assert "runtime" in launcher.err("101")
    assert launcher.out("101") == "started\n"


def test_a_thread_whose_pilot_job_is_cancelled_says_so_and_whom_to_cancel(launcher: Launcher) -> None:
    launcher.environment["SLURM_JOB_ID"] = "9"
    runtime = launcher.threads("101")
    process = member(launcher, "101", launcher.script(SLEEPER))
    launcher.says("101")
    runtime.terminate()
    assert ends(process) == 75
    ((job, reason),) = requeued(launcher)
    assert job == "101"
    assert "pilot job 9, which held the GPUs of its group, was cancelled or has reached its time limit" in reason
    assert "to end this job alone: scancel 101" in reason


def test_script_of_another_python_is_no_thread(launcher: Launcher) -> None:
    runtime = launcher.threads("101", "102")
    script = launcher.script("import os; print(os.getpid())")
    assert ends(member(launcher, "101", script)) == 0
    assert ends(member(launcher, "102", script, prefix="/other/environment")) == 0
    assert int(launcher.out("101")) == runtime.pid
    assert int(launcher.out("102")) != runtime.pid
    assert requeued(launcher) == []


@pytest.mark.parametrize(
    ("in_a_group", "code", "out", "jobs"),
    [(False, 0, "ran\n", []), (True, 75, "", ["103"])],
    ids=["another job's variable", "a group that the runtime does not know of"],
)
def test_a_job_that_the_runtime_knows_as_no_member_runs_here_if_the_scheduler_knows_of_no_group_either(
    launcher: Launcher, in_a_group: bool, code: int, out: str, jobs: list[str]
) -> None:
    """As where a member submits a job and Slurm passes the member's environment on to it."""
    launcher.runtime("101")
    assert ends(member(launcher, "103", launcher.script("print('ran')"), expected=in_a_group)) == code
    assert launcher.out("103") == out
    assert [job for job, _ in requeued(launcher)] == jobs


def test_a_run_after_a_requeue_waits_for_the_thread_of_the_run_before_and_keeps_out_of_its_group(
    launcher: Launcher,
) -> None:
    """Slurm has ended the first run's own processes; its script, which does not end at once, is still in the group."""
    launcher.threads("101")
    script = launcher.script("""
        import os, time
        run, said = os.environ.get("SLURM_RESTART_COUNT", "0"), open("runs", "a", buffering=1)
        print("begin", run, file=said)
        while run == "0" and not os.path.exists("over"):
            try:
                while not os.path.exists("over"): time.sleep(0.01)
            except BaseException:
                pass
        print("end", run, file=said)
    """)
    runs = launcher.folder / "runs"
    first = member(launcher, "101", script)
    until(lambda: runs.exists() and "begin 0" in runs.read_text(), "the first run")
    first.kill()
    second = member(launcher, "101", script, MURI_PILOT="", SLURM_JOB_GPUS="0", SLURM_RESTART_COUNT="1")
    log = launcher.folder / "runtime.log"
    until(lambda: "waits for" in log.read_text() or second.poll() is not None, "the second run's question")
    assert "waits for" in log.read_text()
    (launcher.folder / "over").touch()
    assert ends(second) == 0, launcher.err("101")
    began, *_ = runs.read_text().partition("begin 1")
    assert began in {"begin 0\nend 0\n", "begin 0\n"}  # on a slow machine the group has killed it meanwhile
    assert runs.read_text() == f"{began}begin 1\nend 1\n"
    assert requeued(launcher) == []


def test_member_without_runtime_is_requeued_and_never_run_here(launcher: Launcher) -> None:
    launcher.give_grant()
    assert ends(member(launcher, "101", launcher.script("print('ran')"))) == 75
    assert launcher.out("101") == ""
    assert requeued(launcher) == [["101", "the runtime of pilot job 0 did not come within 0.5 s"]]


@pytest.mark.parametrize("variables", [{}, {"MURI_PILOT": "../900"}], ids=["none", "no job's number"])
def test_member_without_a_grant_is_requeued_and_never_run_here(launcher: Launcher, variables: dict[str, str]) -> None:
    launcher.runtime("101")
    launcher.grant = variables
    assert ends(member(launcher, "101", launcher.script("print('ran')"))) == 75
    assert launcher.out("101") == ""
    ((job, reason),) = requeued(launcher)
    assert job == "101"
    assert "job 101 is in the group, whose GPUs Muri's SPANK plugin has not opened for it here" in reason


@pytest.mark.parametrize(
    ("grant", "code", "out", "jobs"),
    [({"MURI_PILOT": "0"}, 75, "", ["101"]), ({}, 0, "ran\n", [])],
    ids=["member", "no member"],
)
def test_where_others_can_enter_the_run_dir_a_member_is_requeued_and_any_other_job_runs_alone(
    launcher: Launcher, grant: dict[str, str], code: int, out: str, jobs: list[str]
) -> None:
    launcher.grant = grant
    launcher.run_dir.chmod(0o777)
    assert ends(member(launcher, "101", launcher.script("print('ran')"), expected=bool(grant))) == code
    launcher.run_dir.chmod(0o700)
    assert [job for job, _ in requeued(launcher)] == jobs
    assert ("chmod 700" in launcher.err("101")) == bool(grant)
    assert launcher.out("101") == out


def test_only_a_job_that_asked_for_muri_and_sees_no_gpu_may_be_a_member() -> None:
    for value in ("", "NoDevFiles", "-1"):
        assert command.may_be_member({"MURI_JOB": "on", "CUDA_VISIBLE_DEVICES": value})
    assert not command.may_be_member({"MURI_JOB": "", "CUDA_VISIBLE_DEVICES": ""})
    for seen in ({"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}, {"SLURM_JOB_GPUS": "1"}, {"SLURM_STEP_GPUS": "0"}):
        assert not command.may_be_member({"MURI_JOB": "on", **seen})


class Refusing:
    """Refuses a number of requeues."""

    def __init__(self, times: int, *, for_good: bool = False) -> None:
        self._left = times
        self._for_good = for_good

    def requeue(self, job_id: str, reason: str) -> None:
        if self._left:
            self._left -= 1
            error = MuriError("slurmctld is away")
            error.worth_retrying = not self._for_good
            raise error


@pytest.mark.parametrize(
    ("membership", "message", "waited_s"),
    [
        (Refusing(6), "gone; and the job could not be requeued: slurmctld is away", 1 + 2 + 4 + 8 + 16),
        (Refusing(1, for_good=True), "gone; and the job could not be requeued: slurmctld is away", 0),
        (Refusing(5), "gone; job 101 was requeued but this process was not ended", 1 + 2 + 4 + 8 + 16 + 60),
        (Refusing(0), "gone; job 101 was requeued but this process was not ended", 60),
    ],
)
def test_refused_requeue_is_tried_again_and_then_told(membership: Refusing, message: str, waited_s: float) -> None:
    clock = VirtualClock()
    with pytest.raises(RuntimeLostError, match=message) as caught:
        command.give_up("101", RuntimeLostError("gone"), lambda: membership, clock)
    assert caught.value.exit_code == 75
    assert clock() == waited_s


def test_a_broken_slurm_part_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "muri.slurm_plugin.node.membership", None)
    with pytest.raises(MembershipError, match=r"cannot be used: import of muri\.slurm_plugin"):
        load_membership()
    with pytest.raises(RuntimeLostError, match="gone; and the job could not be requeued: Muri's Slurm part"):
        command.give_up("101", RuntimeLostError("gone"), load_membership)
