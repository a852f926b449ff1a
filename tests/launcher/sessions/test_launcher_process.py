"""Members with a process of their own: real scripts in a real runtime."""

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from launcher_harness import LOOP, MURI, Launcher, ends, gone
from polling import until

OWN = {"MURI_ISOLATION": "process"}
HOLDER = """
    import os, time
    import muri
    with muri.stage("propagate"):
        print("started", os.getpid(), flush=True)
        time.sleep(1000)
"""
BYSTANDER = """
    import os, time
    print("started", os.getpid(), flush=True)
    time.sleep(1000)
"""


def start_bystander(launcher: Launcher, job: str) -> subprocess.Popen[str]:
    """Start a member that uses no resource: the only one there would not have to ask for any."""
    process = launcher.member(job, launcher.script(BYSTANDER, "bystander.py"), **OWN)
    started_pid(launcher, job)
    return process


def started_pid(launcher: Launcher, job: str) -> int:
    """Waits for the line "started PID" of a script."""
    return int(launcher.says(job).split()[1])


def test_everything_a_script_sees_is_as_alone(launcher: Launcher) -> None:
    text = """
        import json, os, resource, sys
        for name in ("MURI_GATE", "OMP_WAIT_POLICY"):  # what the runtime adds, see docs/sharing.md
            os.environ.pop(name, None)
        umask = os.umask(0)
        print(json.dumps([sys.argv, sys.path, sys.flags, os.getcwd(), umask, dict(os.environ), __name__, __file__]))
        names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        print(json.dumps([os.nice(0), {name: resource.getrlimit(getattr(resource, name)) for name in names}]))
        print(sys.stdin.read())
    """
    folder = launcher.script(text, "see.py", folder="own").parent
    launcher.runtime("101")
    environment = launcher.environment | OWN | {"SLURM_JOB_ID": "101", "FAVOURITE": "grün"}
    arguments = ["own/see.py", "--lr", "0.1"]
    options = {"cwd": folder.parent, "env": environment, "input": b"fed", "capture_output": True, "umask": 0o027}
    batch_script = ["/bin/sh", "-c", 'ulimit -Sn 777; ulimit -s 4096; ulimit -c 0; exec nice -n 5 "$@"', "sh"]
    commands = ([*batch_script, *MURI, "run", *arguments], [*batch_script, sys.executable, *arguments])
    shared, plain = (subprocess.run(command, check=True, **options) for command in commands)
    assert shared.stdout == plain.stdout
    assert json.loads(plain.stdout.splitlines()[0])[4] == 0o027
    nice, limits = json.loads(plain.stdout.splitlines()[1])
    assert nice == os.getpriority(os.PRIO_PROCESS, 0) + 5
    assert limits["RLIMIT_NOFILE"][0] == 777
    assert (limits["RLIMIT_STACK"], limits["RLIMIT_CORE"]) == ([4096 * 1024] * 2, [0, 0])
    assert shared.stderr == b""


def test_processes_and_a_thread_take_turns(launcher: Launcher) -> None:
    launcher.threads("101", "102", "103", options=("--trace", str(launcher.folder / "trace.jsonl")))
    loop = launcher.script(LOOP)
    processes = [launcher.member(job, loop, "60", **OWN) for job in ("101", "102")]
    processes.append(launcher.member("103", loop, "60"))
    assert [ends(process) for process in processes] == [0, 0, 0]
    assert len({started_pid(launcher, job) for job in ("101", "102", "103")}) == 3
    until(lambda: {m["state"] for m in launcher.status()["members"].values()} == {"ended"}, "the last status")
    members = launcher.status()["members"]
    assert [members[job]["iterations"] for job in ("101", "102", "103")] == [60, 60, 60]
    assert [members[job]["isolation"] for job in ("101", "102", "103")] == ["process", "process", "thread"]
    assert members["101"]["stage_s"]["propagate"] > 0.0015
    held = [json.loads(line) for line in (launcher.folder / "trace.jsonl").read_text().splitlines()]
    for stage in ("propagate", "synchronize"):  # of the CPU there may be several tokens
        spans = sorted((e["start_s"], e["end_s"], e["member"]) for e in held if e["stage"] == stage)
        assert {member for _, _, member in spans} == {"101", "102", "103"}
        overlaps = [(a, b) for a, b in itertools.pairwise(spans) if b[0] < a[1] - 1e-4]
        assert overlaps == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.thorough)])
def test_death_of_a_process_frees_what_it_holds_and_harms_nobody(launcher: Launcher, number: int) -> None:
    launcher.runtime("101", "102", "103", "104")
    bystander = start_bystander(launcher, "104")
    holder = launcher.member("101", launcher.script(HOLDER, "hold.py"), **OWN)
    pid = started_pid(launcher, "101")
    loop = launcher.script(LOOP)
    others = [launcher.member("102", loop, "20", **OWN), launcher.member("103", loop, "20")]
    started_pid(launcher, "102")
    os.kill(pid, number)
    assert ends(holder) == 128 + number
    assert [ends(process) for process in others] == [0, 0]
    bystander.send_signal(signal.SIGTERM)
    assert ends(bystander) == 143


WAITER = """
    import os, time
    import muri
    with muri.stage("load"):  # imports: Python drops a KeyboardInterrupt that comes up in one of their callbacks
        pass
    print("started", os.getpid(), flush=True)
    with muri.stage("propagate"):
        print("granted", flush=True)
        time.sleep(1000)  # a signal may come later than the grant
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_a_process_that_waits_for_a_resource(launcher: Launcher, number: int, code: int) -> None:
    launcher.runtime("101", "102", "103")
    start_bystander(launcher, "103")
    holder = launcher.member("101", launcher.script(HOLDER, "hold.py"), **OWN)
    holder_pid = started_pid(launcher, "101")
    waiter = launcher.member("102", launcher.script(WAITER), **OWN)
    pid = started_pid(launcher, "102")
    waiter.send_signal(number)
    if number == signal.SIGINT:  # KeyboardInterrupt comes up once the wait is over
        os.kill(holder_pid, signal.SIGTERM)
        assert ends(holder) == 143
    assert ends(waiter) == code
    assert number == signal.SIGINT or "granted" not in launcher.out("102")
    assert gone(pid)


FAMILY = """
    import os, subprocess, sys, time
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
    print("started", child.pid, os.getpid(), flush=True)
    time.sleep(float(sys.argv[1]))
"""


def test_what_a_script_leaves_running_is_ended(launcher: Launcher) -> None:
    launcher.runtime("101")
    assert ends(launcher.member("101", launcher.script(FAMILY), "0", **OWN)) == 0
    assert gone(started_pid(launcher, "101"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_end_of_the_runtime_ends_process_and_grandchildren(launcher: Launcher, number: int) -> None:
    runtime = launcher.runtime("101")
    process = launcher.member("101", launcher.script(FAMILY), "1000", **OWN)
    started_pid(launcher, "101")
    pids = list(map(int, launcher.out("101").split()[1:]))
    runtime.send_signal(number)
    until(lambda: all(map(gone, pids)), "the end of all processes")
    until(lambda: "requeueing job 101" in launcher.err("101"), "the member's way back to the queue")
    assert ends(process) == 75, "no scheduler takes the job back here: it must not seem done"


def test_only_a_member_that_was_planned_so_is_a_thread_and_its_script_has_a_veto(launcher: Launcher) -> None:
    runtime = launcher.runtime("101", "102", "103", options=("--isolation", "102=thread,103=thread"))
    script = launcher.script("import os; print(os.getpid())")
    assert int(launcher.ran("101", "--isolation", "thread", script)) != runtime.pid
    assert int(launcher.ran("102", script)) == runtime.pid
    assert int(launcher.ran("103", "--isolation", "process", script)) != runtime.pid
    assert ends(launcher.member("101", script, MURI_ISOLATION="proces")) == 2
    assert "'thread', 'process'" in launcher.err("101")
