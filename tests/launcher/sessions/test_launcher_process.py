"""Members whose scripts run in their own jobs: real scripts and a real runtime."""

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from launcher_harness import LOOP, MURI, Launcher, ends, gone
from polling import until

from examples.demo.timeline import read_slices

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


def test_everything_a_script_sees_is_as_alone_and_so_is_what_its_job_sees_of_it(launcher: Launcher) -> None:
    text = """
        import json, os, resource, signal, sys
        for name in ("MURI_GATE", "OMP_WAIT_POLICY"):  # what the runtime adds, see docs/sharing.md
            os.environ.pop(name, None)
        umask = os.umask(0)
        print(json.dumps([sys.argv, sys.path, sys.flags, os.getcwd(), umask, dict(os.environ), __name__, __file__]))
        names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        print(json.dumps([os.nice(0), {name: resource.getrlimit(getattr(resource, name)) for name in names}]))
        numbers = sorted(signal.valid_signals())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        print([(int(n), n in blocked, signal.getsignal(n) == signal.SIG_IGN) for n in numbers])
        print(sys.stdin.read(), os.getppid(), os.getsid(0), os.getpgid(0))
        sys.exit(7)
    """
    folder = launcher.script(text, "see.py", folder="own").parent
    launcher.runtime("101")
    environment = launcher.environment | launcher.grant | {"SLURM_JOB_ID": "101", "FAVOURITE": "grün"}
    arguments = ["own/see.py", "--lr", "0.1"]
    options = {"cwd": folder.parent, "env": environment, "input": b"fed", "capture_output": True, "umask": 0o027}
    strange = "trap '' HUP; ulimit -Sn 777; ulimit -s 4096; ulimit -c 0; exec nice -n 5"
    batch_script = ["/bin/sh", "-c", f'{strange} env --block-signal=USR2 "$@"', "sh"]
    commands = ([*batch_script, *MURI, "run", *arguments], [*batch_script, sys.executable, *arguments])
    shared, plain = (subprocess.run(command, check=False, **options) for command in commands)
    assert shared.stdout == plain.stdout
    assert (shared.returncode, plain.returncode, shared.stderr) == (7, 7, b"")
    assert json.loads(plain.stdout.splitlines()[0])[4] == 0o027
    nice, limits = json.loads(plain.stdout.splitlines()[1])
    assert nice == os.getpriority(os.PRIO_PROCESS, 0) + 5
    assert limits["RLIMIT_NOFILE"][0] == 777
    assert (limits["RLIMIT_STACK"], limits["RLIMIT_CORE"]) == ([4096 * 1024] * 2, [0, 0])
    assert all(signals in plain.stdout for signals in (b"(1, False, True)", b"(12, True, False)"))
    until(lambda: launcher.status()["members"]["101"]["exit_code"] == 7, "the runtime to know the exit code")


def test_processes_and_a_thread_take_turns(launcher: Launcher) -> None:
    launcher.threads("101", "102", "103", options=("--trace", str(launcher.folder / "trace.json")))
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
    held = read_slices(launcher.folder / "trace.json")
    for stage in ("propagate", "synchronize"):  # of the CPU there may be several tokens
        spans = sorted((p.start_s, p.end_s, p.member) for p in held if p.what == stage)
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
    assert ends(holder) == -number
    assert [ends(process) for process in others] == [0, 0]
    until(lambda: launcher.status()["members"]["101"]["state"] == "ended", "the runtime to see the end")
    assert launcher.status()["members"]["101"]["exit_code"] is None
    bystander.send_signal(signal.SIGTERM)
    assert ends(bystander) == -signal.SIGTERM


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_process_that_waits_for_a_resource(launcher: Launcher, number: int) -> None:
    launcher.runtime("101", "102", "103")
    start_bystander(launcher, "103")
    holder = launcher.member("101", launcher.script(HOLDER, "hold.py"), **OWN)
    holder_pid = started_pid(launcher, "101")
    waiter = launcher.member("102", launcher.script(WAITER), **OWN)
    pid = started_pid(launcher, "102")
    waiter.send_signal(number)
    if number == signal.SIGINT:  # KeyboardInterrupt comes up once the wait is over
        os.kill(holder_pid, signal.SIGTERM)
        assert ends(holder) == -signal.SIGTERM
    assert ends(waiter) == -number
    assert number == signal.SIGINT or "granted" not in launcher.out("102")
    assert gone(pid)


LEAVES_A_CHILD = """
    import os, sys, time
    import muri
    for step in muri.batches(range(3)):
        with muri.stage("propagate"):
            pass
    if os.fork() == 0:  # it holds the gate's socket open
        print("child", os.getpid(), flush=True)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        time.sleep(1000)
"""


def test_the_next_script_of_a_job_takes_turns_at_once_whatever_the_last_has_left_running(launcher: Launcher) -> None:
    launcher.runtime("101")
    script = launcher.script(LEAVES_A_CHILD)
    for _ in range(3):
        assert ends(launcher.member("101", script, PYTHONWARNINGS="ignore")) == 0
    assert launcher.err("101") == ""
    until(lambda: launcher.status()["members"]["101"]["iterations"] == 9, "all iterations")
    assert launcher.status()["members"]["101"]["sessions"] == 3
    for line in launcher.out("101").splitlines():
        os.kill(int(line.split()[1]), signal.SIGKILL)


WORKS_ON = """
    import os, sys, time
    import muri
    print("started", flush=True)
    for step in muri.batches(range(10**9)):
        with muri.stage("propagate"):
            pass
        if os.path.exists("over"):
            break
    print("finished")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_runtime_opens_the_gate_of_who_waits_and_of_who_works(launcher: Launcher, number: int) -> None:
    """Whether their jobs go on is the pilot job's business."""
    runtime = launcher.runtime("101", "102", "103")
    start_bystander(launcher, "103")
    holder = launcher.member("101", launcher.script(HOLDER, "hold.py"))
    started_pid(launcher, "101")
    waiter = launcher.member("102", launcher.script(WORKS_ON), PYTHONWARNINGS="ignore")
    launcher.says("102")
    runtime.send_signal(number)
    ends(runtime)
    (launcher.folder / "over").touch()
    assert ends(waiter) == 0, launcher.err("102")
    assert launcher.out("102") == "started\nfinished\n"
    assert holder.poll() is None
    assert launcher.err("102") == ""


def test_a_second_script_of_a_job_at_the_same_time_shares_plainly(launcher: Launcher) -> None:
    launcher.runtime("101", "102")
    start_bystander(launcher, "102")
    holder = launcher.member("101", launcher.script(HOLDER, "hold.py"))
    started_pid(launcher, "101")
    second = launcher.member("101", launcher.script(LOOP), "5", into="second")
    assert ends(second) == 0  # although the first one holds the GPU
    assert launcher.err("second") == (
        "muri: job 101 already runs a script in its group; this script shares the GPU without turns\n"
    )
    assert launcher.status()["members"]["101"]["sessions"] == 1
    assert holder.poll() is None


def test_a_script_in_another_mount_namespace_takes_turns_but_is_no_thread(launcher: Launcher) -> None:
    """As in a container, or with a /tmp of the job's own."""
    if subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("this user may not make a mount namespace here")
    launcher.warm = False
    launcher.threads("101")
    member = launcher.member("101", launcher.script(LOOP), "5", command=("unshare", "--mount", *MURI, "run"))
    assert ends(member) == 0, launcher.err("101")
    until(lambda: launcher.status()["members"]["101"]["iterations"] == 5, "its iterations")
    assert launcher.status()["members"]["101"]["isolation"] == "process"
    assert started_pid(launcher, "101") == member.pid


def test_only_a_member_that_was_planned_so_is_a_thread_and_its_script_has_a_veto(launcher: Launcher) -> None:
    runtime = launcher.runtime("101", "102", "103", options=("--isolation", "102=thread,103=thread"))
    script = launcher.script("import os; print(os.getpid())")
    for job, isolation in (("101", "thread"), ("103", "process")):
        member = launcher.member(job, "--isolation", isolation, script)
        assert ends(member) == 0
        assert int(launcher.out(job)) == member.pid
    assert int(launcher.ran("102", script)) == runtime.pid
    assert ends(launcher.member("101", script, MURI_ISOLATION="proces")) == 2
    assert "'thread', 'process'" in launcher.err("101")
