"""What of a job is found and killed at its pilot's end, in real cgroups of both versions and without any."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from endings import COMET, NODE, STUBBORN, USER, JobCgroup
from polling import until

Count = Callable[..., int]


def asked(program: Path, *words: object) -> int:
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture
def count(try_end: Path) -> Count:
    """Count a job's processes, or kill and count them."""

    def call(cgroup: object, *, killing: bool = False, uid: int = USER) -> int:
        return asked(try_end, "kill" if killing else "count", 7, uid, NODE, cgroup)

    return call


def kill_all(count: Count, job: JobCgroup) -> None:
    until(lambda: count(job.path, killing=True) == 0, "the end of the job's processes")


HIDING = {
    "a session of its own": "setsid sh -c 'echo; exec sleep 600' & wait",
    "a daemon": "(setsid sh -c 'cd /; exec sleep 600 </dev/null >/dev/null 2>&1' &); echo; sleep 600",
    "one that ignores all": "trap '' TERM INT HUP QUIT USR1; echo; while :; do sleep 600; done",
    "one that stops itself": "echo; kill -STOP $$",
}


@pytest.mark.parametrize("how", HIDING)
def test_no_process_of_the_users_hides(count: Count, job: JobCgroup, how: str) -> None:
    stepd = job.stepd()
    job.start("sh", "-c", HIDING[how])
    assert count(job.path) > 0
    kill_all(count, job)
    assert job.pids() == {stepd.pid}


def test_wherever_below_the_job_it_is(count: Count, job: JobCgroup) -> None:
    for below in ("step_0/task_0/mine/deeper", "step_0", "."):
        for root in {job.path, *job.roots}:
            (root / below).mkdir(parents=True, exist_ok=True)
        job.start("sh", "-c", HIDING["one that ignores all"], into=below)
    kill_all(count, job)
    assert job.pids() == set()


def test_processes_that_fork_faster_than_they_can_be_killed(count: Count, job: JobCgroup) -> None:
    stepd = job.stepd()
    for _ in range(3):
        job.start(sys.executable, "-c", COMET, user=None)
    kill_all(count, job)
    assert job.pids() == {stepd.pid}


def test_a_task_that_has_not_become_its_users_yet(count: Count, job: JobCgroup) -> None:
    """It would run the user's program in a moment."""
    stepd = job.stepd("(kill -STOP $BASHPID) &")
    until(lambda: len(job.pids()) == 2, "the task")
    kill_all(count, job)
    assert job.pids() == {stepd.pid}


def test_a_users_program_with_the_name_of_slurms(count: Count, job: JobCgroup) -> None:
    job.stepd(user=USER)
    assert count(job.path) == 1
    kill_all(count, job)
    assert job.pids() == set()


def test_counting_kills_nothing_and_needs_no_cgroup_to_be_there(count: Count, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    assert count(job.path) > 0
    assert process.poll() is None
    assert count(f"{job.path}9", killing=True) == 0
    link = Path(os.environ.get("TMPDIR", "/tmp"), f"link-{os.getpid()}")
    link.symlink_to(job.path)
    try:
        assert count(link, killing=True) == 0
    finally:
        link.unlink()
    assert process.poll() is None


def task(environment: dict[str, str], user: int | None = USER) -> subprocess.Popen[bytes]:
    options = {} if os.geteuid() or user is None else {"user": user, "group": user}
    return subprocess.Popen(["/bin/sleep", "600"], env=environment, cwd="/", start_new_session=True, **options)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads others' environments")
def test_without_a_cgroup_tasks_are_known_by_how_they_were_started(count: Count) -> None:
    own = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": NODE}
    theirs = [
        task({**own, "SLURMD_NODENAME": "n2"}),
        task({"SLURM_JOB_ID": "7"}),  # salloc's shell
        task({**own, "SLURM_JOB_ID": "77"}),
        task(own, user=USER - 1),
        task(own, user=None),
    ]
    tasks = [task(own), task({**own, "X": "y" * 100_000})]
    try:
        until(lambda: count("") == 2, "both tasks")
        until(lambda: count("", killing=True) == 0, "their end")
        assert [each.wait() for each in tasks] == [-signal.SIGKILL] * 2
        assert [each.poll() for each in theirs] == [None] * len(theirs)
    finally:
        for each in (*theirs, *tasks):
            each.kill()
            each.wait()


#: A process may show any part of its memory as its environment, here 9 MiB without an end before the words that count.
LARGE_ENVIRONMENT = f"""
import ctypes, mmap, struct, time
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
words = b"\\0SLURM_JOB_ID=7\\0SLURMD_NODENAME={NODE}\\0"
memory = mmap.mmap(-1, 9 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = b"x" * (len(memory) - len(words)) + words
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
stat = [int(word) for word in open("/proc/self/stat").read().rsplit(")", 1)[1].split()[1:]]
code, end_code, stack, data, end_data, brk, argument, end_argument = stat[22:25] + stat[41:46]
where = [code, end_code, data, end_data, brk, libc.sbrk(0), stack, argument, end_argument, start, start + len(memory)]
PR_SET_MM, PR_SET_MM_MAP = 35, 14
print(libc.prctl(PR_SET_MM, PR_SET_MM_MAP, struct.pack("12QIi", *where, 0, 0, -1), 104, 0), flush=True)
time.sleep(600)
"""


def test_a_made_environment_is_not_read_without_end(count: Count) -> None:
    line = [sys.executable, "-c", LARGE_ENVIRONMENT]
    with subprocess.Popen(line, env={}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        done = process.stdout.readline()
        found = count("", uid=os.geteuid())
        process.kill()
    if done != "0\n":
        pytest.skip("this kernel does not let a process choose its own environment")
    assert found == 0
