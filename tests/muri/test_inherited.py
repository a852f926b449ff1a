"""Each process of Muri's, started with all that it inherits set oddly: it does its work, and ends as it should."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import oddly
import psutil
import pytest
from polling import DEADLINE_S, until

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.records import comment_tags as tags

TAG = tags.STATE_PREFIX + tags.format_state(tags.MemberState(900, tags.Original("gres/gpu:1", "", 1, 1, 0, 0)))
MURI = (sys.executable, "-c", "from muri.cli import main; main()")
CONTROLLER = (sys.executable, "-c", "from muri.slurm_plugin.cli.admin import controller_main as main; main()")
SEE = """\
import json, os, resource, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
try:
    place = os.getcwd()
except FileNotFoundError:
    place = "deleted"
limits = [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("NOFILE", "CORE", "FSIZE")]
seen = [status["SigBlk"], status["SigIgn"], os.umask(0o077), place, limits]
files = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)] + [os.path.exists("/proc/self/fd/9")]
with open(sys.argv[1], "w") as file:
    json.dump([seen, files], file)
sys.exit(7)
"""
PILOT = """\
import sys
from muri.commands import run_command
from muri.inherited import settle_own
from muri.slurm_plugin.node import pilot
pilot.why_missing = lambda environment: ""  # as if root had left its file
settle_own()
sys.exit(run_command(pilot.main))
"""
# The step is not a child of srun, and begins as oddly as the pilot job; srun needs its directory.
SRUN = """#!/bin/sh
case "$(readlink /proc/$$/cwd)" in *deleted*) exit 1 ;; esac
while [ "${{1#-}}" != "$1" ]; do shift; done
SLURMD_NODENAME=n1 SLURM_JOB_ID=900 CUDA_VISIBLE_DEVICES=0 setsid {oddly} "$@" &
wait $!
"""
SQUEUE = """#!/bin/sh
echo asked >> {folder}/asked
case "$*" in *--jobs=*) ;; *) exit 1 ;; esac
state=RUNNING; [ -e {folder}/ended ] && state=COMPLETED
id=${{*##*--jobs=}}; id=${{id%% *}}
printf '%-16s%-16s%-32s%-32s%-32768s%-32768s\\n' $id $id N/A $state '' '{tag}'
"""
SCONTROL = """#!/bin/sh
case "$*" in
    "write batch_script"*) cat {folder}/batch ;;
    "show config") echo "SLURM_VERSION = 25.11.2" ;;
    update*) echo "$*" >> {folder}/updates ;;
    *) exit 1 ;;
esac
"""


class Odd:
    """Runs Muri's processes oddly, with a umask, beside a stand-in for Slurm."""

    def __init__(self, folder: Path, run_dir: str, umask: str) -> None:
        self.folder, self.run_dir = folder, Path(run_dir)
        self.oddly = [sys.executable, oddly.__file__, umask]
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "see.py").write_text(SEE)
        for name, text in {"srun": SRUN, "squeue": SQUEUE, "scontrol": SCONTROL}.items():
            (folder / name).write_text(text.format(oddly=" ".join(self.oddly), folder=folder, tag=TAG))
            (folder / name).chmod(0o755)
        own = {"MURI_RUN_DIR": run_dir, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MURI"))} | own

    def start(self, *command: object, **variables: str) -> "subprocess.Popen[bytes]":
        words = [*self.oddly, *map(str, command)]
        self.processes.append(subprocess.Popen(words, env=self.environment | variables))
        return self.processes[-1]

    def code(self, *command: object, **variables: str) -> int:
        return self.start(*command, **variables).wait(DEADLINE_S)

    def seen(self, *command: object, **variables: str) -> Any:
        """The view of a script that a command runs."""
        assert self.code(*command, self.folder / "see.py", self.folder / "seen", **variables) == 7
        text = (self.folder / "seen").read_text()
        (self.folder / "seen").unlink()
        return json.loads(text)


@pytest.fixture(params=["0", "777"])
def odd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Odd]:
    """For processes that inherit an open umask, and one that forbids all."""
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as run_dir:
        yield (odd := Odd(tmp_path, run_dir, request.param))
        for process in odd.processes:  # where the test has failed
            for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                each.kill()
            process.kill()


def test_a_script_alone_and_in_a_dry_run_sees_what_python_alone_would_show_it(odd: Odd) -> None:
    plain = odd.seen(sys.executable)
    assert odd.seen(*MURI, "run") == plain
    result = odd.folder / "result.json"
    in_dry_run, files = odd.seen(*MURI, "run", MURI_DRY_RUN="auto", MURI_DRY_RUN_RESULT=str(result))
    assert (in_dry_run, files[:3]) == (plain[0], plain[1][:3])
    assert "exit code 7" in json.loads(result.read_text())["error"]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_pilot_job_serves_a_member_and_ends_with_it(odd: Odd, isolation: Literal["process", "thread"]) -> None:
    group = GroupSpec(members=(MemberSpec("101", isolation=isolation),), poll_s=0.2).to_text()
    pilot = odd.start(sys.executable, "-c", PILOT, "--group", group, SLURM_JOB_ID="900")
    status = odd.run_dir / "pilot-900.json"
    until(lambda: status.exists() or pilot.poll() is not None, "the runtime")
    seen = odd.seen(*MURI, "run", SLURM_JOB_ID="101", MURI_PILOT="900")
    if isolation == "process":
        assert seen == odd.seen(sys.executable)
    (odd.folder / "ended").touch()
    assert pilot.wait(DEADLINE_S) == 0
    assert "pilot job 900 ends with code 0" in status.with_suffix(".log").read_text()


def test_what_stays_muris_own_gets_every_signal_whatever_its_parent_has_blocked(odd: Odd) -> None:
    count = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    assert odd.code(sys.executable, "-c", count) > 0
    assert odd.code(sys.executable, "-c", f"from muri.inherited import settle_own; settle_own(); {count}") == 0


def test_a_dry_run_job_publishes_what_it_has_measured(odd: Odd) -> None:
    result = "$MURI_DRY_RUN_RESULT"  # in one step, as it is read as soon as it is there
    (odd.folder / "batch").write_text(f"#!/bin/sh\necho '{{\"load_s\": 1}}' > {result}.new; mv {result}.new {result}\n")
    options = ("--target", "7", "--token", "t", "--limits", "auto", "--time-limit-s", "240")
    assert odd.code(sys.executable, "-m", "muri.slurm_plugin.node.dry_run", *options, SLURM_JOB_ID="9") == 0
    assert '"load_s":1' in (odd.folder / "updates").read_text()


def test_a_controller_works_in_private_until_it_is_told_to_stop(odd: Odd) -> None:
    config, state, asked = (odd.folder / name for name in ("muri.yaml", "state", "asked"))
    config.write_text(f"state_dir: {state}\nstatus_dir: {odd.folder}/status\npolicy: muri-s\n")
    config.chmod(0o644)
    controller = odd.start(*CONTROLLER, "--interval", "0.2", "--config", config)
    until(lambda: (asked.exists() and asked.read_text().count("\n") > 2) or controller.poll() is not None, "cycles")
    controller.send_signal(signal.SIGTERM)
    assert controller.wait(DEADLINE_S) == 0
    assert [path.stat().st_mode & 0o777 for path in (state, state / "controller.lock")] == [0o700, 0o600]
    assert odd.code(*MURI, "drain", "--config", config) == 1  # that squeue has failed is not an empty queue
