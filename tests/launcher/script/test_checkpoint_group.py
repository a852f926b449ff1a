"""Members of a group: saved and stopped, joining, leaving; the others never notice."""

import signal
import sys

import pytest
from checkpoint_scripts import TRAIN, lines
from group_words import runtime_words
from launcher_harness import Launcher, Process, ends
from polling import until

from muri.launcher.script.checkpoint import wants_requeue

STOPPED = 128 + signal.SIGTERM
WAITS_AT = 4
"""After this iteration a script waits until it is asked to stop."""

STEPS = """
    import os, sys, time, muri
    for step in muri.batches(range(10**9)):
        with muri.stage("propagate"):
            time.sleep(0.01)
        if step == 0:
            print("started", flush=True)
        if os.path.exists(sys.argv[1]):
            break
    print("finished", flush=True)
"""
"""Goes on until there is a file."""

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

CLIENT = """
    import os, sys
    from muri.commands import run_command
    from muri.group_spec import MemberSpec, Place
    from muri.launcher.job import scheduler
    from muri.launcher.run import command

    class Scheduler:
        def await_place(self, job_id):
            return Place("900" if os.path.exists("host_of_" + job_id) else "", MemberSpec(job_id))

        def runs(self, job_id):
            return True

    def ask_slurm(what, job_id, run, environment=None):
        if (what, state) == ("requeue-stopped", "runs"):
            print("requeued", job_id, "after run", run, flush=True)
        return state == "runs"

    state = sys.argv.pop(1)
    command.load_membership, scheduler.ask_slurm = Scheduler, ask_slurm
    sys.exit(run_command(command.run))
"""
"""`muri run` with Slurm's answers made up: the first argument is the state of its job."""


def client(launcher: Launcher, job_id: str, *arguments: object, state: str = "runs", **variables: str) -> Process:
    command = [sys.executable, launcher.script(CLIENT, "client.py"), state, *arguments]
    environment = launcher.environment | {"SLURM_JOB_ID": job_id, "MURI_JOB": "on", "MURI_REQUEUE_WAIT_S": "0.1"}
    environment |= launcher.grant
    return launcher.start(job_id, command, environment | variables)


class Training:
    """A member with checkpoints that waits in the middle of its training until it is asked to stop."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.path = launcher.folder / "101.curve"
        self.words = (launcher.script(TRAIN), self.path, 0)
        self.place = {"MURI_CHECKPOINT_DIR": str(launcher.folder / "checkpoints"), "MURI_REQUEUE_WAIT_S": "0.1"}
        self.variables = self.place | {"WAITS_AT": str(WAITS_AT)}

    def member(self) -> Process:
        """Start it, and wait until it waits."""
        process = self.launcher.member("101", *self.words, **self.variables)
        self.until_it_waits()
        return process

    def until_it_waits(self) -> None:
        until(lambda: len(lines(self.path)) >= WAITS_AT, "the first iterations")

    def resumed(self, job_id: str | None = "101") -> list[str]:
        """The loss curve once another run of it has come to its end."""
        assert f"started at {WAITS_AT}" in self.launcher.ran(job_id, *self.words, **self.place)
        return lines(self.path)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_stopped_member_resumes_with_the_same_loss_and_its_partner_goes_on(launcher, uninterrupted_curve, isolation):
    launcher.runtime("101", "102", options=("--isolation", isolation))
    partner = launcher.member("102", launcher.script(STEPS, "steps.py"), launcher.folder / "over")
    launcher.says("102")
    training = Training(launcher)
    member = training.member()
    if isolation == "thread":
        until(lambda: launcher.status()["members"]["101"]["checkpoint"], "the status to tell of the checkpoint")
    member.terminate()
    assert ends(member) == STOPPED
    assert f"saved at iteration {WAITS_AT}" in launcher.err("101")
    assert training.resumed(None) == uninterrupted_curve
    assert partner.poll() is None
    (launcher.folder / "over").touch()
    assert ends(partner) == 0


@pytest.mark.parametrize(("state", "mark"), [("runs", "checkpoint=1"), ("ending", "checkpoint=1"), ("runs", "on")])
def test_only_a_job_that_slurm_is_not_ending_anyway_is_requeued(launcher, state, mark):
    launcher.threads("101")
    training = Training(launcher)
    variables = training.variables | {"SLURM_RESTART_COUNT": "2", "MURI_JOB": f"model=m,{mark}"}
    member = client(launcher, "101", *training.words, state=state, **variables)
    training.until_it_waits()
    member.send_signal(signal.SIGUSR1)
    assert ends(member) == STOPPED
    wanted = (state, mark) == ("runs", "checkpoint=1")
    assert ("requeued 101 after run 2" in launcher.out("101")) == wanted, launcher.err("101")


@pytest.mark.parametrize(
    ("mark", "wanted"),
    [("on", False), ("model=m,checkpoint=1", True), ("checkpoint", True), ("alone,checkpoint=YES", True),
     ("checkpoint=no", False), ("model=checkpoint", False)],
)  # fmt: skip
def test_the_option_is_understood_as_job_submit_writes_it_and_as_a_step_has_it(mark, wanted):
    assert wants_requeue({"MURI_JOB": mark}) == wanted


@pytest.mark.parametrize("ended", ["its own process, by Slurm", "the runtime"])
def test_a_member_that_is_ended_from_outside_leaves_a_checkpoint_behind(launcher, uninterrupted_curve, ended):
    """Slurm kills what does not end in time; in a group the script can be saved after that."""
    runtime = launcher.threads("101")
    training = Training(launcher)
    member = training.member()
    if ended == "the runtime":
        runtime.terminate()
        assert ends(member) != 0
        assert ends(runtime) == 0
        assert training.resumed(None) == uninterrupted_curve
    else:
        member.kill()
        until(lambda: launcher.status()["members"]["101"]["state"] == "ended", "the end of the script")
        assert training.resumed() == uninterrupted_curve


@pytest.mark.parametrize(("how", "code"), [("cancel", -signal.SIGTERM), ("fail", 7), ("finish", 0)])
def test_a_job_joins_a_group_at_work_and_leaves_in_any_way_and_the_others_run_on(launcher, how, code):
    command = [sys.executable, launcher.script(RUNTIME, "runtime.py"), "--preload", ""]
    command += ["--status-file", launcher.status_path, *runtime_words(["101"], ("--discipline", "fair"))]
    runtime = launcher.start("runtime", command, launcher.environment | {"SLURM_JOB_ID": "900"})
    launcher.grant = {"MURI_PILOT": "900"}
    until(lambda: runtime.poll() is not None or launcher.status_path.exists(), "the runtime")
    steps, over, its_end = launcher.script(STEPS, "steps.py"), launcher.folder / "over", launcher.folder / "end_of_102"
    first = launcher.member("101", steps, over)
    launcher.says("101")
    (launcher.folder / "host_of_102").write_text("900")
    failing = launcher.script(STEPS + "    sys.exit(7)\n", "failing.py")
    second = client(launcher, "102", failing if how == "fail" else steps, its_end)
    launcher.says("102")
    until(lambda: "102" in launcher.status()["members"], "the status to know the new member")
    second.terminate() if how == "cancel" else its_end.touch()
    assert ends(second) == code
    assert ("finished" in launcher.out("102")) == (how != "cancel")
    until(lambda: launcher.status()["members"]["102"]["state"] == "ended", "the status to know its end")
    assert first.poll() is None
    until(lambda: launcher.status()["members"]["101"]["state"] == "running", "the status to tell of it")
    over.touch()
    assert ends(first) == 0
    assert launcher.out("101") == "started\nfinished\n"
