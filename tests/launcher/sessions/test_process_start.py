"""Supervisors of members' processes: how they come, as children or as steps, and what happens when they do not."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from launcher_harness import Launcher, ends, gone, short_folder
from polling import until

from muri.errors import UsageError
from muri.launcher.sessions import process_start
from muri.launcher.sessions.process_start import ChildStarter, Starter, StartError, StepStarter, supervised

OWN = {"MURI_ISOLATION": "process"}
WAITS = """
    import os, signal, sys, time
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
    print("started", os.getpid(), os.getppid(), flush=True)
    while True:
        time.sleep(0.01)
"""
SRUN = """\
#!/bin/sh
# The step is not a child of srun, and has GPUs, an environment and a directory of its own.
echo "$@" >> {folder}/srun.words
echo $$ > {folder}/srun.pid
env | grep -c '^SLURM_' >> {folder}/srun.variables
while [ "${{1#-}}" != "$1" ]; do shift; done
cd /tmp && CUDA_VISIBLE_DEVICES=3 SLURM_JOB_ID=900 SLURM_STEP_ID=7 setsid "$@" &
wait
"""
TELL_LIMITS = "ulimit -Sn; ulimit -Hn; nice"
WITH_LESS = """
import ctypes, os, resource, sys
PR_CAPBSET_DROP, CAP_SYS_NICE, CAP_SYS_RESOURCE = 24, 23, 24
for capability in (CAP_SYS_NICE, CAP_SYS_RESOURCE):  # which root would have
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.nice(5)
resource.setrlimit(resource.RLIMIT_NOFILE, (250, 300))
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
os.execv(sys.argv[1], sys.argv[1:])
"""


class WithLess(ChildStarter):
    """Supervisors that are nicer, may open few files, and lack the privilege to change that."""

    def command(self, member: str, supervisor: Sequence[str]) -> list[str]:
        """The supervisor after it has given all that up."""
        return [sys.executable, "-c", WITH_LESS, *super().command(member, supervisor)]


def own_nice() -> int:
    """This process's niceness."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def pids(launcher: Launcher, job: str) -> tuple[int, int]:
    """Of a script that has started, and of its supervisor."""
    _, script, supervisor = launcher.says(job).split()
    return int(script), int(supervisor)


@pytest.fixture
def steps(launcher: Launcher) -> Launcher:
    """A launcher whose runtime starts members as steps, by a stand-in for srun."""
    srun = launcher.folder / "srun"
    srun.write_text(SRUN.format(folder=launcher.folder))
    srun.chmod(0o755)
    launcher.environment["PATH"] = f"{launcher.folder}:{os.environ['PATH']}"
    return launcher


def runtime_with_steps(launcher: Launcher, *members: str) -> None:
    plain = dict(launcher.environment)
    launcher.environment |= {"SLURM_JOB_ID": "900", "SLURMD_NODENAME": "n1", "CUDA_VISIBLE_DEVICES": "0"}
    launcher.runtime(*members, options=("--steps",))
    launcher.environment = plain


def test_a_step_has_its_own_gpus_and_the_rest_is_the_members(steps: Launcher) -> None:
    script = steps.script("""
        import os, sys
        print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_STEP_ID"))
        print(os.environ["MINE"], os.getcwd(), sys.argv[1:])
        sys.exit(7)
    """)
    runtime_with_steps(steps, "101")
    assert ends(steps.member("101", script, "a b", MINE="own", CUDA_VISIBLE_DEVICES="NoDevFiles", **OWN)) == 7
    assert steps.out("101") == f"3 101 None\nown {steps.folder} ['a b']\n", steps.err("101")
    words = (steps.folder / "srun.words").read_text().split()
    assert {"--jobid=900", "--nodelist=n1", "--job-name=101", "--overlap", "--mem=0", "--gres=gpu:1"} <= set(words)
    assert (steps.folder / "srun.variables").read_text() == "0\n"


def test_a_step_outlives_its_srun(steps: Launcher) -> None:
    runtime_with_steps(steps, "101")
    member = steps.member("101", steps.script(WAITS), **OWN)
    script, supervisor = pids(steps, "101")
    srun = int((steps.folder / "srun.pid").read_text())
    until(lambda: gone(srun), "the end of srun")
    assert not gone(script)
    assert not gone(supervisor)
    member.send_signal(signal.SIGUSR1)
    assert ends(member) == 5


def test_a_member_whose_step_cannot_start_goes_back_to_the_queue(steps: Launcher) -> None:
    (steps.folder / "srun").write_text("#!/bin/sh\necho 'srun: error: no such job' >&2\nexit 1\n")
    runtime_with_steps(steps, "101")
    assert ends(steps.member("101", steps.script("print('never')"), **OWN)) == 75
    assert steps.out("101") == ""
    assert "its step did not start (code 1)" in steps.err("101")
    assert "srun: error: no such job" in (steps.folder / "runtime.log").read_text()


def test_a_member_whose_supervisor_is_killed_goes_back_to_the_queue_and_its_script_ends(launcher: Launcher) -> None:
    launcher.runtime("101", "102")
    member = launcher.member("101", launcher.script(WAITS), **OWN)
    script, supervisor = pids(launcher, "101")
    os.kill(supervisor, signal.SIGKILL)
    assert ends(member) == 75
    assert "killed together with the one that watches over it" in launcher.err("101")
    until(lambda: gone(script), "the end of the script")
    assert ends(launcher.member("102", launcher.script("print('goes on')", "other.py"), **OWN)) == 0


def test_a_stopped_supervisor_can_be_cancelled(launcher: Launcher) -> None:
    launcher.runtime("101", options=("--hang-timeout-s", "0"))
    member = launcher.member("101", launcher.script(WAITS), **OWN)
    script, supervisor = pids(launcher, "101")
    os.kill(supervisor, signal.SIGSTOP)
    member.kill()  # the runtime then ends the script, in the end by force
    until(lambda: gone(script), "the end of the script")


def test_a_signal_to_all_of_a_step_is_the_scripts_matter(launcher: Launcher) -> None:
    """As Slurm sends it: to the supervisor and to the script. What the script makes of it is its exit code."""
    launcher.runtime("101")
    member = launcher.member("101", launcher.script(WAITS), **OWN)
    script, supervisor = pids(launcher, "101")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(supervisor, number)
    os.kill(script, signal.SIGUSR1)
    assert ends(member) == 5


def test_whoever_only_looks_whether_somebody_listens_is_no_supervisor() -> None:
    with ExitStack() as opened:
        folder = Path(opened.enter_context(short_folder()))
        address = folder / "start.sock"
        listener = opened.enter_context(process_start._listening(folder, address))
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(os.fspath(address))
        stranger.close()
        process = subprocess.Popen(["true"])
        process.wait()
        with pytest.raises(StartError, match="did not start \\(code 0\\)"):
            process_start._await_supervisor(listener, process, "it")
    assert not address.exists()


def run_supervised(folder: Path, shell: str, starter: Starter | None = None, **wanted: object) -> tuple[int, str]:
    """Run a shell's command in a folder under a supervisor; its exit code and both outputs."""
    command = {"command": ["/bin/sh", "-c", shell], "environment": {}, "own_variables": [], "cwd": str(folder)}
    output = folder / "output"
    with short_folder() as run_dir, Path(os.devnull).open("r+b") as null, output.open("ab") as written:
        with supervised(starter or ChildStarter(), Path(run_dir), "101") as supervisor:
            files = [null, written, written, null, null]
            supervisor.run({**command, "umask": 0o027, "traced": False, **wanted}, [file.fileno() for file in files])
            assert supervisor.started() > 0
            ended = supervisor.ended()
            supervisor.await_end()
        assert not list(Path(run_dir).iterdir())
    assert ended is not None
    assert not ended[1]
    return ended[0], output.read_text()


def test_a_supervisor_starts_and_ends_what_it_is_told(tmp_path: Path) -> None:
    limits = {"RLIMIT_NOFILE": [200, 300], "RLIMIT_OF_TOMORROW": [1, 1], "setrlimit": [1, 1]}
    code, output = run_supervised(tmp_path, f"umask; {TELL_LIMITS}; exit 3", limits=limits, nice=own_nice() + 3)
    assert (code, output.split()) == (3, ["0027", "200", "300", str(own_nice() + 3)])


@pytest.mark.parametrize(
    ("wanted", "soft"),
    [({}, "250"), ({"limits": {}, "nice": None}, "250"), ({"limits": {"RLIMIT_NOFILE": [200, 400]}}, "200")],
    ids=["sent by an older member", "none are sent", "a hard limit is not worth a line"],
)
def test_limits_that_are_not_wanted_are_those_of_the_supervisor(
    tmp_path: Path, wanted: dict[str, object], soft: str
) -> None:
    code, output = run_supervised(tmp_path, TELL_LIMITS, WithLess(), **wanted)
    assert (code, output.split()) == (0, [soft, "300", str(own_nice() + 5)])


def test_limits_that_cannot_be_had_are_told_and_the_command_runs(tmp_path: Path) -> None:
    limits = {"RLIMIT_NOFILE": [400, resource.RLIM_INFINITY], "RLIMIT_CORE": [0, 0]}
    code, output = run_supervised(tmp_path, TELL_LIMITS, WithLess(), limits=limits, nice=own_nice())
    said, *limits_now = output.splitlines()
    assert (code, limits_now) == (0, ["300", "300", str(own_nice() + 5)])
    assert said == (
        f"muri: unlike in the job's own batch script, niceness is {own_nice() + 5}, not {own_nice()}, "
        "RLIMIT_NOFILE is 300 (hard 300), not 400 (hard unlimited)"
    )


def test_limits_that_forbid_to_tell_do_not_stop_the_command(tmp_path: Path) -> None:
    limits = {"RLIMIT_NOFILE": [400, 500], "RLIMIT_FSIZE": [0, 0]}
    code, output = run_supervised(tmp_path, "exit 4", WithLess(), limits=limits, nice=None)
    assert (code, output) == (4, "")


def test_a_forked_process_keeps_no_connection_open() -> None:
    """Or a member's process would outlive a runtime that dies while a thread's worker lives on."""
    with short_folder() as folder, supervised(ChildStarter(), Path(folder), "101") as supervisor:
        connection = supervisor._control.fileno()
        worker = os.fork()
        if worker == 0:
            try:
                os.fstat(connection)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(worker, 0)[1] == 0
        supervisor._control.shutdown(socket.SHUT_RDWR)


def test_steps_need_a_slurm_job_around_them() -> None:
    with pytest.raises(UsageError, match="SLURMD_NODENAME"):
        StepStarter.from_environment({"SLURM_JOB_ID": "1"}, 1)
