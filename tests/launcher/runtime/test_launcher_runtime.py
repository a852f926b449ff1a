"""Real members in a real runtime: what each must have for itself, and how it ends."""

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from group_words import runtime_words
from launcher_harness import LOOP, Launcher, ends
from polling import DEADLINE_S, until
from two_members import run_both

from examples.demo.timeline import read_slices
from muri.errors import UsageError
from muri.launcher.runtime.main import cpus_of, read_options


def test_argv_directory_environment_umask_and_path_are_the_members(launcher: Launcher) -> None:
    text = """
        import json, os, sys, threading
        os.environ["ADDED"] = sys.argv[1]
        other = os.getcwd()
        os.chdir("inner")
        seen = []
        thread = threading.Thread(target=lambda: seen.append([os.getcwd(), sys.argv[1], os.getenv("ADDED")]))
        thread.start(); thread.join()
        umask = os.umask(0)
        print(json.dumps([sys.argv, other, seen, os.environ["OWN"], sys.path[0], __name__, umask,
                          sys.modules["__main__"].json is json, "SLURM_JOB_ID" in os.environ,
                          os.environ["CUDA_VISIBLE_DEVICES"]]))
    """
    launcher.environment["CUDA_VISIBLE_DEVICES"] = "3"  # the GPU is that of the group
    launcher.threads("101", "102")
    for job in ("101", "102"):
        script = launcher.script(text, folder=f"home{job}")
        (script.parent / "inner").mkdir()
        variables = {"OWN": f"own{job}", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}
        process = launcher.member(job, script.name, f"--{job}", "x y", cwd=script.parent, **variables)
        assert ends(process) == 0, launcher.err(job)
        home = str(script.parent)
        seen = [[f"{home}/inner", f"--{job}", f"--{job}"]]
        argv = ["train.py", f"--{job}", "x y"]
        umask = os.umask(0o022)
        os.umask(umask)
        own = [argv, home, seen, f"own{job}", home, "__main__", umask, True, True, "3"]
        assert json.loads(launcher.out(job)) == own


def test_modules_run_with_dash_m(launcher: Launcher) -> None:
    package = launcher.script("", "__init__.py", folder="package").parent
    (package / "__main__.py").write_text("import sys; print(__spec__.name, __package__, sys.argv)")
    launcher.threads("101")
    assert (
        launcher.ran("101", "-m", "package", "--lr", "1")
        == f"package.__main__ package ['{package}/__main__.py', '--lr', '1']\n"
    )
    assert ends(launcher.member("101", "-m", "no_such_module")) == 2
    assert "no_such_module" in launcher.err("101")


def test_redirected_output_stays_within_the_member(launcher: Launcher) -> None:
    code = """
        import contextlib, io
        text = io.StringIO()
        with contextlib.redirect_stdout(text if me == "101" else sys.stdout):
            meet("redirected")
            print(me)
            meet("printed")
        print("after", repr(text.getvalue()))
    """
    assert run_both(launcher, code) == ("after '101\\n'\n", "102\nafter ''\n")


CLEANS_UP = """
    import muri
    print("started")
    try:
        while True:
            with muri.stage("propagate"):
                sum(range(1000))
    finally:
        print("clean-up")
"""
SWALLOWS = """
    import time
    print("started")
    for attempt in range(3):
        try:
            time.sleep(600)
        except BaseException:
            print("swallowed")
        while attempt == 0:
            try:
                while True: sum(range(1000))
            except SystemExit:
                print("again"); raise
"""
SIGNALLED = {
    "101": (CLEANS_UP, signal.SIGTERM, 143, "clean-up\n"),
    "102": (CLEANS_UP, signal.SIGINT, 130, "clean-up\n"),
    "103": (CLEANS_UP, signal.SIGUSR1, 138, "clean-up\n"),
    "104": (SWALLOWS, signal.SIGTERM, 143, "swallowed\nagain\n"),
}


def test_a_signal_ends_the_script_and_nobody_else(launcher: Launcher) -> None:
    launcher.threads(*SIGNALLED, "105")
    members = {job: launcher.member(job, launcher.script(SIGNALLED[job][0], f"{job}.py")) for job in SIGNALLED}
    other = launcher.member("105", launcher.script(LOOP, "loop.py"), 100)
    for job, (_, number, code, said) in SIGNALLED.items():
        launcher.says(job)
        members[job].send_signal(number)
        assert ends(members[job]) == code, job
        assert launcher.out(job) == f"started\n{said}"
    assert ends(other) == 0


DEAF = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
from muri.cli import main
main()
"""


def test_a_signal_that_the_job_ignores_or_blocks_does_not_reach_its_thread(launcher: Launcher) -> None:
    launcher.threads("101")
    member = launcher.member("101", launcher.script(CLEANS_UP), command=(sys.executable, "-c", DEAF, "run"))
    launcher.says("101")
    for number in (signal.SIGHUP, signal.SIGUSR1):
        member.send_signal(number)
    time.sleep(1.0)
    assert member.poll() is None
    member.terminate()
    assert ends(member) == 143


@pytest.mark.parametrize("discipline", [pytest.param("fair", marks=pytest.mark.thorough), "lockstep"])
def test_client_that_is_killed_cancels_its_session_only(launcher: Launcher, discipline: str) -> None:
    launcher.threads("101", "102", options=("--discipline", discipline))
    script = launcher.script(LOOP)
    victim, other = launcher.member("101", script, 100_000), launcher.member("102", script, 400)
    until(lambda: "started" in launcher.out("101") and "started" in launcher.out("102"), "both scripts")
    victim.kill()
    until(lambda: launcher.status()["members"]["101"]["state"] == "ended", "the cancelled session")
    assert ends(other) == 0
    assert ends(launcher.member("101", script, 3)) == 0


def test_status_file_counts_sessions_iterations_and_stages(launcher: Launcher) -> None:
    runtime = launcher.threads("101", "102", options=("--trace", str(launcher.folder / "trace.json")))
    script = launcher.script(LOOP)
    for _ in range(2):
        assert ends(launcher.member("101", script, 20)) == 0
    until(lambda: launcher.status()["members"]["101"]["iterations"] == 40, "40 iterations")
    status = launcher.status()
    assert status["pid"] == runtime.pid
    assert status["discipline"] == "fair"
    assert status["members"]["102"]["state"] == "waiting"
    member = status["members"]["101"]
    assert (member["state"], member["sessions"], member["exit_code"]) == ("ended", 2, 0)
    assert list(member["stage_s"]) == ["load", "preprocess", "propagate", "synchronize"]
    assert 0.002 <= member["stage_s"]["propagate"] <= member["iteration_s"]
    runtime.terminate()
    assert ends(runtime) == 0
    slices = read_slices(launcher.folder / "trace.json")
    assert sum(piece.what == "propagate" for piece in slices) == 40
    assert all(piece.start_s <= piece.end_s and piece.member == "101" for piece in slices)
    assert abs(slices[-1].end_s - time.time()) < 3600


def test_second_script_of_a_member_at_the_same_time_runs_beside_the_thread(launcher: Launcher) -> None:
    launcher.threads("101")
    script = launcher.script(LOOP)
    first = launcher.member("101", script, 100_000)
    launcher.says("101")
    second = launcher.member("101", script, 1, into="second")
    assert ends(second) == 0
    assert int(launcher.says("second").split()[1]) == second.pid
    assert "already runs a script" in launcher.err("second")
    assert first.poll() is None


def test_sockets_vanish_with_the_runtime_and_stale_ones_do_no_harm(launcher: Launcher) -> None:
    first = launcher.threads("101")
    first.kill()
    ends(first)
    assert list(launcher.run_dir.iterdir())
    second = launcher.threads("101")
    assert launcher.ran("101", launcher.script("print('ok')")) == "ok\n"
    second.terminate()
    assert ends(second) == 0
    assert not list(launcher.run_dir.iterdir())
    launcher.grant = {}
    assert ends(launcher.member("101", "train.py")) == 0  # alone now


FIVE = json.dumps({"members": [{"job_id": str(each)} for each in range(5)], "discipline": "lockstep"})


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(runtime_words(["101"]), 1, "another runtime"), (["--group", FIVE], 2, "at most 4")],
    ids=["two cannot serve one member", "five cannot rotate"],
)
def test_a_runtime_that_cannot_start_says_why(launcher: Launcher, words: list[str], code: int, message: str) -> None:
    launcher.threads("101")
    command = [sys.executable, "-m", "muri.launcher.runtime.main", "--preload", "", *words]
    again = subprocess.run(
        command, env=launcher.environment, check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert again.returncode == code
    assert message in again.stderr
    assert "Traceback" not in again.stderr
    assert ends(launcher.member("101", launcher.script("print('still there')"))) == 0


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"members": [{"job_id": "x"}]}, "members.0.job_id: 'x' is not a job id"),
        ({"members": [{"job_id": "101"}, {"job_id": "101"}]}, "twice"),
        ({"members": [{"job_id": "101"}], "ordering": ["102"]}, "must hold each of the members"),
        ({"members": [{"job_id": "101", "solo_iteration_s": 0}]}, "greater than 0"),
        ({"members": [{"job_id": "101", "min_speed": 1}]}, "members.0.min_speed: 1 must be ≥ 0 and < 1"),
        ({"members": [{"job_id": "101", "predicted_speed": -1}]}, "members.0.predicted_speed: -1 must be greater"),
        ({"members": [{"job_id": "101", "predicted_speed": math.inf}]}, "inf is not a finite number"),
        ({"members": [{"job_id": "101", "predicted_speed": "fast"}]}, "'fast' is not a finite number"),
        ({"members": [{"job_id": "101", "steps": 2}]}, "members.0.steps: there is no such field"),
        ({"members": []}, "one at least"),
        ({"members": [{"job_id": "101"}], "python": "python3"}, "not a path from the root"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(group: dict, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_options(["--group", json.dumps(group)], {})


def test_a_signal_that_another_thread_takes_ends_the_runtime(launcher: Launcher) -> None:
    runtime = launcher.runtime("101")
    main = Path(f"/proc/{runtime.pid}")
    until(lambda: "pipe_read" in (main / "wchan").read_text(), "the main thread's wait")
    others = {int(task.name) for task in (main / "task").iterdir()} - {runtime.pid}
    ctypes.CDLL(None).tgkill(runtime.pid, others.pop(), int(signal.SIGTERM))
    assert ends(runtime) == 0


def test_cores_are_those_that_slurm_gave_and_the_kernel_allows() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert cpus_of({}) == allowed
    assert cpus_of({"SLURM_CPUS_ON_NODE": "1"}) == 1
    assert cpus_of({"SLURM_CPUS_ON_NODE": str(allowed + 8)}) == allowed
    assert cpus_of({"SLURM_CPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "1"}) == 1
    assert cpus_of({"SLURM_CPUS_ON_NODE": "4(x2)"}) == allowed


@pytest.mark.parametrize(
    ("isolation", "cores"),
    [
        pytest.param("process", os.cpu_count(), id="members at home bring their own CPUs"),
        pytest.param("thread", 1, id="members that are threads have those of the pilot"),
    ],
)
def test_cores_are_those_on_which_members_work(isolation: str, cores: int) -> None:
    group = {"members": [{"job_id": "101", "isolation": isolation}], "python": sys.executable}
    assert read_options(["--group", json.dumps(group)], {"SLURM_CPUS_PER_TASK": "1"}).node.cpus == cores
