"""Members of a group: saved and stopped, joining, leaving; the others never notice."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_scripts import TRAIN, lines
from group_words import runtime_words
from launcher_harness import Launcher, ends
from polling import until

STOPPED = 128 + signal.SIGTERM
SLOW_S = "0.4"
"""Pause of each of 30 iterations: a script that is to be stopped in between ends too soon on no machine."""

STEPS = """
    import sys, time, muri
    for step in muri.batches(range(int(sys.argv[1]))):
        with muri.stage("propagate"):
            time.sleep(0.01)
        if step == 0:
            print("started", flush=True)
    print("finished", flush=True)
"""

RUNTIME = """
    import functools, os, sys
    from muri.group_spec import MemberSpec, Place
    from muri.launcher.runtime import admission, main

    class Scheduler:
        def place_of(self, job_id):
            path = "host_of_" + job_id
            return Place(open(path).read(), MemberSpec(job_id)) if os.path.exists(path) else None

    main.AdmissionControl = functools.partial(admission.AdmissionControl, membership=Scheduler)
    main.main()
"""

JOINER = """
    import sys
    from muri.commands import run_command
    from muri.group_spec import MemberSpec, Place
    from muri.launcher.run import command

    class Scheduler:
        def await_place(self, job_id):
            return Place("900", MemberSpec(job_id))

        def requeue(self, job_id, reason):
            print("requeued:", reason, flush=True)

    command.load_membership = Scheduler
    sys.exit(run_command(command.run))
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_stopped_member_resumes_in_a_group_with_the_same_loss(launcher, uninterrupted_curve, isolation):
    launcher.runtime("101", "102", options=("--isolation", isolation))
    partner = launcher.member("102", launcher.script(STEPS, "steps.py"), 700)
    until(lambda: "started" in launcher.out("102"), "the partner")
    script, path = launcher.script(TRAIN), launcher.folder / "101.curve"
    variables = {"MURI_CHECKPOINT_DIR": str(launcher.folder / "101.checkpoints"), "PAUSE_S": SLOW_S}
    member = launcher.member("101", script, path, 0, **variables)
    until(lambda: len(lines(path)) >= 4, "the first iterations")
    until(lambda: launcher.status()["members"]["101"]["state"] == "running", "the status to tell of the script")
    if isolation == "thread":
        until(lambda: launcher.status()["members"]["101"]["checkpoint"], "the status to tell of the checkpoint")
    member.terminate()
    assert ends(member) == STOPPED
    stopped_at = len(lines(path))
    assert 4 <= stopped_at < 30
    assert f"saved at iteration {stopped_at}" in launcher.err("101")
    assert ends(launcher.member("101", script, path, 0, **variables | {"PAUSE_S": "0"})) == 0
    assert lines(path) == uninterrupted_curve
    assert f"started at {stopped_at}" in launcher.out("101")
    assert partner.poll() is None or "finished" in launcher.out("102")
    assert ends(partner) == 0


STOPPER = """
    import sys
    from muri.commands import run_command
    from muri.group_spec import MemberSpec, Place
    from muri.launcher.run import command
    from muri.launcher.checkpoints import stopping

    def requeue_stopped(job_id, run):
        if state == "runs":
            print("requeued", job_id, "after run", run, flush=True)
        return state == "runs"

    state = sys.argv.pop(1)
    stopping.requeue_stopped = requeue_stopped
    sys.exit(run_command(command.run))
"""


@pytest.mark.parametrize(("state", "mark"), [("runs", "checkpoint=1"), ("ending", "checkpoint=1"), ("runs", "on")])
def test_only_a_job_that_slurm_is_not_ending_anyway_is_requeued(launcher, state, mark):
    launcher.threads("101")
    script, stopper = launcher.script(TRAIN), launcher.script(STOPPER, "stopper.py")
    path = launcher.folder / "101.curve"
    variables = {"MURI_CHECKPOINT_DIR": str(launcher.folder / "c"), "PAUSE_S": SLOW_S, "SLURM_RESTART_COUNT": "2"}
    variables |= {"SLURM_JOB_ID": "101", "MURI_JOB": f"model=m,{mark}", "MURI_REQUEUE_WAIT_S": "0.1"}
    streams = {"stdout": launcher.path("101", "out").open("ab"), "stderr": launcher.path("101", "err").open("ab")}
    command = [sys.executable, str(stopper), state, str(script), str(path), "0"]
    member = launcher.spawn(command, launcher.environment | variables, cwd=launcher.folder, **streams)
    until(lambda: len(lines(path)) >= 3, "the first iterations")
    member.send_signal(signal.SIGUSR1)
    assert ends(member) == STOPPED
    wanted = (state, mark) == ("runs", "checkpoint=1")
    assert ("requeued 101 after run 2" in launcher.out("101")) == wanted, launcher.err("101")


def test_a_killed_process_leaves_a_checkpoint_behind(launcher, uninterrupted_curve):
    """Slurm kills what does not end in time; in a group the script can be saved after that."""
    launcher.threads("101")
    script, path = launcher.script(TRAIN), launcher.folder / "101.curve"
    variables = {"MURI_CHECKPOINT_DIR": str(launcher.folder / "101.checkpoints"), "PAUSE_S": SLOW_S}
    member = launcher.member("101", script, path, 0, **variables)
    until(lambda: len(lines(path)) >= 4, "the first iterations")
    member.kill()
    until(lambda: launcher.status()["members"]["101"]["state"] == "ended", "the end of the script")
    assert ends(launcher.member("101", script, path, 0, **variables | {"PAUSE_S": "0"})) == 0
    assert lines(path) == uninterrupted_curve


def test_the_runtimes_end_saves_members_that_have_a_checkpoint(launcher, uninterrupted_curve):
    runtime = launcher.threads("101")
    script, path = launcher.script(TRAIN), launcher.folder / "101.curve"
    variables = {"MURI_CHECKPOINT_DIR": str(launcher.folder / "101.checkpoints"), "PAUSE_S": SLOW_S}
    member = launcher.member("101", script, path, 0, MURI_REQUEUE_WAIT_S="0.1", **variables)
    until(lambda: len(lines(path)) >= 4, "the first iterations")
    runtime.terminate()
    assert ends(member) != 0
    assert ends(runtime) == 0
    assert ends(launcher.member(None, script, path, 0, **variables | {"PAUSE_S": "0"})) == 0
    assert lines(path) == uninterrupted_curve


def joinable_runtime(launcher: Launcher, *members: str):
    """A runtime of pilot job 900 that asks a scheduler of the test's own whom it may admit."""
    wrapper = launcher.script(RUNTIME, "runtime_of_900.py")
    command = [sys.executable, str(wrapper), "--preload", ""]
    command += ["--status-file", str(launcher.status_path), *runtime_words(members, ("--discipline", "fair"))]
    process = launcher.spawn(
        command,
        launcher.environment | {"SLURM_JOB_ID": "900"},
        stderr=(launcher.folder / "runtime.log").open("wb"),
        cwd=launcher.folder,
    )
    until(lambda: process.poll() is not None or launcher._serves(process.pid), "the runtime")
    return process


def group_at_work(launcher: Launcher, iterations: int) -> tuple[Path, "subprocess.Popen[bytes]"]:
    """A runtime that can be joined, with one member at work: its script and its process."""
    joinable_runtime(launcher, "101")
    steps = launcher.script(STEPS, "steps.py")
    first = launcher.member("101", steps, iterations)
    until(lambda: "started" in launcher.out("101"), "the first member")
    return steps, first


def joiner(launcher: Launcher, job_id: str, *arguments: object):
    script = launcher.script(JOINER, "joiner.py")
    variables = {"SLURM_JOB_ID": job_id, "MURI_JOB": "on", "MURI_REQUEUE_WAIT_S": "0.1", "MURI_ATTACH_TIMEOUT_S": "5"}
    streams = {"stdout": launcher.path(job_id, "out").open("ab"), "stderr": launcher.path(job_id, "err").open("ab")}
    command = [sys.executable, str(script), *map(str, arguments)]
    return launcher.spawn(command, launcher.environment | variables, cwd=launcher.folder, **streams)


def test_a_job_that_the_controller_declared_joins_a_group_at_work(launcher):
    steps, first = group_at_work(launcher, 400)
    (launcher.folder / "host_of_102").write_text("900")
    second = joiner(launcher, "102", steps, 20)
    assert ends(second) == 0
    assert launcher.out("102") == "started\nfinished\n"
    assert first.poll() is None
    until(lambda: launcher.status()["members"]["102"]["state"] == "ended", "the status to know the new member")
    assert launcher.status()["members"]["101"]["state"] == "running"
    assert ends(first) == 0


def test_a_job_that_nobody_declared_is_not_admitted(launcher):
    steps, first = group_at_work(launcher, 200)
    (launcher.folder / "host_of_103").write_text("901")
    stranger = joiner(launcher, "103", steps, 20)
    assert ends(stranger) == 75
    assert "requeued: the group's runtime refused the script: job 103 is no member of this group" in launcher.out("103")
    assert "103" not in launcher.status()["members"]
    assert ends(first) == 0


@pytest.mark.parametrize("how", ["cancel", "fail", "finish"])
def test_a_joined_member_leaves_in_any_way_and_the_others_run_on(launcher, how):
    steps, first = group_at_work(launcher, 300)
    failing = launcher.script(STEPS + "    sys.exit(7)\n", "failing.py")
    (launcher.folder / "host_of_102").write_text("900")
    second = joiner(launcher, "102", failing if how == "fail" else steps, 3000 if how == "cancel" else 10)
    until(lambda: "started" in launcher.out("102"), "the new member")
    if how == "cancel":
        second.terminate()
    assert ends(second) == {"cancel": STOPPED, "fail": 7, "finish": 0}[how]
    assert ends(first) == 0
    assert launcher.out("101") == "started\nfinished\n"
    assert json.loads(launcher.status_path.read_text())["members"]["101"]["exit_code"] in {None, 0}
